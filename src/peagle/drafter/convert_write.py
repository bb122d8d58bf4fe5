"""Our drafters in other projects' layouts. What a layout has no place for is refused by name, never left away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.config import LAYER_ARCHITECTURES, DrafterConfig
from peagle.errors import CheckpointError, VerifierError
from peagle.verifier.layers import resolve_aux_layer_ids

OURS = "peagle_config"
"""Key of a flat config under which our own config travels along, so that the way back is exact."""


@dataclass(frozen=True)
class Layout:
    """What a project's checkpoints can hold."""

    kinds: tuple[str, ...]
    architectures: dict[str, str]
    """By kind."""
    max_layers: dict[str, int]
    """By kind; absent: any number."""
    is_llama_only: bool
    """No norms of queries and keys."""
    has_bias: bool
    has_norms: frozenset[str]
    """Which of norm_before_residual, norm_before_fc and norm_output its config can say."""
    has_layer_ids: bool
    has_embedding: dict[str, bool]
    """By kind: whether checkpoints hold their own embedding, or read the verifier's."""
    prefix: str
    first_layer: dict[str, str]
    """By kind: what `layers.0.` is called."""
    always_has_tables: bool
    """d2t and t2d also where the vocabulary is not pruned."""
    mask_token_key: str


_NORMS = frozenset({"norm_before_residual", "norm_before_fc", "norm_output"})
_LLAMA = "LlamaForCausalLMEagle3"
_QWEN3 = {"eagle3": "Eagle3Qwen3ForCausalLM", "peagle": "PeagleQwen3ForCausalLM"}
LAYOUTS = {
    "safeailab": Layout(
        ("eagle3",), {"eagle3": _LLAMA}, {"eagle3": 1}, True, False, frozenset(), False, {"eagle3": False}, "",
        {"eagle3": "midlayer."}, True, "",
    ),
    "specforge": Layout(
        ("eagle3", "peagle"), {"eagle3": _LLAMA, "peagle": "PEagleDraftModel"}, {"eagle3": 1}, True, False,
        frozenset({"norm_output"}), True, {"eagle3": False, "peagle": True}, "",
        {"eagle3": "midlayer.", "peagle": "layers.0."}, True, "mask_token_id",
    ),
    "aws": Layout(
        ("eagle3", "peagle"), {"eagle3": _LLAMA, "peagle": _LLAMA}, {}, False, True, _NORMS, True,
        {"eagle3": True, "peagle": True}, "", {"eagle3": "layers.0.", "peagle": "layers.0."}, False, "ptd_token_id",
    ),
    "nvidia": Layout(
        ("eagle3", "peagle"), {"eagle3": "LlamaEagle3DraftModel", "peagle": "LlamaEagle3DraftModel"}, {}, True, True,
        _NORMS, True, {"eagle3": True, "peagle": True}, "model.", {"eagle3": "layers.0.", "peagle": "layers.0."}, True,
        "mask_token_id",
    ),
}  # fmt: skip
_AT_THE_TOP = ("lm_head.weight", "mask_hidden", "d2t", "t2d")


def write_flat(
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    dtype: str,
    layout_name: str,
    embedding: Tensor | None,
    num_layers_of_verifier: int | None,
    where: str,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A drafter in a layout that it did not come from.

    Args:
        config, tensors: the drafter.
        dtype: of its tensors.
        layout_name: a key of `LAYOUTS`.
        embedding: the verifier's, for layouts that hold none; None if it is not needed.
        num_layers_of_verifier: for layouts that hold no layer ids; None if it is not needed.
        where: the drafter's name, for messages.

    Returns:
        The `config.json` and the tensors by name.

    Raises:
        CheckpointError: names everything that the layout has no place for.
    """
    layout, kind = LAYOUTS[layout_name], config.speculators_model_type
    lost = _lost(config, layout, kind)
    if not lost and not layout.has_embedding[kind]:
        mine = tensors["embed_tokens.weight"]
        if embedding is None or not torch.equal(mine, embedding.to(mine.dtype)):
            lost.append("embed_tokens.weight, which differs from the verifier's")
    if not lost and not layout.has_layer_ids and config.aux_layer_ids != _default_ids(num_layers_of_verifier):
        lost.append(f"layer ids {list(config.aux_layer_ids)}, which are not the default ones")
    if lost:
        raise CheckpointError(f"{where}: cannot be carried to {layout_name}: {'; '.join(lost)}")
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d") or (name == "embed_tokens.weight" and not layout.has_embedding[kind]):
            continue
        renamed = layout.first_layer[kind] + name[9:] if name.startswith("layers.0.") else name
        made[renamed if name in _AT_THE_TOP else layout.prefix + renamed] = tensor
    if config.is_pruned or layout.always_has_tables:
        full = torch.zeros(config.draft_vocab_size, dtype=torch.int64), torch.ones(config.vocab_size, dtype=torch.bool)
        made["d2t"], made["t2d"] = (tensors["d2t"], tensors["t2d"]) if config.is_pruned else full
    return _flat_config(config, dtype, layout, kind), made


def _lost(config: DrafterConfig, layout: Layout, kind: str) -> list[str]:
    lost = []
    if kind not in layout.kinds:
        lost.append("mask_hidden (it is a P-EAGLE drafter)")
        return lost
    if config.num_layers > layout.max_layers.get(kind, config.num_layers):
        lost.append(f"{config.num_layers} layers (at most {layout.max_layers[kind]})")
    if layout.is_llama_only and config.layer_type != "llama":
        lost.append(f"norms of queries and keys ({LAYER_ARCHITECTURES[config.layer_type]} layers)")
    if config.attention_bias and not layout.has_bias:
        lost.append("attention biases")
    lost += [name for name in sorted(_NORMS) if getattr(config, name) and name not in layout.has_norms]
    if layout.has_layer_ids and config.aux_layer_ids[0] == 1:
        lost.append(f"layer ids {list(config.aux_layer_ids)} (others take ids that begin with 1 for outputs of layers)")
    return lost


def _default_ids(num_layers: int | None) -> tuple[int, ...] | None:
    if num_layers is None:
        return None
    try:
        return resolve_aux_layer_ids(num_layers, None)
    except VerifierError:
        return None


def _flat_config(config: DrafterConfig, dtype: str, layout: Layout, kind: str) -> dict[str, Any]:
    architecture = layout.architectures[kind] if config.layer_type == "llama" else _QWEN3[kind]
    flat: dict[str, Any] = {**config.layer_config(), "architectures": [architecture], "torch_dtype": dtype}
    rope = flat.pop("rope_parameters")
    flat["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    flat["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    flat["draft_vocab_size"] = config.draft_vocab_size
    flat["target_hidden_size"] = config.hidden_size
    if layout.is_llama_only:
        flat["model_type"] = "llama"
    for name in sorted(layout.has_norms):
        if name != "norm_output" or kind == "eagle3":
            flat[name] = getattr(config, name)
    if layout.has_layer_ids:
        flat["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layer_ids)
    if kind == "peagle":
        flat[layout.mask_token_key] = config.mask_token_id
        if layout.prefix:
            flat |= {"parallel_drafting": True, "num_depths": config.num_speculative_tokens}
    flat[OURS] = config.to_json(dtype)
    return flat
