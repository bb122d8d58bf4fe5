"""What vLLM reads in `config.json`, field by field, and what it makes of a missing or odd one.

Source: vLLM 0.32, transformers_utils/configs/speculators (how the file becomes the drafter's Transformers config and
the speculative config) and model_executor/models/{llama,qwen3}_eagle3.py (what the drafter takes from it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peagle.drafter.model_config import MAX_LAYERS
from peagle.serve.files import Findings

CONFIG = "config.json"
ARCHITECTURES = {"peagle": "PEagleDraftModel", "eagle3": "Eagle3DraftModel"}
_LAYERS = "transformer_layer_config"
_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_DEFAULT_NUM_AUX = 3


@dataclass(frozen=True)
class ServedShape:
    """The drafter that vLLM would build from a `config.json`."""

    kind: str
    """"peagle" or "eagle3"."""
    layer_type: str
    """"llama" or "qwen3"."""
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    """Verifier layers that vLLM would give `fc` its width for."""
    aux_layer_ids: tuple[int, ...]
    max_position_embeddings: int
    num_speculative_tokens: int
    mask_token_id: int | None
    norm_before_fc: bool
    fc_norm: bool
    attention_bias: bool
    verifier: str
    verifier_architectures: tuple[str, ...]
    dtype: str | None


def check_config(config: dict[str, Any], findings: Findings) -> ServedShape | None:
    """Check every field that vLLM reads.

    Returns:
        The drafter that it would build, or None where a missing field leaves that open.
    """
    before = len(findings.of("error"))
    kind = _kind(config, findings)
    layers = config.get(_LAYERS)
    if not isinstance(layers, dict):
        findings.error(CONFIG, f"{_LAYERS} is missing: vLLM builds the drafter from it")
        layers = {}
    layer_type = _layer_type(layers, findings)
    numbers = {name: _number(layers, name, f"{_LAYERS}.{name}", findings) for name in _NUMBERS}
    if numbers["num_hidden_layers"] > MAX_LAYERS:
        findings.error(CONFIG, f"{_LAYERS}.num_hidden_layers is {numbers['num_hidden_layers']}, over {MAX_LAYERS}")
        numbers["num_hidden_layers"] = 0
    _other_layer_fields(layers, numbers, kind, findings)
    draft_vocab = _number(config, "draft_vocab_size", "draft_vocab_size", findings)
    target_hidden = _number(config, "target_hidden_size", "target_hidden_size", findings)
    num_tokens = _proposal(config, findings)
    verifier, architectures = _verifier(config, findings)
    layer_ids = _layer_ids(config, findings)
    num_aux = _num_aux(layers, layer_type, layer_ids, findings)
    mask = _mask_token(config, kind, numbers["vocab_size"], findings)
    _flags(config, kind, findings)
    _ignored(config, kind, layers, findings)
    if draft_vocab and numbers["vocab_size"] and draft_vocab > numbers["vocab_size"]:
        findings.error(CONFIG, f"draft_vocab_size {draft_vocab} exceeds vocab_size {numbers['vocab_size']}")
    if len(findings.of("error")) > before and not all(numbers.values()):
        return None
    if not (draft_vocab and target_hidden and kind and layer_type and all(numbers.values())):
        return None
    return ServedShape(
        kind=kind,
        layer_type=layer_type,
        hidden_size=numbers["hidden_size"],
        target_hidden_size=target_hidden,
        intermediate_size=numbers["intermediate_size"],
        num_layers=numbers["num_hidden_layers"],
        num_heads=numbers["num_attention_heads"],
        num_kv_heads=numbers["num_key_value_heads"],
        head_dim=numbers["head_dim"],
        vocab_size=numbers["vocab_size"],
        draft_vocab_size=draft_vocab,
        num_aux=num_aux,
        aux_layer_ids=layer_ids,
        max_position_embeddings=numbers["max_position_embeddings"],
        num_speculative_tokens=num_tokens,
        mask_token_id=mask,
        norm_before_fc=bool(config.get("norm_before_fc")),
        fc_norm=kind == "eagle3" and bool(config.get("fc_norm")),
        attention_bias=bool(layers.get("attention_bias")),
        verifier=verifier,
        verifier_architectures=architectures,
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def _kind(config: dict[str, Any], findings: Findings) -> str:
    kind = config.get("speculators_model_type")
    if kind not in ARCHITECTURES:
        findings.error(
            CONFIG,
            f"speculators_model_type is {kind!r}; expected peagle or eagle3, which vLLM maps to its methods (peagle: "
            "eagle3 with parallel drafting)",
        )
        return ""
    named = config.get("architectures")
    if named != [ARCHITECTURES[kind]]:
        findings.error(CONFIG, f"architectures is {named!r}; expected [{ARCHITECTURES[kind]!r}] for {kind}")
    return str(kind)


def _layer_type(layers: dict[str, Any], findings: Findings) -> str:
    kind = layers.get("model_type")
    if kind not in ("llama", "qwen3"):
        findings.error(
            CONFIG, f"{_LAYERS}.model_type is {kind!r}; vLLM serves drafters with layers of type llama or qwen3 only"
        )
        return ""
    return str(kind)


def _number(holder: dict[str, Any], key: str, name: str, findings: Findings) -> int:
    value = holder.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if value is None:
        findings.error(CONFIG, f"{name} is missing; vLLM would take Transformers' default without a word")
    else:
        findings.error(CONFIG, f"{name} is {value!r}; expected a whole number of at least 1")
    return 0


def _other_layer_fields(layers: dict[str, Any], numbers: dict[str, int], kind: str, findings: Findings) -> None:
    eps = layers.get("rms_norm_eps")
    if not isinstance(eps, float) or not 0 < eps < 1:
        findings.error(CONFIG, f"{_LAYERS}.rms_norm_eps is {eps!r}; expected a small number, the one trained with")
    heads, kv_heads = numbers["num_attention_heads"], numbers["num_key_value_heads"]
    if heads and kv_heads and heads % kv_heads:
        findings.error(CONFIG, f"{heads} attention heads cannot share {kv_heads} key/value heads")
    rope = layers.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        if "rope_theta" in layers:
            findings.warning(
                CONFIG, f"{_LAYERS} has the old rope_theta and no rope_parameters; vLLM reads both for now"
            )
        else:
            findings.error(
                CONFIG, f"{_LAYERS}.rope_parameters is missing or has no rope_theta: the base would be 10000"
            )
    elif "mrope_section" in rope:
        findings.error(
            CONFIG,
            f"{_LAYERS}.rope_parameters has mrope_section; vLLM's drafters take plain text positions: leave it out",
        )
    act = layers.get("hidden_act", "silu")
    if act != "silu":
        findings.error(CONFIG, f"{_LAYERS}.hidden_act is {act!r}; vLLM's drafter layers have silu only")
    _windows(layers, numbers["num_hidden_layers"], kind, findings)


def _windows(layers: dict[str, Any], num_layers: int, kind: str, findings: Findings) -> None:
    kinds = layers.get("layer_types")
    window = layers.get("sliding_window")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < num_layers:
            findings.error(CONFIG, f"{_LAYERS}.layer_types must name {num_layers} layers")
            return
        if len(set(kinds[:num_layers])) > 1:
            findings.error(
                CONFIG,
                f"{_LAYERS}.layer_types mixes {sorted(set(kinds[:num_layers]))}; vLLM cannot serve that in a drafter",
            )
            return
    windowed = window and (layers.get("use_sliding_window", True) if kinds is None else "sliding_attention" in kinds)
    if windowed:
        findings.warning(
            CONFIG,
            f"{_LAYERS}.sliding_window is {window}; some vLLM versions take the verifier's window instead: compare "
            "acceptance on long prompts",
        )


def _proposal(config: dict[str, Any], findings: Findings) -> int:
    methods = _at(config, "speculators_config", "proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        findings.error(CONFIG, "speculators_config.proposal_methods is missing; vLLM reads its first entry")
        return 0
    if len(methods) > 1:
        findings.warning(
            CONFIG, f"speculators_config.proposal_methods has {len(methods)} entries; vLLM reads the first"
        )
    return _number(
        methods[0], "speculative_tokens", "speculators_config.proposal_methods[0].speculative_tokens", findings
    )


def _verifier(config: dict[str, Any], findings: Findings) -> tuple[str, tuple[str, ...]]:
    entry = _at(config, "speculators_config", "verifier")
    name = entry.get("name_or_path") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        findings.error(CONFIG, "speculators_config.verifier.name_or_path is missing: `vllm serve CHECKPOINT` loads it")
        return "", ()
    named = entry.get("architectures") or []
    return name, tuple(str(part) for part in named)


def _layer_ids(config: dict[str, Any], findings: Findings) -> tuple[int, ...]:
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        findings.error(
            CONFIG,
            "eagle_aux_hidden_state_layer_ids is missing: vLLM would feed the drafter the layers that it guesses (2, "
            "n / 2, n - 3)",
        )
        return ()
    if ids != sorted(set(ids)) or ids[0] < 0:
        findings.error(
            CONFIG,
            f"eagle_aux_hidden_state_layer_ids is {ids}; vLLM lays states out in ascending order: sort, no doubles",
        )
    return tuple(ids)


def _num_aux(layers: dict[str, Any], layer_type: str, ids: tuple[int, ...], findings: Findings) -> int:
    """How many layers vLLM would make `fc` for. Llama drafters do not count the list of ids at the top."""
    counted = layers.get("num_aux_hidden_states")
    if layer_type == "qwen3" and layers.get("num_aux_layers") is not None:
        counted = layers["num_aux_layers"]
    if counted is None:
        nested = (layers.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        counted = len(ids) if layer_type == "qwen3" and ids else len(nested) if nested else _DEFAULT_NUM_AUX
        if ids and counted != len(ids):
            findings.error(
                CONFIG,
                f"{_LAYERS}.num_aux_hidden_states is missing: vLLM builds this drafter's input layer for {counted} "
                f"verifier layers, it has {len(ids)}",
            )
    elif ids and counted != len(ids):
        findings.error(CONFIG, f"{_LAYERS}.num_aux_hidden_states is {counted}, but {len(ids)} layer ids are given")
    return int(counted)


def _mask_token(config: dict[str, Any], kind: str, vocab_size: int, findings: Findings) -> int | None:
    if kind != "peagle":
        return None
    token = config.get("mask_token_id")
    if not isinstance(token, int) or isinstance(token, bool):
        findings.error(CONFIG, f"mask_token_id is {token!r}; a P-EAGLE drafter needs the token of its mask slots")
        return None
    if not 0 <= token < (vocab_size or token + 1):
        findings.error(CONFIG, f"mask_token_id {token} has no row among {vocab_size} embeddings")
    return token


def _flags(config: dict[str, Any], kind: str, findings: Findings) -> None:
    residual = config.get("norm_before_residual")
    if not isinstance(residual, bool):
        default = kind == "eagle3"
        findings.error(
            CONFIG, f"norm_before_residual is not written; vLLM takes {str(default).lower()} for {kind or 'this kind'}"
        )
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if name in config and not isinstance(config[name], bool):
            findings.error(CONFIG, f"{name} is {config[name]!r}; expected true or false")


def _ignored(config: dict[str, Any], kind: str, layers: dict[str, Any], findings: Findings) -> None:
    if kind == "peagle":
        for name in ("fc_norm", "norm_output"):
            if config.get(name) is True:
                findings.error(
                    CONFIG,
                    f"{name} is set, but vLLM does not read it for peagle: what was trained would have no effect",
                )
            if layers.get(name) is True:
                findings.error(CONFIG, f"{_LAYERS}.{name} is set; our P-EAGLE drafters have no such norm")
    if config.get("tie_word_embeddings") or layers.get("tie_word_embeddings"):
        findings.warning(CONFIG, "tie_word_embeddings is true; vLLM reads the head from the checkpoint all the same")
    if config.get("quantization_config") or layers.get("quantization_config"):
        findings.warning(CONFIG, "has a quantization_config; peagle neither makes nor checks quantized drafters")
    if not config.get("speculators_version"):
        findings.warning(CONFIG, "speculators_version is missing; Speculators itself will not load this checkpoint")


def _at(holder: Any, *keys: str) -> Any:
    for key in keys:
        holder = holder.get(key) if isinstance(holder, dict) else None
    return holder
