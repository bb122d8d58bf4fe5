"""The hidden-state store: a folder of shards, each whole or absent, all made by one verifier with one set of layers."""

from __future__ import annotations

import fcntl
import json
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from peagle import log
from peagle.data.records import TokenRow
from peagle.errors import DiskError, StoreError
from peagle.files import write_json
from peagle.hidden_states.batch import StoredRow
from peagle.hidden_states.shards import PARTS, RowEntry, Shard, index_paths, read_index, write_shard

logger = logging.getLogger(__name__)

FORMAT = 1
FLUSH_EVERY_S = 60.0
"""A shard is finished after this long even if it is small, so that a slow verifier's work is not lost to a kill."""
_SPEC_FILE = "store.json"
_OPEN_SHARDS = 256


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """What every row of a store has in common."""

    verifier: str
    """Folder or hub id."""
    verifier_fingerprint: str
    """`verifier.weights.fingerprint`, or "" where the weights are not on this machine."""
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    """Ascending; id j is the residual stream after j layers."""
    dtype: str
    """Of the states: "bfloat16"."""
    tokenizer_sha256: str
    """Of the tokenizer that made the rows, as `prepare` recorded it; "" if unknown."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` for torch."""
        return getattr(torch, self.dtype)

    def check_types(self) -> None:
        """Refuse what no writer wrote.

        Raises:
            TypeError: names the field.
        """
        for name in ("num_layers", "hidden_size", "vocab_size"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected a whole number")
        if not self.aux_layer_ids or any(type(one) is not int for one in self.aux_layer_ids):
            raise TypeError(f"aux_layer_ids is {list(self.aux_layer_ids)}, expected whole numbers")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise TypeError(f"dtype is {self.dtype!r}, expected bfloat16, float16 or float32")

    def row_bytes(self, entry: RowEntry) -> int:
        """What a row takes on disk."""
        return entry.stored_bytes(len(self.aux_layer_ids), self.hidden_size, self.torch_dtype.itemsize)

    def require_same(self, other: StoreSpec, where: Path) -> None:
        """Refuse to mix: `self` is what the store was made for, `other` what is wanted now.

        Raises:
            StoreError: names the first field that differs.
        """
        for name, label in (
            ("aux_layer_ids", "layer ids"),
            ("dtype", "dtype"),
            ("num_layers", "number of layers"),
            ("hidden_size", "hidden size"),
            ("vocab_size", "vocabulary size"),
            ("model_type", "model type"),
            ("verifier_fingerprint", "verifier weights"),
            ("tokenizer_sha256", "tokenizer"),
        ):
            mine, wanted = getattr(self, name), getattr(other, name)
            if mine != wanted and "" not in (mine, wanted):
                detail = f"{_shown(mine)}, now {_shown(wanted)}"
                if self.verifier != other.verifier:
                    detail += f" ({self.verifier}, now {other.verifier})"
                raise StoreError(
                    f"{where}: the store was made with other {label}: {detail}. Choose another --output, or remove it."
                )


def read_spec(folder: Path) -> tuple[StoreSpec, bool]:
    """The spec of a store and whether its extraction ran to its end.

    Raises:
        StoreError: there is no store, or it is of another format.
    """
    path = folder / _SPEC_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{folder}: no hidden-state store (no {_SPEC_FILE}); make one with `peagle extract`") from None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: cannot be read ({type(error).__name__}); remove this store, or extract into another folder"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StoreError(f"{path}: not a store of format {FORMAT}; extract again into another folder")
    try:
        spec = StoreSpec(**{**found["spec"], "aux_layer_ids": tuple(found["spec"]["aux_layer_ids"])})
        spec.check_types()
        return spec, bool(found["is_complete"])
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path}: damaged ({error}); extract again into another folder") from None


def write_spec(folder: Path, spec: StoreSpec, is_complete: bool) -> None:
    """Write `store.json`."""
    write_json(
        folder / _SPEC_FILE,
        {
            "format": FORMAT,
            "last_states": "before the final norm",
            "is_complete": is_complete,
            "spec": asdict(spec),
        },
    )


