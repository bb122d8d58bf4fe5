"""Adds rows to a hidden-state store: shard by shard, whole or not at all, by one process at a time."""

from __future__ import annotations

import fcntl
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle import log
from peagle.errors import DiskError, StoreError
from peagle.files import sha256_file, whole_file, write_json
from peagle.hidden_states.batch import StoredRow
from peagle.hidden_states.store import (
    PARTS,
    SPEC_FILE,
    RowEntry,
    Shard,
    StoreSpec,
    index_paths,
    read_index,
    read_spec,
    states_checksum,
    write_spec,
)

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 60.0
"""A shard is finished after this long even if it is small, so that a slow verifier's work is not lost to a kill."""


class StoreWriter:
    """Adds rows to a store, a shard at a time, written by a thread while the next one fills.

    Use as a context manager: leaving it writes what is pending, unless the disk is full. Only one writer at a time.
    """

    def __init__(self, folder: Path, spec: StoreSpec, shard_bytes: int, lock: Any, shards: list[Shard]) -> None:
        self.folder, self.spec = folder, spec
        self.entries = {entry.row_id: entry for shard in shards for entry in shard.rows}
        """Rows that are in the store, pending ones included."""
        self._shard_bytes, self._lock = shard_bytes, lock
        self._number = max((int(shard.path.stem.split("-")[1]) for shard in shards), default=-1) + 1
        self._pending: list[StoredRow] = []
        self._pending_bytes = 0
        self._last_flush_s = time.monotonic()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="peagle-store")
        self._writing: Future[Shard] | None = None

    @staticmethod
    def open(folder: Path, spec: StoreSpec, shard_bytes: int) -> StoreWriter:
        """Create a store, or open one to go on: every shard is verified, damaged ones are named and removed.

        Raises:
            StoreError: the store was made for something else, or another process is writing it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (held until the writer closes)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StoreError(f"{folder}: another process is extracting into this store") from None
        except OSError as error:  # a network disk without locks: nothing keeps a second writer away
            logger.debug("%s: no locks on this disk (%s)", folder, error)
        try:
            if (folder / SPEC_FILE).exists():
                read_spec(folder)[0].require_same(spec, folder)
            elif index_paths(folder):
                raise StoreError(
                    f"{folder}: shards without {SPEC_FILE}, which says of which verifier and layers they are; put it "
                    "back, remove the folder, or choose another --output"
                )
            write_spec(folder, spec, is_complete=False)
            return StoreWriter(folder, spec, shard_bytes, lock, _sound_shards(folder))
        except BaseException:
            lock.close()
            raise

    def add(self, stored: StoredRow) -> None:
        """Add a row; its states are on the CPU, in the spec's dtype. Blocks while an earlier shard is being written.

        Raises:
            DiskError: an earlier shard could not be written.
            ValueError: the row is already there, or its shapes or dtype are not the spec's.
        """
        entry = RowEntry.of(stored.row)
        if entry.row_id in self.entries:
            raise ValueError(f"row {entry.row_id} is already in the store")
        if misfit := self.spec.misfit(entry, stored.aux_states, stored.last_states):
            raise ValueError(misfit)
        self._pending.append(stored)
        self._pending_bytes += self.spec.row_bytes(entry)
        self.entries[entry.row_id] = entry
        is_late = time.monotonic() - self._last_flush_s > FLUSH_EVERY_S
        if self._pending_bytes >= self._shard_bytes or is_late:
            self.flush()

    def flush(self) -> None:
        """Hand the pending rows to the writing thread, after the shard before them is on the disk."""
        self._wait()
        if self._pending:
            self._writing = self._thread.submit(write_shard, self.folder, self._number, self._pending)
            self._number += 1
        self._pending, self._pending_bytes, self._last_flush_s = [], 0, time.monotonic()

    def finish(self) -> None:
        """Write everything and mark the store complete."""
        self.flush()
        self._wait()
        write_spec(self.folder, self.spec, is_complete=True)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, DiskError):
                self.flush()
                self._wait()
        finally:
            self._thread.shutdown()
            self._lock.close()


def write_shard(folder: Path, number: int, rows: list[StoredRow]) -> Shard:
    """Write rows as shard `number`: tensors first, then the index that makes them count.

    With no space left it is a DiskError, and nothing of this shard remains.
    """
    tensors: dict[str, Tensor] = {}
    entries = []
    for place, stored in enumerate(rows):
        parts = (
            torch.tensor(stored.row.input_ids, dtype=torch.int32),
            torch.tensor(stored.row.loss_mask, dtype=torch.uint8),
            stored.aux_states.contiguous(),
            stored.label_pos.to(torch.int32),
            stored.last_states.contiguous(),
        )
        entries.append(replace(RowEntry.of(stored.row), states_xxh3=states_checksum(parts[2:])))
        tensors |= {f"{name}.{place}": tensor for name, tensor in zip(PARTS, parts)}
    path = folder / f"shard-{number:05d}.safetensors"
    with whole_file(path) as temporary:
        save_file(tensors, temporary)
        num_bytes, digest = temporary.stat().st_size, sha256_file(temporary)
    shard = Shard(path, num_bytes, digest, tuple(entries))
    index = {"file": path.name, "bytes": num_bytes, "sha256": digest, "rows": [asdict(entry) for entry in shard.rows]}
    write_json(path.with_suffix(".json"), index)
    return shard


def _sound_shards(folder: Path) -> list[Shard]:
    """The shards that are whole. What is not is named and removed; leftovers of a killed run are removed."""
    sound = []
    paths = index_paths(folder)
    with log.progress("verify", len(paths), "shards") as meter:
        for path in paths:
            try:
                shard = read_index(path)
                fault = shard.fault() or shard.index_fault()
            except StoreError:
                shard, fault = Shard(path.with_suffix(".safetensors"), 0, "", ()), "has a damaged index"
            if fault is None:
                sound.append(shard)
            else:
                logger.warning("%s %s: its rows are made again", shard.path, fault)
                path.unlink()
                if shard.path.is_dir():
                    raise StoreError(f"{shard.path} {fault}; remove that folder and run the same command again")
                shard.path.unlink(missing_ok=True)
            meter.advance(1)
    known = {shard.path for shard in sound}
    for leftover in [*folder.glob("shard-*.safetensors"), *folder.glob(".shard-*.tmp")]:
        if leftover not in known:
            leftover.unlink()
    return sound
