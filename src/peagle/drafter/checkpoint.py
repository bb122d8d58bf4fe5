"""Checkpoint folders that `vllm serve` loads as they are: `config.json` and `model.safetensors` at the root."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.drafter.card import write_card
from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.errors import CheckpointError, one_line
from peagle.files import whole_folder, write_json

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def find(checkpoint: str, weights: Sequence[str] = ("*.safetensors",)) -> Path:
    """The folder of a checkpoint: itself, or the download of a hub id, with the weight files that match `weights`.

    Raises:
        CheckpointError: neither a folder with a `config.json` nor a hub repository that can be fetched.
    """
    folder = Path(checkpoint)
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{checkpoint}: no {CONFIG} in this folder; name one such as RUN/checkpoint_best")
        return folder
    if folder.exists() or checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") != 1:
        raise CheckpointError(f"{checkpoint}: no such folder, and not a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(checkpoint, allow_patterns=["*.json", *weights]))
    except Exception as error:  # the hub's many errors, all of which mean that it is not available
        reason = one_line(error)
        raise CheckpointError(f"{checkpoint}: no such folder, and the hub does not give it ({reason})") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint folder."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected an object, found a {type(config).__name__}")
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file at the folder's root, as vLLM reads them."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no safetensors file; the checkpoint is incomplete")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged or cut short ({error})") from None
    return tensors


def load(checkpoint: str, dtype: torch.dtype, device: torch.device) -> Drafter:
    """Load a drafter from a folder or a hub id, strictly: every tensor must be there, in its shape, none left over.

    Raises:
        CheckpointError: what is missing, left over or misshapen, by name.
    """
    folder = find(checkpoint)
    config = DrafterConfig.from_json(read_config(folder), str(folder / CONFIG))
    drafter = Drafter(config)
    load_weights(drafter, read_weights(folder), str(folder))
    return drafter.to(device=device, dtype=dtype).eval()


def load_weights(drafter: Drafter, tensors: dict[str, Tensor], where: str) -> None:
    """Copy `tensors` into the drafter, strictly; `where` names their origin in messages.

    Raises:
        CheckpointError: what is missing, left over, misshapen, of another kind of number, or not finite.
    """
    wanted = drafter.state_dict()
    if not drafter.config.is_pruned and "d2t" in tensors and not bool(tensors["d2t"].any()):
        # Some trainers write the tables of a whole vocabulary: they change nothing.
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        raise CheckpointError(f"{where}: no tensor {', '.join(missing)}; the checkpoint cannot be used")
    if extra:
        raise CheckpointError(f"{where}: unknown tensor {', '.join(extra)}; the checkpoint is of another kind")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{where}: {name} is {list(tensor.shape)}, its config.json asks for {list(wanted[name].shape)}"
            )
        if tensor.dtype.is_floating_point != wanted[name].dtype.is_floating_point:
            raise CheckpointError(f"{where}: {name} is {tensor.dtype}, expected {wanted[name].dtype}")
        if tensor.dtype.is_floating_point and not torch.isfinite(tensor).all():
            raise CheckpointError(f"{where}: {name} holds NaN or infinity; go back to an earlier checkpoint")
    if drafter.config.is_pruned:
        fault = vocabulary_fault(tensors["d2t"], tensors["t2d"], drafter.config.vocab_size)
        if fault is not None:
            raise CheckpointError(f"{where}: {fault[0]} {fault[1]}")
    drafter.load_state_dict(tensors)


def vocabulary_fault(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> tuple[str, str] | None:
    """What is wrong with the tables of a pruned vocabulary, as (tensor, fault), or None.

    Args:
        d2t: offsets: the verifier's id of draft token i is i + d2t[i]; int64, [draft_vocab_size].
        t2d: whether each token can be drafted, bool, [vocab_size]; None: only `d2t` is looked at.
        vocab_size: the verifier's.
    """
    ids = d2t.long() + torch.arange(d2t.numel())
    outside = (ids < 0) | (ids >= vocab_size)
    if bool(outside.any()):
        bad = int(outside.nonzero()[0])
        return "d2t", f"draft id {bad} maps to {int(ids[bad])}, outside 0..{vocab_size - 1}; d2t holds offsets, not ids"
    if len(ids.unique()) != len(ids):
        return "d2t", f"{len(ids) - len(ids.unique())} draft ids map to a token that another one maps to"
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        return "t2d", "names other tokens than d2t, which holds offsets: verifier id = draft id + d2t"
    return None


def save(drafter: Drafter, folder: Path, dtype: str) -> None:
    """Write a checkpoint folder whole; an older one of that name is replaced, a failed write leaves it as it was.

    `dtype` is that of all floating tensors: "bfloat16", "float16" or "float32".
    """
    with whole_folder(folder) as temporary:
        write_into(temporary, drafter.config, drafter.state_dict(), dtype)


def write_into(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor], dtype: str) -> None:
    """Write `config.json`, `model.safetensors` and a model card into an existing folder.

    Raises:
        CheckpointError: a tensor holds NaN or infinity; such a drafter must never be served.
    """
    cast = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if tensor.dtype.is_floating_point:
            tensor = tensor.to(DTYPES[dtype])
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{name} holds NaN or infinity; nothing was written")
        elif name not in ("d2t", "t2d"):
            raise CheckpointError(f"{name} is {tensor.dtype}, expected floating numbers; nothing was written")
        cast[name] = tensor.contiguous()
    save_file(cast, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, config.to_json(dtype))
    write_card(folder, config, {}, None, None)
