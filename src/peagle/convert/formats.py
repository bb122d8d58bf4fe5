"""Drafter checkpoints of other projects as they lie on the disk, and which layout they are in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.convert.config import ConvertConfig
from peagle.drafter.checkpoint import read_config, read_weights
from peagle.drafter.model_config import DrafterConfig, rope_of
from peagle.errors import CheckpointError, ConfigError, VerifierError
from peagle.verifier.model_config import VerifierConfig, resolve_aux_layer_ids

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
    folder = _find(source)
    config = read_config(folder)
    if any(folder.glob("*.safetensors")):
        return Foreign(source, config, read_weights(folder))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle, zip and torch each have their own
            raise CheckpointError(f"{file}: cannot be read as tensors ({str(error).splitlines()[0][:120]})") from None
        tensors |= {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    if not tensors:
        raise CheckpointError(f"{folder}: neither *.safetensors nor pytorch_model*.bin; the checkpoint is incomplete")
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


def _find(source: str) -> Path:
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{source}: no config.json in this folder")
        return folder
    if folder.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise CheckpointError(f"{source}: no such folder, and not a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "pytorch_model*.bin"]))
    except Exception as error:  # the hub's many errors, all of which mean: not to be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{source}: no such folder, and the hub does not give it ({reason})") from None


def as_json(value: Any) -> Any:
    """A copy that shares nothing with `value`."""
    return json.loads(json.dumps(value))


# ---- From other projects' flat `config.json` to a `DrafterConfig`; whatever our network does not do is refused by
# name.


MASK_TOKEN_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
_DEFAULT_K = {"eagle3": 3, "peagle": 5}


@dataclass(frozen=True)
class Read:
    """A config, and what had to be assumed to read it."""

    config: DrafterConfig
    notes: tuple[str, ...]


def from_flat(foreign: Foreign, settings: ConvertConfig, verifier_config: VerifierConfig) -> Read:
    """Read a flat config, with the tensors' help.

    Args:
        foreign: the checkpoint.
        settings: answers to what the source does not say.
        verifier_config: the verifier.

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
    for target in (flat.get("target_hidden_size"), verifier_config.hidden_size):
        if target not in (None, hidden):
            raise CheckpointError(
                f"{where}: its width is {hidden}, the verifier's {target}; drafters of another width are not supported"
            )
    if vocab_size != verifier_config.vocab_size:
        raise CheckpointError(
            f"{where}: made for a vocabulary of {vocab_size}, {verifier_config.name_or_path} has {verifier_config.vocab_size}"
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
        "max_position_embeddings": int(flat.get("max_position_embeddings", verifier_config.max_position_embeddings)),
        "attention_bias": any(name.endswith("_proj.bias") for name in names),
        "vocab_size": vocab_size,
        "draft_vocab_size": int(flat.get("draft_vocab_size") or vocab_size),
        "norm_before_residual": bool(flat.get("norm_before_residual", False)),
        "norm_before_fc": bool(eagle.get("norm_before_fc", flat.get("norm_before_fc", False))),
        "norm_output": kind == "eagle3" and bool(flat.get("norm_output", False)),
        "aux_layer_ids": _layer_ids(foreign, eagle, num_aux, settings, verifier_config, notes),
        "mask_token_id": _mask_token(flat, settings, where) if kind == "peagle" else None,
        "num_speculative_tokens": _num_speculative_tokens(flat, kind, settings, notes),
        "verifier": verifier_config.name_or_path,
        "verifier_architectures": tuple(verifier_config.architectures),
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
    verifier_config: VerifierConfig,
    notes: list[str],
) -> tuple[int, ...]:
    """Layer ids as inputs of layers; see `layer_id_meaning`."""
    where = foreign.where
    given = foreign.config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    try:
        if settings.target_layer_ids is not None:
            ids = resolve_aux_layer_ids(verifier_config.num_layers, settings.target_layer_ids)
        elif given:
            is_output = settings.layer_id_meaning == "outputs" or (
                settings.layer_id_meaning == "auto" and int(given[0]) == 1
            )
            if is_output:
                notes.append(f"layer ids {list(given)} are taken for outputs of layers: one is added to each")
            ids = resolve_aux_layer_ids(verifier_config.num_layers, [int(i) + is_output for i in given])
        else:
            ids = resolve_aux_layer_ids(verifier_config.num_layers, None)
            notes.append(
                f"no layer ids in the source: {list(ids)} are the default for {verifier_config.num_layers} layers"
            )
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
