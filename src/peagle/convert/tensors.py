"""Tensors between a foreign layout and ours, with a record that undoes each step exactly.

The record (`Origin`) says for every tensor of ours what it was called, which ones were fused, what had to be added and
how the vocabulary tables were written. Whatever is neither ours nor known to be unused is refused by name.
"""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peagle.convert.config import ConvertConfig
from peagle.convert.formats import Foreign, load_verifier, plain_name
from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.errors import CheckpointError
from peagle.verifier.weights import load_embedding, load_head

_UNUSED = re.compile(r"rotary_emb\.|^verifier_(norm|lm_head)\.|^layers\.[1-9]\d*\.hidden_norm\.weight$")


@dataclass
class Origin:
    """How a checkpoint was written before it was ours; JSON values."""

    layout: str
    config: dict[str, Any]
    """Its `config.json`."""
    names: dict[str, str] = field(default_factory=dict)
    """Our tensors' names there; parts of a fused tensor share one, and stand in its order."""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """Where they differ from ours."""
    added: dict[str, str] = field(default_factory=dict)
    """Tensors that the source does not have: SHA-256 of the values that were put in their place."""
    tables: dict[str, dict[str, str]] = field(default_factory=dict)
    """d2t and t2d as they were there: name, dtype, form ("offsets", "absolute", "flags")."""
    read_as: dict[str, Any] = field(default_factory=dict)
    """The `DrafterConfig` that was made of its config."""


def shapes_of(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a drafter's tensors, without making them."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def import_tensors(
    foreign: Foreign, layout: str, config: DrafterConfig, settings: ConvertConfig
) -> tuple[dict[str, Tensor], Origin]:
    """A foreign checkpoint's tensors under our names, given its layout's name and the config that was read from it.

    Raises:
        CheckpointError: a tensor is missing, unknown, misshapen or ambiguous.
    """
    origin = Origin(layout, foreign.config, read_as=config.model_dump(mode="json"))
    # 1. Names: fused tensors cut up, ours in place of theirs.
    found: dict[str, Tensor] = {}
    for name, tensor in sorted(foreign.tensors.items()):
        for part, value in _parts(plain_name(name), tensor, config, foreign.where):
            if part in found:
                raise CheckpointError(f"{foreign.where}: {name} and {origin.names[part]} are both {part}")
            found[part], origin.names[part] = value, name
    wanted = shapes_of(config)
    _read_tables(found, origin, config, settings.d2t_meaning, foreign.where)
    # 2. What has no place here, what is unused, what may be left out (the verifier's tensors, biases of zero).
    unknown = sorted(found.keys() - wanted.keys())
    unused = [name for name in unknown if _UNUSED.search(name)]
    if len(unused) < len(unknown):
        others = [origin.names[name] for name in unknown if name not in unused]
        raise CheckpointError(f"{foreign.where}: tensor {', '.join(others)} cannot be carried: no place for it here")
    if unused and not settings.drop_unused:
        shown = ", ".join(origin.names[name] for name in unused)
        raise CheckpointError(f"{foreign.where}: {shown} is read by no engine; drop it with --drop-unused")
    for name in unused:
        del found[name], origin.names[name]
    missing = wanted.keys() - found.keys()
    added = {name: torch.zeros(wanted[name]) for name in missing if name.endswith("_proj.bias")}
    shared = missing & {"embed_tokens.weight", "lm_head.weight"}
    if shared:
        verifier = load_verifier(config.verifier, settings, foreign.where)
        if "embed_tokens.weight" in shared:
            added["embed_tokens.weight"] = load_embedding(verifier)
        if "lm_head.weight" in shared:
            head = load_head(verifier)
            if config.is_pruned:
                head = head.restricted(torch.arange(config.draft_vocab_size) + found["d2t"])
            added["lm_head.weight"] = head.weight.to(torch.float32) * head.logit_scale
    if missing > added.keys():
        names = ", ".join(sorted(missing - added.keys()))
        raise CheckpointError(f"{foreign.where}: no tensor {names}; the checkpoint cannot be used")
    for name, tensor in added.items():
        found[name] = tensor.to(found["fc.weight"].dtype)
        origin.added[name] = sha256(found[name])
    # 3. Shapes.
    for name, shape in wanted.items():
        tensor = found[name]
        if tuple(tensor.shape) == shape:
            continue
        if name != "mask_hidden" or tensor.numel() != config.aux_size:
            there = f"{origin.names.get(name, name)} is {list(tensor.shape)}"
            raise CheckpointError(f"{foreign.where}: {there}, its config.json asks for {list(shape)}")
        origin.shapes[name] = list(tensor.shape)
        found[name] = tensor.reshape(shape)
    return {name: found[name] for name in wanted}, origin


