"""`peagle convert`: other projects' checkpoints to ours, and back where their layout has a place for everything.

What was read is recorded in our `config.json` (`converted_from`), what is written elsewhere carries our config along
(`peagle_config`), so that there and back gives the same tensors and the same config, to the bit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.convert.config import ConvertConfig
from peagle.convert.formats import Foreign, as_json, from_flat, layout_of, read_foreign
from peagle.convert.tensors import FromVerifier, Origin, import_tensors, restore_tensors, shapes_of
from peagle.drafter.checkpoint import CONFIG, DTYPES, WEIGHTS, write_into
from peagle.drafter.model_config import LAYER_ARCHITECTURES, DrafterConfig
from peagle.errors import CheckpointError, ConfigError, VerifierError
from peagle.files import whole_folder, write_json
from peagle.verifier.model_config import VerifierConfig, load_verifier_config, resolve_aux_layer_ids
from peagle.verifier.weights import load_embedding, load_head

logger = logging.getLogger(__name__)

ORIGIN = "converted_from"
# Fields of our config that may change without the original config becoming wrong.
_FREE = {"num_speculative_tokens", "verifier", "verifier_architectures"}


@dataclass(frozen=True)
class Drawn:
    """A checkpoint in our words."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    dtype: str
    origin: Origin | None
    """How it was written before it was ours; None if it always was."""
    notes: tuple[str, ...]


def convert(settings: ConvertConfig) -> None:
    """Read a checkpoint, write it in another layout.

    Raises:
        CheckpointError: it cannot be read, or something in it cannot be carried; nothing is written.
        ConfigError: the output exists.
    """
    if settings.output.exists():
        raise ConfigError(f"--output {settings.output}: is there already; name a new folder")
    foreign = read_foreign(settings.source)
    layout = layout_of(foreign)
    drawn = read(foreign, layout, settings)
    for note in drawn.notes:
        logger.info("%s: %s", settings.source, note)
    with whole_folder(settings.output) as folder:
        count = _write(drawn, settings, folder)
    logger.info(
        "read %d tensors (%s), wrote %d (%s) to %s: %s, %d layer%s, %s",
        len(foreign.tensors),
        layout,
        count,
        settings.to,
        settings.output,
        "P-EAGLE" if drawn.config.speculators_model_type == "peagle" else "EAGLE-3",
        drawn.config.num_layers,
        "" if drawn.config.num_layers == 1 else "s",
        drawn.dtype,
    )


def read(foreign: Foreign, layout: str, settings: ConvertConfig) -> Drawn:
    """Put a checkpoint into our words.

    Raises:
        CheckpointError: something in it cannot be carried.
    """
    dtype, tensors = _one_dtype(foreign, settings.dtype)
    foreign = Foreign(foreign.where, as_json(foreign.config), tensors)
    if layout == "peagle":
        return _read_ours(foreign, dtype)
    config, notes = _read_config(foreign, layout, settings)
    name = config.verifier
    verifier = FromVerifier(
        lambda: load_embedding(_verifier_config(name, settings, foreign.where)),
        lambda ids: _head(_verifier_config(name, settings, foreign.where), ids),
    )
    found, origin = import_tensors(foreign, layout, config, settings.d2t_meaning, settings.drop_unused, verifier)
    origin.read_as = config.model_dump(mode="json")
    for added in sorted(origin.added):
        source = "zeros" if added.endswith(".bias") else "the verifier's"
        notes = (*notes, f"no tensor {added} in the source: {source}")
    return Drawn(config, found, dtype, origin, notes)


def _read_ours(foreign: Foreign, dtype: str) -> Drawn:
    config = DrafterConfig.from_json(foreign.config, f"{foreign.where}/{CONFIG}")
    wanted = shapes_of(config)
    for name in sorted(wanted.keys() | foreign.tensors.keys()):
        there = tuple(foreign.tensors[name].shape) if name in foreign.tensors else None
        if there != wanted.get(name):
            raise CheckpointError(
                f"{foreign.where}: tensor {name} is {there}, its config.json asks for {wanted.get(name)}"
            )
    origin = foreign.config.get(ORIGIN)
    return Drawn(config, foreign.tensors, dtype, None if origin is None else Origin(**origin), ())


