"""Drafter checkpoints of other projects as they lie on the disk, and which layout they are in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.checkpoint import read_config, read_weights
from peagle.errors import CheckpointError

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