def restore_tensors(tensors: dict[str, Tensor], config: DrafterConfig, origin: Origin, where: str) -> dict[str, Tensor]:
    """Undo `import_tensors`.

    Raises:
        CheckpointError: what was added (the verifier's embedding, for example) has been trained since, so that leaving
            it out again would lose it.
    """
    for name, digest in origin.added.items():
        if name in tensors and sha256(tensors[name]) != digest:
            lacking = f"a checkpoint in the layout {origin.layout} such as the one this came from has no such tensor"
            raise CheckpointError(f"{where}: {name} cannot be carried: {lacking}, and it has changed since")
    parts: dict[str, list[Tensor]] = {}
    for name, source_name in origin.names.items():  # the order in which fused tensors were cut up
        tensor = tensors[name]
        shaped = tensor.reshape(origin.shapes[name]) if name in origin.shapes else tensor
        parts.setdefault(source_name, []).append(shaped)
    restored = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in parts.items()}
    return restored | _written_tables(tensors, config, origin.tables)


def sha256(tensor: Tensor) -> str:
    """Of a tensor's dtype and bytes."""
    digest = hashlib.sha256(str(tensor.dtype).encode())
    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def draft_ids_of(d2t: Tensor, t2d: Tensor | None, meaning: str, vocab_size: int, where: str) -> tuple[Tensor, str]:
    """Verifier ids of the draft vocabulary, and how d2t says so ("offsets" or "absolute").

    Raises:
        CheckpointError: the tables do not fit together, or the ids are not ascending.
    """
    place = torch.arange(d2t.numel())
    readings = {"offsets": place + d2t.to(torch.int64), "absolute": d2t.to(torch.int64)}
    if meaning != "auto":
        readings = {meaning: readings[meaning]}
    fits = {form: ids for form, ids in readings.items() if _fits(ids, t2d, vocab_size)}
    if not fits:
        agreed = "" if t2d is None else " that t2d agrees with"
        text = f"d2t gives no ascending ids below {vocab_size}{agreed}, read as {' or '.join(readings)}"
        raise CheckpointError(f"{where}: {text}")
    form = next(iter(fits))
    return fits[form], form


def _fits(ids: Tensor, t2d: Tensor | None, vocab_size: int) -> bool:
    if not ids.numel() or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        return False
    if t2d is None:
        return True
    flags = t2d.to(torch.bool)
    return flags.numel() == vocab_size and bool(flags[ids].all()) and int(flags.sum()) == ids.numel()


def _parts(name: str, tensor: Tensor, config: DrafterConfig, where: str) -> list[tuple[str, Tensor]]:
    """A tensor as it is, or a fused one cut up."""
    width, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for fused, pieces in (
        (".qkv_proj.", {"q_proj": width, "k_proj": kv, "v_proj": kv}),
        (".gate_up_proj.", {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}),
    ):
        if fused in name:
            if tensor.shape[0] != sum(pieces.values()):
                raise CheckpointError(f"{where}: {name} has {tensor.shape[0]} rows, expected {sum(pieces.values())}")
            cut = torch.split(tensor, list(pieces.values()))
            return [(name.replace(fused, f".{piece}."), value) for piece, value in zip(pieces, cut)]
    return [(name, tensor)]


def _read_tables(found: dict[str, Tensor], origin: Origin, config: DrafterConfig, meaning: str, where: str) -> None:
    """Take d2t and t2d out, check them, and put ours in if the vocabulary is pruned."""
    d2t, t2d = found.pop("d2t", None), found.pop("t2d", None)
    for name, table, form in (("d2t", d2t, "offsets"), ("t2d", t2d, "flags")):
        if table is not None:
            dtype = str(table.dtype).removeprefix("torch.")
            origin.tables[name] = {"name": origin.names.pop(name), "dtype": dtype, "form": form}
    if d2t is None and config.is_pruned:
        count = f"{config.draft_vocab_size} draft tokens of {config.vocab_size}"
        raise CheckpointError(f"{where}: {count}, and no d2t that names them")
    if d2t is not None:
        if d2t.numel() != config.draft_vocab_size:
            raise CheckpointError(f"{where}: d2t has {d2t.numel()} entries for {config.draft_vocab_size} draft tokens")
        ids, origin.tables["d2t"]["form"] = draft_ids_of(d2t, t2d, meaning, config.vocab_size, where)
        if config.is_pruned:
            found["d2t"] = ids - torch.arange(ids.numel())
            found["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
            found["t2d"][ids] = True


def _written_tables(
    tensors: dict[str, Tensor], config: DrafterConfig, tables: dict[str, dict[str, str]]
) -> dict[str, Tensor]:
    """d2t and t2d in the source's form; of a vocabulary that is not pruned they say nothing and can be made anew."""
    place = torch.arange(config.draft_vocab_size)
    ids = place + tensors["d2t"] if config.is_pruned else place
    flags = tensors["t2d"] if config.is_pruned else torch.ones(config.vocab_size, dtype=torch.bool)
    made = {}
    for table in tables.values():
        value = {"offsets": ids - place, "absolute": ids, "flags": flags}[table["form"]]
        made[table["name"]] = value.to(getattr(torch, table["dtype"]))
    return made
