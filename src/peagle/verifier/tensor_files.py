"""A model's weight files seen as one table of named tensors, read one at a time.

Single or sharded safetensors, single or sharded PyTorch files, a local folder or a hub id. From the hub only the files
that hold a wanted tensor are fetched. Of a GGUF file (in a folder with the model's config.json and tokenizer) the
embedding, norm and head are read, dequantised, under the names that they have elsewhere.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.errors import VerifierError
from peagle.verifier.facts import first_line

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What safetensors, torch and pickle raise for a file that is damaged or of another kind.
_UNREADABLE = (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)
_SINGLES = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True)
class TensorFiles:
    """Which file holds which tensor."""

    name_or_path: str
    file_of: dict[str, str]
    """Tensor name -> file name inside the model."""

    @staticmethod
    def open(name_or_path: str) -> TensorFiles:
        """List the tensors of a model.

        Raises:
            VerifierError: no weights, a shard missing, or a file that cannot be read.
        """
        for index in _INDEXES:
            path = _find(name_or_path, index)
            if path is not None:
                try:
                    table = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise VerifierError(f"{path}: not a weight index: {first_line(error)}") from None
                odd = next((file for file in table.values() if not isinstance(file, str)), None)
                if odd is not None:
                    raise VerifierError(f"{path}: not a weight index: it names the file {odd!r}")
                return TensorFiles(name_or_path, table)
        for single in _SINGLES:
            path = _find(name_or_path, single)
            if path is not None:
                return TensorFiles(name_or_path, dict.fromkeys(_names(path), single))
        if Path(name_or_path).is_dir():
            table = {}
            for path in sorted(Path(name_or_path).glob("*.safetensors")):
                table.update(dict.fromkeys(_names(path), path.name))
            gguf = gguf_file(name_or_path)
            if not table and gguf is not None:
                stored = set(_gguf_tensors(gguf))
                table = {name: gguf.name for name, theirs in _GGUF_NAMES.items() if theirs in stored}
            if table:
                return TensorFiles(name_or_path, table)
            others = sorted(p.suffix for p in Path(name_or_path).iterdir() if p.suffix in (".pth", ".h5", ".msgpack"))
            hint = f"; found {others[0]} files, which peagle does not read" if others else ""
            raise VerifierError(f"{name_or_path}: no weights (expected model.safetensors, shards with an index){hint}")
        raise VerifierError(f"{name_or_path}: no weights found on the hub (expected safetensors or pytorch_model.bin)")

    @property
    def is_gguf(self) -> bool:
        """Whether the tensors come from a GGUF file, whose norms have the 1 of (1 + w) in them already."""
        return any(file.endswith(".gguf") for file in self.file_of.values())

    @property
    def names(self) -> set[str]:
        """All tensor names."""
        return set(self.file_of)

    @property
    def paths(self) -> list[Path]:
        """All weight files, on this machine."""
        return [self._path(file) for file in sorted(set(self.file_of.values()))]

    def read(self, name: str) -> Tensor:
        """Read one tensor as it is stored, on the CPU.

        Raises:
            VerifierError: its file is missing or damaged.
        """
        path = self._path(self.file_of[name])
        if path.suffix == ".gguf":
            return _gguf_tensors(path)[_GGUF_NAMES[name]]()
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as handle:
                    return handle.get_tensor(name).clone()
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)[name].clone()
        except (
            SafetensorError,
            OSError,
            RuntimeError,
            KeyError,
            ValueError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            raise VerifierError(f"{path}: {name} cannot be read: {first_line(error)}") from None

    def _path(self, file: str) -> Path:
        path = _find(self.name_or_path, file)
        if path is None:
            raise VerifierError(f"{self.name_or_path}: {file} is missing, though the weight index names it")
        return path


def _find(name_or_path: str, file: str) -> Path | None:
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder / file if (folder / file).exists() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        name_or_path, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def _names(path: Path) -> list[str]:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as handle:
                return list(handle.keys())
        return list(torch.load(path, map_location="meta", weights_only=True, mmap=True))
    except _UNREADABLE as error:
        raise VerifierError(f"{path}: cannot be read: {first_line(error)}") from None


def gguf_file(name_or_path: str) -> Path | None:
    """The GGUF file of a model folder that has no other weights.

    Raises:
        VerifierError: there are several.
    """
    folder = Path(name_or_path)
    found = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    if not found or any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return None
    if len(found) > 1:
        raise VerifierError(
            f"{folder}: {len(found)} GGUF files ({found[0].name}, {found[1].name} ...); keep one of them"
        )
    return found[0]


def _gguf_tensors(path: Path) -> dict[str, Callable[[], Tensor]]:
    """Readers of a GGUF file's tensors by its own names: dequantised, rows as PyTorch has them."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise VerifierError(f"{path}: GGUF files need the package gguf; pip install 'peagle[gguf]'") from None

    def read(tensor: Any) -> Tensor:
        try:
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError:
            raise VerifierError(
                f"{path}: {tensor.name} is quantised as {tensor.tensor_type.name}, unknown here"
            ) from None
        return values.to(torch.float32).reshape([int(size) for size in tensor.shape[::-1]])

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise VerifierError(f"{path}: cannot be read: {first_line(error)}") from None
    return {tensor.name: functools.partial(read, tensor) for tensor in reader.tensors}
