"""From other projects' flat `config.json` to a `DrafterConfig`; whatever our network does not do is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peagle.drafter.config import DrafterConfig, rope_of
from peagle.drafter.convert_settings import ConvertConfig
from peagle.drafter.foreign import Foreign, plain_name
from peagle.errors import CheckpointError, ConfigError, VerifierError
from peagle.verifier.facts import VerifierFacts
from peagle.verifier.layers import resolve_aux_layer_ids

MASK_TOKEN_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
_DEFAULT_K = {"eagle3": 3, "peagle": 5}


@dataclass(frozen=True)
class Read:
    """A config, and what had to be assumed to read it."""

    config: DrafterConfig
    notes: tuple[str, ...]


def from_flat(foreign: Foreign, settings: ConvertConfig, facts: VerifierFacts) -> Read:
    """Read a flat config, with the tensors' help.

    Args:
        foreign: the checkpoint.
        settings: answers to what the source does not say.
        facts: the verifier.

    Raises:
        CheckpointError: the drafter cannot be carried, for the reason named.
    """
    where, flat = foreign.where, foreign.config
    names = {plain_name(name): tuple(tensor.shape) for name, tensor in foreign.tensors.items()}
    eagle = flat.get("eagle_config") or {}
    _refuse(foreign, names)
    notes: list[str] = []
    kind = "peagle" if "mask_hidden" in names else "eagle3"
    hidden, heads = int(_need(flat, "hidden_size", where)), int(_need(flat, "num_attention_heads", where))
    vocab_size = int(_need(flat, "vocab_size", where))
    for target in (flat.get("target_hidden_size"), facts.hidden_size):
        if target not in (None, hidden):
            raise CheckpointError(
                f"{where}: its width is {hidden}, the verifier's {target}; drafters of another width are not supported"
            )
    if vocab_size != facts.vocab_size:
        raise CheckpointError(
            f"{where}: made for a vocabulary of {vocab_size}, {facts.name_or_path} has {facts.vocab_size}"
        )
    num_aux, rest = divmod(names["fc.weight"][1], hidden)
    if rest:
        raise CheckpointError(f"{where}: fc.weight has {names['fc.weight'][1]} columns, not a multiple of {hidden}")
    values = {
        "speculators_model_type": kind,
        "layer_type": "qwen3" if "layers.0.self_attn.q_norm.weight" in names else "llama",
        "hidden_size": hidden,
        "intermediate_size": int(_need(flat, "intermediate_size", where)),
        "num_layers": 1 + max(int(name.split(".")[1]) for name in names if name.startswith("layers.")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(flat.get("num_key_value_heads") or heads),
        "head_dim": int(flat.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(flat.get("rms_norm_eps", 1e-6)),
        "rope_parameters": _rope(flat, notes),
        "max_position_embeddings": int(flat.get("max_position_embeddings", facts.max_position_embeddings)),
        "attention_bias": any(name.endswith("_proj.bias") for name in names),
        "vocab_size": vocab_size,
        "draft_vocab_size": int(flat.get("draft_vocab_size") or vocab_size),
        "norm_before_residual": bool(flat.get("norm_before_residual", False)),
        "norm_before_fc": bool(eagle.get("norm_before_fc", flat.get("norm_before_fc", False))),
        "norm_output": kind == "eagle3" and bool(flat.get("norm_output", False)),
        "aux_layer_ids": _layer_ids(foreign, eagle, num_aux, settings, facts, notes),
        "mask_token_id": _mask_token(flat, settings, where) if kind == "peagle" else None,
        "num_speculative_tokens": _num_speculative_tokens(flat, kind, settings, notes),
        "verifier": facts.name_or_path,
        "verifier_architectures": tuple(facts.architectures),
    }
    if kind == "peagle" and flat.get("norm_output"):
        raise CheckpointError(f"{where}: norm_output cannot be carried: a P-EAGLE drafter feeds nothing back")
    try:
        return Read(DrafterConfig.build(values), tuple(notes))
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


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


def _layer_ids(
    foreign: Foreign,
    eagle: dict[str, Any],
    num_aux: int,
    settings: ConvertConfig,
    facts: VerifierFacts,
    notes: list[str],
) -> tuple[int, ...]:
    """Layer ids as inputs of layers; see `layer_id_meaning`."""
    where = foreign.where
    given = foreign.config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    try:
        if settings.target_layer_ids is not None:
            ids = resolve_aux_layer_ids(facts.num_layers, settings.target_layer_ids)
        elif given:
            is_output = settings.layer_id_meaning == "outputs" or (
                settings.layer_id_meaning == "auto" and int(given[0]) == 1
            )
            if is_output:
                notes.append(f"layer ids {list(given)} are taken for outputs of layers: one is added to each")
            ids = resolve_aux_layer_ids(facts.num_layers, [int(i) + is_output for i in given])
        else:
            ids = resolve_aux_layer_ids(facts.num_layers, None)
            notes.append(f"no layer ids in the source: {list(ids)} are the default for {facts.num_layers} layers")
    except VerifierError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if len(ids) != num_aux:
        raise CheckpointError(f"{where}: fc reads {num_aux} layers, the layer ids are {list(ids)}")
    return ids


def _mask_token(flat: dict[str, Any], settings: ConvertConfig, where: str) -> int:
    if settings.mask_token_id is not None:
        return settings.mask_token_id
    for key in MASK_TOKEN_KEYS:
        if flat.get(key) is not None:
            return int(flat[key])
    raise CheckpointError(
        f"{where}: names no mask token ({', '.join(MASK_TOKEN_KEYS)}); say which one it was trained with: "
        "--mask-token-id"
    )


def _num_speculative_tokens(flat: dict[str, Any], kind: str, settings: ConvertConfig, notes: list[str]) -> int:
    if settings.num_speculative_tokens is not None:
        return settings.num_speculative_tokens
    if flat.get("num_depths"):
        return int(flat["num_depths"])
    notes.append(f"the source does not say how many tokens to draft: {_DEFAULT_K[kind]} (--num-speculative-tokens)")
    return _DEFAULT_K[kind]


def _rope(flat: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    rope = rope_of(flat)
    if "mrope_section" in rope or rope["rope_type"] == "mrope":
        notes.append("M-RoPE is written as plain rotary positions: text is the same in both")
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope


def _need(flat: dict[str, Any], key: str, where: str) -> Any:
    if flat.get(key) is None:
        raise CheckpointError(f"{where}: config.json has no {key}; is this a drafter's?")
    return flat[key]