class StoreReader:
    """Rows of a store, by id. A shard's checksum is verified when its first row is read, once per process."""

    def __init__(self, folder: Path, spec: StoreSpec, is_complete: bool, shards: Sequence[Shard]) -> None:
        self.folder, self.spec, self.is_complete = folder, spec, is_complete
        self._places: dict[str, tuple[Shard, int]] = {}
        for shard in shards:
            for place, entry in enumerate(shard.rows):
                self._places[entry.row_id] = (shard, place)
        self._verified: set[Path] = set()
        self._finite: set[str] = set()
        self._open: dict[Path, Any] = {}
        self._lock = threading.Lock()

    @staticmethod
    def open(folder: Path) -> StoreReader:
        """Open a store.

        Raises:
            StoreError: no store, no rows, or a shard (named) that is missing or of another size than it was.
        """
        folder = Path(folder)
        spec, is_complete = read_spec(folder)
        shards = [read_index(path) for path in index_paths(folder)]
        for shard in shards:
            if not shard.path.exists() or shard.path.stat().st_size != shard.num_bytes:
                raise _damaged(shard, shard.fault() or "changed while it was read")
        if not any(shard.rows for shard in shards):
            raise StoreError(f"{folder}: the store holds no rows; run `peagle extract` again")
        if not is_complete:
            logger.warning("%s: extraction has not run to its end; `peagle extract` would go on", folder)
        return StoreReader(folder, spec, is_complete, shards)

    @property
    def row_ids(self) -> list[str]:
        """Every row, in the order of the shards."""
        return list(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._places

    def entry(self, row_id: str) -> RowEntry:
        """What the index says of a row, without reading its shard.

        Raises:
            StoreError: no such row.
        """
        try:
            shard, place = self._places[row_id]
        except KeyError:
            raise StoreError(f"{self.folder}: no row {row_id} in the store; run `peagle extract` again") from None
        return shard.rows[place]

    def token_row(self, row_id: str) -> TokenRow:
        """A row's tokens and mask; no states are read. Checked against its own hashes, not the shard's checksum.

        Raises:
            StoreError: no such row, or its ids are not those that were stored.
        """
        entry = self.entry(row_id)
        ids, mask = (tensor.tolist() for tensor in self._tensors(row_id, PARTS[:2]))
        row = TokenRow(
            row_id=row_id,
            source=entry.source,
            input_ids=ids,
            loss_mask=mask,
            next_is_supervised=entry.next_is_supervised,
            tail_length=entry.tail_length,
        )
        if RowEntry.of(row) != entry:
            raise _damaged(self._places[row_id][0], f"holds other tokens for row {row_id} than its index says")
        return row

    def read(self, row_id: str) -> StoredRow:
        """A row with its states.

        The shard is verified when its first row is read; a row is searched for NaN and infinity at its first reading.

        Raises:
            StoreError: no such row, a damaged shard (named), or NaN or infinity in the states (the row is named).
        """
        row = self.token_row(row_id)
        shard = self._places[row_id][0]
        if shard.path not in self._verified:
            fault = shard.fault()
            if fault:
                raise _damaged(shard, fault)
            self._verified.add(shard.path)
        aux, label_pos, last = self._tensors(row_id, PARTS[2:])
        entry, width = shard.rows[self._places[row_id][1]], self.spec.hidden_size
        shapes = (entry.num_tokens, len(self.spec.aux_layer_ids) * width), (entry.num_labels, width)
        is_same_dtype = {aux.dtype, last.dtype} == {self.spec.torch_dtype}
        if (tuple(aux.shape), tuple(last.shape)) != shapes or not is_same_dtype:
            raise StoreError(
                f"{shard.path}: row {row_id}: states of shape {list(aux.shape)} in {aux.dtype}, {_SPEC_FILE} asks for "
                f"{list(shapes[0])} in {self.spec.torch_dtype}; one of the two is of another store: extract again into "
                "another folder"
            )
        if row_id not in self._finite:
            for name, states in (("aux_states", aux), ("last_states", last)):
                if not torch.isfinite(states).all():
                    raise StoreError(
                        f"{shard.path}: row {row_id}: {name} hold NaN or infinity; it cannot be trained on"
                    )
            self._finite.add(row_id)
        return StoredRow(row, aux, label_pos.to(torch.int64), last)

    def _tensors(self, row_id: str, names: Sequence[str]) -> list[torch.Tensor]:
        shard, place = self._places[row_id]
        try:
            with self._lock:
                handle = self._open.get(shard.path)
                if handle is None:
                    if len(self._open) >= _OPEN_SHARDS:
                        self._open.pop(next(iter(self._open)))
                    handle = self._open[shard.path] = safe_open(shard.path, "pt")
            return [handle.get_tensor(f"{name}.{place}") for name in names]
        except (SafetensorError, OSError) as error:
            raise _damaged(shard, f"cannot be read ({error})") from None


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
            if (folder / _SPEC_FILE).exists():
                read_spec(folder)[0].require_same(spec, folder)
            elif index_paths(folder):
                raise StoreError(
                    f"{folder}: shards without {_SPEC_FILE}, which says of which verifier and layers they are; put it "
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
        width = len(self.spec.aux_layer_ids) * self.spec.hidden_size
        expected = ((entry.num_tokens, width), (entry.num_labels, self.spec.hidden_size))
        if (tuple(stored.aux_states.shape), tuple(stored.last_states.shape)) != expected:
            raise ValueError(f"row {entry.row_id}: states of shape {stored.aux_states.shape}, expected {expected}")
        if {stored.aux_states.dtype, stored.last_states.dtype} != {self.spec.torch_dtype}:
            raise ValueError(f"row {entry.row_id}: states are not {self.spec.dtype}")
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


def _damaged(shard: Shard, fault: str) -> StoreError:
    return StoreError(f"{shard.path} {fault}; run the same `peagle extract` again: it re-makes this shard's rows")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return value[:12] if isinstance(value, str) else str(value)
