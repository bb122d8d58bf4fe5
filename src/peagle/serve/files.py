"""A checkpoint's files as they are on the disk, nothing interpreted, and what checks find in them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG = "config.json"
Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class CheckFinding:
    """One thing about a checkpoint."""

    level: Level
    where: str
    """File and field or tensor: "config.json: mask_token_id"."""
    message: str
    """What was found against what was expected, and what to do."""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass
class Findings:
    """Findings in the order in which they came: errors keep a checkpoint from being served as it was trained."""

    found: list[CheckFinding] = field(default_factory=list)

    def error(self, where: str, message: str) -> None:
        """Add what keeps it from being served as it was trained."""
        self.found.append(CheckFinding("error", where, message))

    def warning(self, where: str, message: str) -> None:
        """Add what should be looked at."""
        self.found.append(CheckFinding("warning", where, message))

    def note(self, where: str, message: str) -> None:
        """Add something worth knowing."""
        self.found.append(CheckFinding("note", where, message))

    def of(self, level: Level) -> list[CheckFinding]:
        """Those of one level."""
        return [finding for finding in self.found if finding.level == level]

    @property
    def is_servable(self) -> bool:
        """Whether there is no error."""
        return not self.of("error")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor by its header."""

    file: Path
    name: str
    """As in the file."""
    dtype: str
    """As safetensors writes it: "BF16", "F32", "I64", "BOOL"."""
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        """Whether it is a plain floating dtype."""
        return self.dtype in ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class RawCheckpoint:
    """What lies at a checkpoint's root."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    """By the name that vLLM gives them: without a `model.` prefix, `midlayer.` as `layers.0.`."""

    def read(self, name: str) -> Tensor:
        """A tensor's values."""
        info = self.tensors[name]
        with safe_open(info.file, "pt") as handle:
            return handle.get_tensor(info.name)

    def draft_ids(self) -> Tensor:
        """Verifier ids of the draft vocabulary, as vLLM reads `d2t`: verifier id = draft id + d2t[draft id]."""
        offsets = self.read("d2t").long()
        return offsets + torch.arange(len(offsets))

    def chunks(self, name: str, rows: int) -> Iterator[Tensor]:
        """A tensor's values, some rows at a time: embeddings do not fit into memory twice."""
        info = self.tensors[name]
        with safe_open(info.file, "pt") as handle:
            if len(info.shape) < 2 or info.shape[0] <= rows:
                yield handle.get_tensor(info.name)
                return
            part = handle.get_slice(info.name)
            for first in range(0, info.shape[0], rows):
                yield part[first : first + rows]


def read_checkpoint(folder: Path, findings: Findings) -> RawCheckpoint:
    """Read what is at a checkpoint's root; faults of the files themselves become findings."""
    config = _read_config(folder, findings)
    tensors: dict[str, TensorInfo] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
        hint = f"; {others[0]} is not read" if others else ""
        findings.error(folder.name, f"no .safetensors file at the checkpoint's root{hint}")
    for file in files:
        try:
            infos = list(_headers(file))
        except (SafetensorError, OSError) as error:
            findings.error(file.name, f"damaged or cut short ({error}); save the checkpoint again")
            continue
        for info in infos:
            name = _served_name(info.name)
            if name in tensors:
                twice = f"{info.name} is in {tensors[name].file.name} too"
                findings.error(file.name, f"{twice}; vLLM loads every .safetensors file at the root, the last one wins")
            tensors[name] = info
    _check_index(folder, tensors, findings)
    return RawCheckpoint(folder, config, tensors)


def _read_config(folder: Path, findings: Findings) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        fault = "is missing"
    except (OSError, ValueError) as error:
        fault = f"cannot be read as JSON: {error}"
    else:
        if isinstance(config, dict) and config:
            return config
        found = "an empty object" if config == {} else f"a {type(config).__name__}"
        fault = f"is {found}; expected a drafter's configuration"
    findings.error(CONFIG, fault)
    return {}


def _headers(file: Path) -> Iterator[TensorInfo]:
    with safe_open(file, "pt") as handle:
        for name in handle.keys():  # noqa: SIM118 (safe_open is no dictionary)
            part = handle.get_slice(name)
            yield TensorInfo(file, name, part.get_dtype(), tuple(part.get_shape()))


def _served_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _check_index(folder: Path, tensors: dict[str, TensorInfo], findings: Findings) -> None:
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted({str(file) for file in listed.values() if not (folder / str(file)).exists()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        findings.error(path.name, "is not an index of tensors")
        return
    for file in missing:
        findings.error(path.name, f"names {file}, which is not there; the download or the save is incomplete")
    absent = sorted(set(map(_served_name, listed)) - set(tensors))
    if absent and not missing:
        findings.error(path.name, f"lists {absent[0]} ({len(absent)} tensors), which no file holds")