def _read_config(foreign: Foreign, layout: str, settings: ConvertConfig) -> tuple[DrafterConfig, tuple[str, ...]]:
    flat, where = foreign.config, f"{foreign.where}/{CONFIG}"
    if OURS in flat:
        return DrafterConfig.from_json(flat[OURS], where), ()
    named = settings.verifier_name_or_path
    if layout == "speculators":
        named = named or ((flat.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if not named:
        raise CheckpointError(f"{foreign.where}: does not name its verifier; say which: --verifier-name-or-path")
    if layout == "speculators":
        return _read_speculators(foreign, str(named), settings)
    found = from_flat(foreign, settings, _verifier_config(str(named), settings, foreign.where))
    return found.config, found.notes


def _read_speculators(
    foreign: Foreign, verifier: str, settings: ConvertConfig
) -> tuple[DrafterConfig, tuple[str, ...]]:
    """Speculators' config: ours, but for what its older versions leave away."""
    config, where, notes = as_json(foreign.config), f"{foreign.where}/{CONFIG}", []
    config.setdefault("speculators_config", {}).setdefault("verifier", {})["name_or_path"] = verifier
    if not config.get("eagle_aux_hidden_state_layer_ids"):
        verifier_config = _verifier_config(verifier, settings, foreign.where)
        ids = resolve_aux_layer_ids(verifier_config.num_layers, settings.target_layer_ids)
        config["eagle_aux_hidden_state_layer_ids"] = list(ids)
        notes.append(f"no layer ids in the source: {list(ids)} are the default for {verifier_config.num_layers} layers")
    methods = config["speculators_config"].get("proposal_methods") or [{}]
    if settings.num_speculative_tokens is not None:
        methods[0]["speculative_tokens"] = settings.num_speculative_tokens
    config["speculators_config"]["proposal_methods"] = methods
    target = config.get("target_hidden_size")
    layers = config.get("transformer_layer_config") or {}
    if target not in (None, layers.get("hidden_size")):
        raise CheckpointError(
            f"{where}: its width is {layers.get('hidden_size')}, the verifier's {target}; drafters of another width "
            "are not supported"
        )
    return DrafterConfig.from_json(config, where), tuple(notes)


def _write(drawn: Drawn, settings: ConvertConfig, folder: Path) -> int:
    """Write the target layout into a folder; returns the number of tensors."""
    origin, to, where = drawn.origin, settings.to, settings.source
    if to == "peagle" or (to == "speculators" and (origin is None or origin.layout != to)):
        write_into(folder, drawn.config, drawn.tensors, drawn.dtype)
        if to == "peagle" and origin is not None:
            write_json(folder / CONFIG, {**drawn.config.to_json(drawn.dtype), ORIGIN: origin.to_json()})
        return len(drawn.tensors)
    if origin is not None and origin.layout == to:
        changed = [
            name
            for name, value in drawn.config.model_dump(mode="json").items()
            if name not in _FREE and origin.read_as.get(name) != value
        ]
        if changed:
            raise CheckpointError(
                f"{where}: {', '.join(changed)} changed since it was converted from {to}; remove {ORIGIN} from its "
                "config.json to have it written anew"
            )
        flat, tensors = origin.config, restore_tensors(drawn.tensors, drawn.config, origin, where)
    else:
        flat, tensors = _write_anew(drawn, settings)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, flat)
    return len(tensors)


def _write_anew(drawn: Drawn, settings: ConvertConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layout, kind = LAYOUTS[settings.to], drawn.config.speculators_model_type
    verifier_config = None
    if kind in layout.kinds and not (layout.has_embedding[kind] and layout.has_layer_ids):
        verifier_config = _verifier_config(
            settings.verifier_name_or_path or drawn.config.verifier, settings, settings.source
        )
    embedding = None if verifier_config is None or layout.has_embedding[kind] else load_embedding(verifier_config)
    num_layers = None if verifier_config is None else verifier_config.num_layers
    return write_flat(drawn.config, drawn.tensors, drawn.dtype, settings.to, embedding, num_layers, settings.source)


def _one_dtype(foreign: Foreign, asked: str) -> tuple[str, dict[str, Tensor]]:
    """The type of all floating tensors, and the tensors in it."""
    types = sorted({str(t.dtype).removeprefix("torch.") for t in foreign.tensors.values() if t.is_floating_point()})
    if asked == "auto":
        if len(types) != 1 or types[0] not in DTYPES:
            raise CheckpointError(f"{foreign.where}: tensors are of types {', '.join(types)}; choose one with --dtype")
        return types[0], foreign.tensors
    wanted = DTYPES[asked]
    return asked, {name: t.to(wanted) if t.is_floating_point() else t for name, t in foreign.tensors.items()}


def _verifier_config(name: str, settings: ConvertConfig, where: str) -> VerifierConfig:
    try:
        return load_verifier_config(name, settings.trust_remote_code)
    except VerifierError as error:
        raise CheckpointError(f"{where}: its verifier is needed: {error}") from None


def _head(verifier_config: VerifierConfig, ids: Tensor | None) -> Tensor:
    head = load_head(verifier_config)
    weight = head.weight if ids is None else head.restricted(ids).weight
    return weight.to(torch.float32) * head.logit_scale


# ---- Our drafters in other projects' layouts. What a layout has no place for is refused by name, never left away.


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
