"""Other projects' layouts of a drafter checkpoint: which one it is, its config in our words, our drafters in theirs.

Whatever our network does not do, or their layout has no place for, is refused by name, never dropped.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from peagle.convert.config import ConvertConfig
from peagle.drafter.checkpoint import CONFIG, find, read_config, read_weights
from peagle.drafter.model_config import LAYER_ARCHITECTURES, DrafterConfig, rope_of
from peagle.errors import CheckpointError, ConfigError, VerifierError, one_line
from peagle.verifier.model_config import VerifierConfig, load_verifier_config, resolve_aux_layer_ids
from peagle.verifier.weights import load_embedding

OURS = "peagle_config"
"""Key of a flat config under which our own config travels along, so that the way back is exact."""
_MASK_TOKEN_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
_OLDER_WEIGHTS = "pytorch_model*.bin"
_PREFIXES = ("model.", "eagle_module.", "draft_model.")


@dataclass(frozen=True)
class Foreign:
    """A checkpoint, nothing interpreted."""

    where: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_foreign(source: str) -> Foreign:
    """Read a folder or a hub id: `config.json` with safetensors, or the older `pytorch_model.bin`.

    Raises:
        CheckpointError: it is not there, or not a checkpoint.
    """
    folder = find(source, ("*.safetensors", _OLDER_WEIGHTS))
    config = read_config(folder)
    if any(folder.glob("*.safetensors")):
        return Foreign(source, config, read_weights(folder))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob(_OLDER_WEIGHTS)):
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle, zip and torch each have their own
            raise CheckpointError(f"{file}: cannot be read as tensors ({one_line(error)})") from None
        tensors |= {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    if not tensors:
        raise CheckpointError(f"{folder}: neither *.safetensors nor {_OLDER_WEIGHTS}; the checkpoint is incomplete")
    return Foreign(source, config, tensors)


def layout_of(foreign: Foreign) -> str:
    """Which project wrote it: "peagle", "speculators", "safeailab", "specforge", "aws" or "nvidia".

    Raises:
        CheckpointError: it is no EAGLE-3 or P-EAGLE checkpoint, by its tensors.
    """
    names = {plain_name(name) for name in foreign.tensors}
    config = foreign.config
    if "fc.weight" not in names:
        use_aux = (config.get("eagle_config") or {}).get("use_aux_hidden_state", True)
        why = "it reads no auxiliary states" if not use_aux else "it has no tensor fc.weight"
        raise CheckpointError(f"{foreign.where}: not an EAGLE-3 or P-EAGLE drafter: {why}")
    if "speculators_model_type" in config:
        return "peagle" if "peagle_version" in config else "speculators"
    architecture = " ".join(config.get("architectures") or [])
    if "ptd_token_id" in config:
        return "aws"
    if "eagle_config" in config or "LlamaEagle3DraftModel" in architecture or "parallel_drafting" in config:
        return "nvidia"
    if architecture == "PEagleDraftModel" or "embed_tokens.weight" in names or "target_model_type" in config:
        return "specforge"
    return "safeailab"


def plain_name(name: str) -> str:
    """A tensor's name without wrappers, in our words; fused tensors keep their fused name."""
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    return "d2t" if name == "draft_id_to_target_id" else name


def as_json(value: Any) -> Any:
    """A copy that shares nothing with `value`."""
    return json.loads(json.dumps(value))


def load_verifier(name: str, settings: ConvertConfig, where: str) -> VerifierConfig:
    """The verifier that a drafter needs.

    Raises:
        CheckpointError: it is not within reach.
    """
    try:
        return load_verifier_config(name, settings.trust_remote_code)
    except VerifierError as error:
        raise CheckpointError(f"{where}: its verifier is needed: {error}") from None


