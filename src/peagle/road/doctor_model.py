"""What can be said about a verifier from its configuration and tokenizer, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peagle.drafter.config import ROPE_TYPES
from peagle.errors import PeagleError
from peagle.road.doctor import DoctorConfig, Finding, guarded
from peagle.verifier.facts import VerifierFacts, load_facts
from peagle.verifier.layers import resolve_aux_layer_ids
from peagle.verifier.mask_token import resolve_mask_token
from peagle.verifier.tokenizer import eos_ids, load_tokenizer
from peagle.verifier.vllm_support import Engine, detour_arguments, engine_here, hands_out_states


def model(config: DoctorConfig, found: dict[str, Any]) -> Iterator[Finding]:
    """Look at the verifier; what later findings need is left in `found` (facts, tokenizer, layer_ids)."""
    assert config.model is not None
    try:
        facts = found["facts"] = load_facts(config.model, config.trust_remote_code)
    except PeagleError as error:
        yield guarded("verifier", error)
        return
    kind = ", ".join(facts.architectures)
    part = " (its text model is used)" if facts.has_text_config else ""
    sizes = f"{facts.num_layers} layers, hidden {facts.hidden_size}, vocabulary {facts.vocab_size:,}, {facts.dtype}"
    yield Finding("verifier", "ok", f"{kind}{part}: {sizes}")
    yield _quantization(facts)
    yield _rope(facts)
    yield _layers(config, facts, found)
    yield _tokenizer(config, facts, found)
    if "tokenizer" in found:
        yield _mask_token(config, facts, found["tokenizer"])
    yield serving(facts, engine_here())


def _quantization(facts: VerifierFacts) -> Finding:
    if facts.quantization is None:
        return Finding(
            "weights", "ok", f"not quantised; head {'tied to' if facts.tied else 'apart from'} the embedding"
        )
    text = f"quantised ({facts.quantization}): states come from this very model, norm and head are read dequantised"
    return Finding("weights", "ok", text)


def _rope(facts: VerifierFacts) -> Finding:
    kind = facts.rope_parameters.get("rope_type")
    base = facts.rope_parameters.get("rope_theta")
    if kind in ROPE_TYPES:
        return Finding("rotary", "ok", f"{kind}, base {base:g}" if base else str(kind))
    return Finding(
        "rotary", "fail", f"rope_type {kind!r} cannot be trained with; known ones are {', '.join(ROPE_TYPES)}"
    )


def _layers(config: DoctorConfig, facts: VerifierFacts, found: dict[str, Any]) -> Finding:
    try:
        ids = found["layer_ids"] = resolve_aux_layer_ids(facts.num_layers, config.target_layer_ids)
    except PeagleError as error:
        return guarded("layer ids", error)
    return Finding("layer ids", "ok", f"{', '.join(map(str, ids))} of {facts.num_layers}")


def _tokenizer(config: DoctorConfig, facts: VerifierFacts, found: dict[str, Any]) -> Finding:
    try:
        tokenizer = load_tokenizer(facts.name_or_path, config.trust_remote_code)
    except PeagleError as error:
        return guarded("tokenizer", error)
    if len(tokenizer) > facts.vocab_size:
        return Finding(
            "tokenizer",
            "fail",
            f"{len(tokenizer):,} tokens, but the model's embedding has {facts.vocab_size:,} rows: ids beyond it would "
            "crash the verifier; use the tokenizer that belongs to it",
        )
    if not getattr(tokenizer, "chat_template", None):
        return Finding("tokenizer", "fail", "no chat template: conversations cannot be rendered; give --chat-template")
    found["tokenizer"] = tokenizer
    ends = ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in eos_ids(facts, tokenizer))
    if not ends:
        return Finding("tokenizer", "fail", "no end-of-sequence token in the model's configuration or its tokenizer")
    spare = facts.vocab_size - len(tokenizer)
    return Finding("tokenizer", "ok", f"{len(tokenizer):,} tokens, {spare:,} unused rows, answers end with {ends}")


def _mask_token(config: DoctorConfig, facts: VerifierFacts, tokenizer: Any) -> Finding:
    try:
        mask = resolve_mask_token(tokenizer, facts.vocab_size, config.mask_token_id, ())
    except PeagleError as error:
        return guarded("mask token", error)
    if mask.warning:
        return Finding("mask token", "warn", mask.warning)
    return Finding("mask token", "ok", f"{mask.id} ({mask.how})")


def serving(facts: VerifierFacts, engine: Engine | None) -> Finding:
    """What the installed vLLM lacks for this family."""
    if engine is None:
        return Finding("serving", "warn", "vLLM is not installed here, so it is not known whether it takes this family")
    unknown = [name for name in facts.architectures if hands_out_states(engine, name) is None]
    try:
        detour = detour_arguments(engine, facts.architectures)
    except PeagleError as error:
        return guarded("serving", error)
    if detour:
        how = " ".join(detour)
        text = f"vLLM {engine.version} has no EAGLE-3 support of its own for this family; it is served with {how}"
        return Finding("serving", "warn", text)
    if unknown:
        text = f"vLLM {engine.version} does not list {', '.join(unknown)}; it will try its Transformers backend"
        return Finding("serving", "warn", text)
    return Finding("serving", "ok", f"vLLM {engine.version} hands out this family's states and serves drafters for it")
