"""A drafter that starts from another one: P-EAGLE from EAGLE-3, either from an earlier self, maybe with more layers."""

from dataclasses import dataclass

import torch

from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.errors import CheckpointError


@dataclass(frozen=True)
class WarmStart:
    """What became of each tensor."""

    taken: tuple[str, ...]
    """Copied from the source."""
    new: tuple[str, ...]
    """Tensors (rows) that the source lacks, each with how it starts."""
    left: tuple[str, ...]
    """Tensors of the source that this drafter has no place for."""


def check_source(source: DrafterConfig, where: str, verifier: str, hidden_size: int, vocab_size: int) -> None:
    """Refuse a source that was made for another kind of verifier than this one, of these sizes.

    Raises:
        CheckpointError: widths or vocabularies differ.
    """
    sizes = ("hidden size", hidden_size, source.hidden_size), ("vocabulary", vocab_size, source.vocab_size)
    for name, mine, its in sizes:
        if mine != its:
            raise CheckpointError(f"{where}: its {name} is {its}, that of {verifier} is {mine}; it cannot start there")


def check_layers(source: DrafterConfig, where: str, aux_layer_ids: tuple[int, ...]) -> None:
    """Refuse a source that read other layers of the verifier.

    Raises:
        CheckpointError: layer ids differ.
    """
    if source.aux_layer_ids != aux_layer_ids:
        raise CheckpointError(
            f"{where}: it reads layers {_listed(source.aux_layer_ids)} of the verifier, the hidden states are of "
            f"layers {_listed(aux_layer_ids)}; extract again with --target-layer-ids "
            f"{' '.join(map(str, source.aux_layer_ids))}"
        )


@torch.no_grad()
def warm_start(drafter: Drafter, source: Drafter, where: str) -> WarmStart:
    """Copy what the source has into a freshly initialised drafter.

    New layers start as the identity (their two output projections are zero), so that at first the drafter computes what
    the source did. `mask_hidden` and the mask token's embedding keep the values that the drafter was initialised with.

    Args:
        drafter: initialised from the verifier, shaped like the source but for its kind and further layers. Changed in
            place.
        source, where: the drafter to start from, and its name for messages.

    Raises:
        CheckpointError: a tensor differs in shape, or the draft vocabularies differ.
    """
    mine, its = drafter.state_dict(), source.state_dict()
    for name in ("d2t", "t2d"):
        if (name in mine) != (name in its) or (name in mine and not torch.equal(mine[name], its[name])):
            raise CheckpointError(f"{where}: its draft vocabulary is another one; it cannot start there")
    taken, new = [], []
    mask_row = drafter.config.mask_token_id if source.config.mask_token_id != drafter.config.mask_token_id else None
    kept_row = None if mask_row is None else mine["embed_tokens.weight"][mask_row].clone()
    for name, tensor in mine.items():
        if name not in its:
            continue
        if its[name].shape != tensor.shape:
            raise CheckpointError(f"{where}: {name} is {list(its[name].shape)}, expected {list(tensor.shape)}")
        tensor.copy_(its[name])
        taken.append(name)
    if mask_row is not None and kept_row is not None:
        drafter.embed_tokens.weight[mask_row] = kept_row
        new.append(f"embed_tokens.weight[{mask_row}] (the mask token's row: the verifier's)")
    if "mask_hidden" in mine and "mask_hidden" not in its:
        new.append("mask_hidden (like a real state)")
    first_new, last_new = source.config.num_layers, drafter.config.num_layers - 1
    for index in range(first_new, last_new + 1):
        layer = drafter.get_submodule(f"layers.{index}")
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            for parameter in layer.get_submodule(name).parameters():
                parameter.zero_()
    if first_new <= last_new:
        span = f"layers.{first_new}" + (f" .. layers.{last_new}" if last_new > first_new else "")
        new.append(f"{span} (random, output projections zero)")
    return WarmStart(tuple(taken), tuple(new), tuple(sorted(its.keys() - mine.keys())))


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))