def read_foreign_config(
    foreign: Foreign, layout: str, settings: ConvertConfig
) -> tuple[DrafterConfig, tuple[str, ...]]:
    """A foreign config in our words, and what had to be assumed where neither it nor `settings` says something.

    Raises:
        CheckpointError: the drafter cannot be carried, for the reason named.
    """
    if OURS in foreign.config:
        return DrafterConfig.from_json(foreign.config[OURS], f"{foreign.where}/{CONFIG}"), ()
    name = settings.verifier_name_or_path
    if layout == "speculators":
        name = name or ((foreign.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if not name:
        raise CheckpointError(f"{foreign.where}: does not name its verifier; say which: --verifier-name-or-path")
    notes: list[str] = []
    read = _read_speculators if layout == "speculators" else _read_flat
    return read(foreign, str(name), settings, notes), tuple(notes)


def _read_speculators(foreign: Foreign, name: str, settings: ConvertConfig, notes: list[str]) -> DrafterConfig:
    """Speculators' config: ours, but for what its older versions leave out."""
    config, where = as_json(foreign.config), f"{foreign.where}/{CONFIG}"
    config.setdefault("speculators_config", {}).setdefault("verifier", {})["name_or_path"] = name
    if not config.get("eagle_aux_hidden_state_layer_ids"):
        ids = _assumed_layer_ids(load_verifier(name, settings, foreign.where), settings.target_layer_ids, notes)
        config["eagle_aux_hidden_state_layer_ids"] = list(ids)
    methods = config["speculators_config"].get("proposal_methods") or [{}]
    if settings.num_speculative_tokens is not None:
        methods[0]["speculative_tokens"] = settings.num_speculative_tokens
    config["speculators_config"]["proposal_methods"] = methods
    width = (config.get("transformer_layer_config") or {}).get("hidden_size")
    _check_width(where, width, config.get("target_hidden_size"))
    return DrafterConfig.from_json(config, where)


def _read_flat(foreign: Foreign, verifier_name: str, settings: ConvertConfig, notes: list[str]) -> DrafterConfig:
    """Read a flat config, with the tensors' help."""
    where, flat, eagle = foreign.where, foreign.config, foreign.config.get("eagle_config") or {}
    shapes = {plain_name(name): tuple(tensor.shape) for name, tensor in foreign.tensors.items()}
    verifier = load_verifier(verifier_name, settings, where)
    _refuse(foreign, shapes)
    # 1. Sizes that must be said and must fit.
    for key in ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"):
        if flat.get(key) is None:
            raise CheckpointError(f"{where}: config.json has no {key}; is this a drafter's?")
    hidden, heads, vocab_size = int(flat["hidden_size"]), int(flat["num_attention_heads"]), int(flat["vocab_size"])
    _check_width(where, hidden, flat.get("target_hidden_size"))
    _check_width(where, hidden, verifier.hidden_size)
    if vocab_size != verifier.vocab_size:
        raise CheckpointError(
            f"{where}: made for a vocabulary of {vocab_size}, {verifier.name_or_path} has {verifier.vocab_size}"
        )
    num_aux, rest = divmod(shapes["fc.weight"][1], hidden)
    if rest:
        raise CheckpointError(f"{where}: fc.weight has {shapes['fc.weight'][1]} columns, not a multiple of {hidden}")
    # 2. The mask token and the number of tokens, which settings may say instead.
    is_peagle = "mask_hidden" in shapes
    tokens = [settings.mask_token_id, *(flat.get(key) for key in _MASK_TOKEN_KEYS)]
    mask_token_id = next((int(token) for token in tokens if is_peagle and token is not None), None)
    if is_peagle and mask_token_id is None:
        named = f"names no mask token ({', '.join(_MASK_TOKEN_KEYS)})"
        raise CheckpointError(f"{where}: {named}; say which one it was trained with: --mask-token-id")
    num_tokens = settings.num_speculative_tokens or int(flat.get("num_depths") or 0)
    if not num_tokens:
        num_tokens = 5 if is_peagle else 3
        notes.append(f"the source does not say how many tokens to draft: {num_tokens} (--num-speculative-tokens)")
    if is_peagle and flat.get("norm_output"):
        raise CheckpointError(f"{where}: norm_output cannot be carried: a P-EAGLE drafter feeds nothing back")
    # 3. Rotary positions.
    rope = rope_of(flat)
    if "mrope_section" in rope or rope["rope_type"] == "mrope":
        notes.append("M-RoPE is written as plain rotary positions: text is the same in both")
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    values = {
        "speculators_model_type": "peagle" if is_peagle else "eagle3",
        "layer_type": "qwen3" if "layers.0.self_attn.q_norm.weight" in shapes else "llama",
        "hidden_size": hidden,
        "intermediate_size": int(flat["intermediate_size"]),
        "num_layers": 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers.")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(flat.get("num_key_value_heads") or heads),
        "head_dim": int(flat.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(flat.get("rms_norm_eps", 1e-6)),
        "rope_parameters": rope,
        "max_position_embeddings": int(flat.get("max_position_embeddings", verifier.max_position_embeddings)),
        "attention_bias": any(name.endswith("_proj.bias") for name in shapes),
        "vocab_size": vocab_size,
        "draft_vocab_size": int(flat.get("draft_vocab_size") or vocab_size),
        "norm_before_residual": bool(flat.get("norm_before_residual", False)),
        "norm_before_fc": bool(eagle.get("norm_before_fc", flat.get("norm_before_fc", False))),
        "norm_output": not is_peagle and bool(flat.get("norm_output", False)),
        "aux_layer_ids": _layer_ids(foreign, num_aux, settings, verifier, notes),
        "mask_token_id": mask_token_id,
        "num_speculative_tokens": num_tokens,
        "verifier": verifier.name_or_path,
        "verifier_architectures": tuple(verifier.architectures),
    }
    try:
        return DrafterConfig.build(values)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _check_width(where: str, width: Any, target: Any) -> None:
    if target not in (None, width):
        raise CheckpointError(
            f"{where}: its width is {width}, the verifier's {target}; drafters of another width are not supported"
        )


def _refuse(foreign: Foreign, names: dict[str, tuple[int, ...]]) -> None:
    """What our network, or vLLM, does not do."""
    where, flat = foreign.where, foreign.config
    reasons = {
        "fc_norm": bool(flat.get("fc_norm")) or any(name.startswith("fc_norm.") for name in names),
        "mlp_bias": bool(flat.get("mlp_bias")),
        f"hidden_act {flat.get('hidden_act')}": flat.get("hidden_act", "silu") not in ("silu", "swish"),
        "multi-head latent attention": any("kv_a_proj" in name or "q_a_proj" in name for name in names),
        "a mixture of experts": any(".experts." in name for name in names),
        "Medusa heads (parallel_draft_heads)": any("parallel_draft_heads" in name for name in names),
        "sliding window attention": bool(flat.get("use_sliding_window"))
        or "sliding_attention" in (flat.get("layer_types") or []),
        "quantised tensors": "quantization_config" in flat,
        "a scale of the logits (logit_scale)": flat.get("logit_scale", 1.0) != 1.0,
    }
    found = [reason for reason, is_there in reasons.items() if is_there]
    if found:
        raise CheckpointError(f"{where}: {', '.join(found)} cannot be carried: this network has no place for it")


def _assumed_layer_ids(verifier: VerifierConfig, given: tuple[int, ...] | None, notes: list[str]) -> tuple[int, ...]:
    """Layer ids of a source that has none."""
    ids = resolve_aux_layer_ids(verifier.num_layers, given)
    notes.append(f"no layer ids in the source: {list(ids)} are the default for {verifier.num_layers} layers")
    return ids


def _layer_ids(
    foreign: Foreign, num_aux: int, settings: ConvertConfig, verifier: VerifierConfig, notes: list[str]
) -> tuple[int, ...]:
    """Layer ids as inputs of layers; see `layer_id_meaning`."""
    key, where = "eagle_aux_hidden_state_layer_ids", foreign.where
    given = foreign.config.get(key) or (foreign.config.get("eagle_config") or {}).get(key)
    try:
        if settings.target_layer_ids is not None:
            ids = resolve_aux_layer_ids(verifier.num_layers, settings.target_layer_ids)
        elif given:
            meaning = settings.layer_id_meaning
            is_output = meaning == "outputs" or (meaning == "auto" and int(given[0]) == 1)
            if is_output:
                notes.append(f"layer ids {list(given)} are taken for outputs of layers: one is added to each")
            ids = resolve_aux_layer_ids(verifier.num_layers, [int(i) + is_output for i in given])
        else:
            ids = _assumed_layer_ids(verifier, None, notes)
    except VerifierError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if len(ids) != num_aux:
        raise CheckpointError(f"{where}: fc reads {num_aux} layers, the layer ids are {list(ids)}")
    return ids


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a project's checkpoints of one type (EAGLE-3 or P-EAGLE) can hold."""

    architecture: str
    max_layers: int | None = None
    is_llama_only: bool = True
    """No norms of queries and keys."""
    has_bias: bool = False
    norms: frozenset[str] = frozenset()
    """Which of norm_before_residual, norm_before_fc and norm_output its config can say."""
    has_layer_ids: bool = True
    has_embedding: bool = True
    """Whether checkpoints hold their own embedding; else they read the verifier's."""
    prefix: str = ""
    first_layer: str = "layers.0."
    always_has_tables: bool = True
    """d2t and t2d also where the vocabulary is not pruned."""
    mask_token_key: str = "mask_token_id"


_NORMS = frozenset({"norm_before_residual", "norm_before_fc", "norm_output"})
_OUTPUT = frozenset({"norm_output"})
_LLAMA = "LlamaForCausalLMEagle3"
_QWEN3 = {"eagle3": "Eagle3Qwen3ForCausalLM", "peagle": "PeagleQwen3ForCausalLM"}
_SAFEAILAB = Layout(
    architecture=_LLAMA, max_layers=1, has_layer_ids=False, has_embedding=False, first_layer="midlayer."
)
_AWS = Layout(
    architecture=_LLAMA,
    is_llama_only=False,
    has_bias=True,
    norms=_NORMS,
    always_has_tables=False,
    mask_token_key="ptd_token_id",
)
_NVIDIA = Layout(architecture="LlamaEagle3DraftModel", has_bias=True, norms=_NORMS, prefix="model.")
LAYOUTS = {
    ("safeailab", "eagle3"): _SAFEAILAB,
    ("specforge", "eagle3"): replace(_SAFEAILAB, has_layer_ids=True, norms=_OUTPUT),
    ("specforge", "peagle"): Layout(architecture="PEagleDraftModel", norms=_OUTPUT),
    ("aws", "eagle3"): _AWS,
    ("aws", "peagle"): _AWS,
    ("nvidia", "eagle3"): _NVIDIA,
    ("nvidia", "peagle"): _NVIDIA,
}
"""By project and `speculators_model_type`."""
_AT_THE_TOP = ("lm_head.weight", "mask_hidden", "d2t", "t2d")


def write_foreign(
    config: DrafterConfig, tensors: dict[str, Tensor], dtype: str, settings: ConvertConfig
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A drafter in a layout that it did not come from: its `config.json` there, and its tensors by their names there.

    Raises:
        CheckpointError: names everything that the layout has no place for.
    """
    # 1. What the layout has no place for.
    layout = LAYOUTS.get((settings.to, config.speculators_model_type))
    lost = _lost(config, tensors, layout, settings)
    if layout is None or lost:
        raise CheckpointError(f"{settings.source}: cannot be carried to {settings.to}: {'; '.join(lost)}")
    # 2. The tensors under its names.
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d") or (name == "embed_tokens.weight" and not layout.has_embedding):
            continue
        renamed = re.sub(r"^layers\.0\.", layout.first_layer, name)
        made[renamed if name in _AT_THE_TOP else layout.prefix + renamed] = tensor
    if config.is_pruned:
        made["d2t"], made["t2d"] = tensors["d2t"], tensors["t2d"]
    elif layout.always_has_tables:
        made["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        made["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    return _flat_config(config, dtype, layout), made


def _lost(
    config: DrafterConfig, tensors: dict[str, Tensor], layout: Layout | None, settings: ConvertConfig
) -> list[str]:
    """What a layout has no place for; the verifier is read only if nothing else is in the way."""
    if layout is None:
        return ["mask_hidden (it is a P-EAGLE drafter)"]
    lost = []
    if layout.max_layers is not None and config.num_layers > layout.max_layers:
        lost.append(f"{config.num_layers} layers (at most {layout.max_layers})")
    if layout.is_llama_only and config.layer_type != "llama":
        lost.append(f"norms of queries and keys ({LAYER_ARCHITECTURES[config.layer_type]} layers)")
    if config.attention_bias and not layout.has_bias:
        lost.append("attention biases")
    lost += [name for name in sorted(_NORMS) if getattr(config, name) and name not in layout.norms]
    if layout.has_layer_ids and config.aux_layer_ids[0] == 1:
        lost.append(f"layer ids {list(config.aux_layer_ids)} (others take ids that begin with 1 for outputs of layers)")
    if lost or (layout.has_embedding and layout.has_layer_ids):
        return lost
    verifier = load_verifier(settings.verifier_name_or_path or config.verifier, settings, settings.source)
    mine = tensors["embed_tokens.weight"]
    if not layout.has_embedding and not torch.equal(mine, load_embedding(verifier).to(mine.dtype)):
        return ["embed_tokens.weight, which differs from the verifier's"]
    default: tuple[int, ...] = ()
    with suppress(VerifierError):  # too few layers for the default ones
        default = resolve_aux_layer_ids(verifier.num_layers, None)
    if not layout.has_layer_ids and config.aux_layer_ids != default:
        return [f"layer ids {list(config.aux_layer_ids)}, which are not the default ones"]
    return []


def _flat_config(config: DrafterConfig, dtype: str, layout: Layout) -> dict[str, Any]:
    kind = config.speculators_model_type
    architecture = layout.architecture if config.layer_type == "llama" else _QWEN3[kind]
    flat: dict[str, Any] = {**config.layer_config(), "architectures": [architecture], "torch_dtype": dtype}
    rope = flat.pop("rope_parameters")
    flat["rope_theta"] = rope.pop("rope_theta")
    flat["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    flat["draft_vocab_size"] = config.draft_vocab_size
    flat["target_hidden_size"] = config.hidden_size
    if layout.is_llama_only:
        flat["model_type"] = "llama"
    for name in sorted(layout.norms):
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
