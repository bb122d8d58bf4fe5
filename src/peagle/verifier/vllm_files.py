"""The client's side of the folder through which a vLLM server hands over hidden states.

The client names each file (the connector refuses unsafe names), so it knows what to wait for, and what is an orphan:
all names of one store begin alike. A file appears whole, by a rename; `NAME.safetensors.error` says that its write
failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peagle.errors import EndpointError

IN_FLIGHT = "in-flight"
"""Folder below `--hidden-states-path` that holds only what is under way: that path may be the store's own folder."""
_FIRST_LOOK_S, _SLOWEST_LOOK_S = 0.002, 0.1


class WriteFailedError(EndpointError):
    """The server could not write a file."""


class MissingFileError(EndpointError):
    """The server answered, but its file did not appear here."""


@dataclass(frozen=True)
class ServedStates:
    """What one file holds. The tensor may be mapped from a file that is deleted already: copy what is to be kept."""

    hidden_states: Tensor
    """Ascending layer id, the server's dtype, [num_tokens, num_layers, hidden_size]."""
    token_ids: list[int]


class StatesFolder:
    """The files of one run in a folder shared with the server.

    Args:
        hidden_states_path: as given to `peagle launch-vllm --hidden-states-path`, as this machine sees it.
        store: identity of what is being made (its output path): names of different stores differ, those of an earlier,
            killed run of the same store are recognized and swept.
    """

    def __init__(self, hidden_states_path: Path, store: str) -> None:
        self.path = hidden_states_path / IN_FLIGHT
        self._store = "pe-" + hashlib.sha256(store.encode()).hexdigest()[:12]
        self._run = os.urandom(4).hex()

    def name(self, number: int) -> str:
        """Name for the `number`-th request of this run; never given twice."""
        return f"{self._store}-{self._run}-{number}"

    def wait(self, name: str, timeout_s: float) -> Path:
        """Wait for a file to appear whole.

        Raises:
            WriteFailedError: the server could not write it.
            MissingFileError: nothing came in time.
        """
        path = self.path / f"{name}.safetensors"
        note = path.with_name(path.name + ".error")
        deadline_s = time.monotonic() + timeout_s
        pause_s = _FIRST_LOOK_S
        while not path.exists():
            if note.exists():
                raise WriteFailedError(_reason(note))
            if time.monotonic() > deadline_s:
                raise MissingFileError(f"{path}: did not appear within {timeout_s:g} s of the server's answer")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _SLOWEST_LOOK_S)
        return path

    def read(self, name: str, timeout_s: float) -> ServedStates:
        """Wait for a file, read it and delete it, whatever comes of it.

        Raises:
            WriteFailedError, MissingFileError: see `wait`.
            EndpointError: the file is damaged.
        """
        try:
            path = self.wait(name, timeout_s)
            tensors = load_file(path)
            return ServedStates(tensors["hidden_states"], tensors["token_ids"].tolist())
        except (SafetensorError, KeyError, OSError) as error:
            raise EndpointError(f"{self.path / name}: damaged file from the server: {error}") from None
        finally:
            self.delete(name)

    def delete(self, name: str) -> None:
        """Remove a file and its note, if there."""
        path = self.path / f"{name}.safetensors"
        for entry in (path, path.with_name(path.name + ".error")):
            try:
                entry.unlink(missing_ok=True)
            except OSError as error:
                raise EndpointError(
                    f"{entry}: cannot be removed ({error.strerror}); the server's files pile up"
                ) from None

    def sweep(self) -> int:
        """Remove every finished file of this store, of this and of earlier runs; returns how many."""
        removed = 0
        for entry in self.path.glob(f"{self._store}-*"):
            with contextlib.suppress(OSError):
                entry.unlink()
                removed += 1
        return removed


def _reason(note: Path) -> str:
    try:
        text = note.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""
    return f"the server could not write hidden states: {text or 'no reason given; is its disk full?'}"
