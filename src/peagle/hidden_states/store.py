"""The hidden-state store as it is on disk, and its reader: a folder of shards, each whole or absent.

A shard is a safetensors file of whole rows, and beside it the index of those rows with checksums. A shard counts once
its index exists, and the index is written after the tensors: a run killed in between leaves a file that the next run
sweeps away. `store.json` says what all rows have in common (`StoreSpec`): one verifier, one set of layers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.data.records import TokenRow
from peagle.errors import StoreError, VerifierError
from peagle.files import sha256_file, write_json
from peagle.hidden_states.batch import StoredRow
from peagle.layout.supervision import label_positions
from peagle.verifier.model_config import VerifierConfig, resolve_aux_layer_ids
from peagle.verifier.weights import fingerprint, same_weights

logger = logging.getLogger(__name__)

FORMAT = 1
PARTS = ("input_ids", "loss_mask", "aux_states", "label_pos", "last_states")
SPEC_FILE = "store.json"
_OPEN_SHARDS = 256
_HEADER_BYTES = 95  # of the safetensors header, per tensor
_INDEX_BYTES = 420  # of the index, per row


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """What every row of a store has in common."""

    verifier: str
    """Folder or hub id."""
    verifier_fingerprint: str
    """`verifier.weights.fingerprint`, or "" where no weights are on this machine."""
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

    @staticmethod
    def of(
        verifier: VerifierConfig,
        *,
        aux_layer_ids: Sequence[int] | None,
        dtype: str,
        tokenizer_sha256: str,
        is_served: bool,
    ) -> StoreSpec:
        """What a verifier's states will be like.

        `aux_layer_ids` come in any order, None for the default; `dtype` "auto" is the verifier's own; `is_served` says
        that a server has the weights, so that they need not be on this machine.

        Raises:
            VerifierError: layer ids that it does not have, or no weights.
        """
        try:
            weights = fingerprint(verifier, fetches=not is_served)
        except VerifierError:
            if not is_served:
                raise
            weights = ""
        return StoreSpec(
            verifier=verifier.name_or_path,
            verifier_fingerprint=weights,
            model_type=verifier.model_type,
            num_layers=verifier.num_layers,
            hidden_size=verifier.hidden_size,
            vocab_size=verifier.vocab_size,
            aux_layer_ids=resolve_aux_layer_ids(verifier.num_layers, aux_layer_ids),
            dtype=verifier.dtype if dtype == "auto" else dtype,
            tokenizer_sha256=tokenizer_sha256,
        )

    def check_types(self) -> None:
        """Refuse what no writer wrote: raises a TypeError that names the field."""
        for name in ("num_layers", "hidden_size", "vocab_size"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected a whole number")
        if not self.aux_layer_ids or any(type(one) is not int for one in self.aux_layer_ids):
            raise TypeError(f"aux_layer_ids is {list(self.aux_layer_ids)}, expected whole numbers")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise TypeError(f"dtype is {self.dtype!r}, expected bfloat16, float16 or float32")

    def misfit(self, entry: RowEntry, aux_states: Tensor, last_states: Tensor) -> str | None:
        """Compare a row's stored states with what this spec says of them: None, or what is wrong."""
        for name, states, rows, layers in (
            ("aux_states", aux_states, entry.num_tokens, len(self.aux_layer_ids)),
            ("last_states", last_states, entry.num_labels, 1),
        ):
            expected = (rows, layers * self.hidden_size)
            if tuple(states.shape) != expected or states.dtype != self.torch_dtype:
                return (
                    f"row {entry.row_id}: {name} of shape {list(states.shape)} in {states.dtype}, expected "
                    f"{list(expected)} in {self.torch_dtype}"
                )
        return None

    def row_bytes(self, entry: RowEntry) -> int:
        """What a row takes on disk: states, ids, masks, and its share of header and index."""
        states = entry.num_tokens * len(self.aux_layer_ids) + entry.num_labels
        tokens = entry.num_tokens * (4 + 1) + entry.num_labels * 4
        names = len(PARTS) * _HEADER_BYTES + _INDEX_BYTES + len(entry.row_id) + len(entry.source)
        return states * self.hidden_size * self.torch_dtype.itemsize + tokens + names

    def require_same(self, other: StoreSpec, where: Path) -> None:
        """Refuse to mix what the store was made for with `other`, wanted now: a StoreError names what differs."""
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
            is_same = same_weights(mine, wanted) if name == "verifier_fingerprint" else mine == wanted
            if not is_same and "" not in (mine, wanted):
                detail = f"{_shown(mine)}, now {_shown(wanted)}"
                if self.verifier != other.verifier:
                    detail += f" ({self.verifier}, now {other.verifier})"
                raise StoreError(
                    f"{where}: the store was made with other {label}: {detail}. Choose another --output, or remove it."
                )


@dataclass(frozen=True, kw_only=True)
class RowEntry:
    """A row in a shard's index."""

    row_id: str
    source: str
    num_tokens: int
    num_labels: int
    next_is_supervised: bool
    tail_length: int
    ids_sha256: str
    """Of the token ids."""
    mask_sha256: str
    """Of the loss mask and the two fields above. Both hashes say whether the row is still the one that was prepared."""
    states_xxh3: str = field(default="", compare=False)
    """Checksum of the states and their positions as stored (`states_checksum`); empty in earlier stores, whose shards
    are verified whole."""

    @staticmethod
    def read(fields: dict[str, Any]) -> RowEntry:
        """An entry as an index has it; a TypeError if a field is missing, unknown or of another type."""
        entry = RowEntry(**fields)
        for name, type_name in RowEntry.__annotations__.items():
            if type(getattr(entry, name)).__name__ != type_name:
                raise TypeError(f"{name} is no {type_name}")
        return entry

    @staticmethod
    def of(row: TokenRow) -> RowEntry:
        """The entry that `row` has, or would have."""
        flags = [*row.loss_mask, int(row.next_is_supervised), row.tail_length]
        return RowEntry(
            row_id=row.row_id,
            source=row.source,
            num_tokens=len(row.input_ids),
            num_labels=len(label_positions(row.loss_mask, row.next_is_supervised, row.tail_length)),
            next_is_supervised=row.next_is_supervised,
            tail_length=row.tail_length,
            ids_sha256=_sha256(row.input_ids),
            mask_sha256=_sha256(flags),
        )

    def row(self, ids: Tensor, mask: Tensor) -> TokenRow | None:
        """The row with these tokens and this mask; None if they are not those that were stored."""
        row = TokenRow(
            row_id=self.row_id,
            source=self.source,
            input_ids=ids.tolist(),
            loss_mask=mask.tolist(),
            next_is_supervised=self.next_is_supervised,
            tail_length=self.tail_length,
        )
        return row if RowEntry.of(row) == self else None


@dataclass(frozen=True)
class Shard:
    """What a shard's index says."""

    path: Path
    """The safetensors file."""
    num_bytes: int
    sha256: str
    rows: tuple[RowEntry, ...]

    def fault(self) -> str | None:
        """Compare the file with the index, checksum included: None, or what is wrong. Reads the whole file."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return "is missing"
        if not self.path.is_file():
            return "is no file"
        if size != self.num_bytes:
            return f"has {size} bytes, expected {self.num_bytes}"
        return None if sha256_file(self.path) == self.sha256 else "has another checksum than when it was written"

    def index_fault(self) -> str | None:
        """Compare each entry of the index with the tokens and masks in the file: None, or what is wrong.

        The checksum guards the file; only this guards the index.
        """
        try:
            with safe_open(self.path, "pt") as handle:
                if len(handle.keys()) != len(PARTS) * len(self.rows):
                    return f"holds {len(handle.keys()) // len(PARTS)} rows, its index {len(self.rows)}"
                for place, entry in enumerate(self.rows):
                    ids, mask = (handle.get_tensor(f"{name}.{place}") for name in PARTS[:2])
                    if entry.row(ids, mask) is None:
                        return f"holds other tokens for row {entry.row_id} than its index says"
        except (SafetensorError, OSError, ValueError) as error:
            return f"cannot be read ({error})"
        return None


def read_spec(folder: Path) -> tuple[StoreSpec, bool]:
    """The spec of a store and whether its extraction ran to its end; a StoreError if it is no store of this format."""
    path = folder / SPEC_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{folder}: no hidden-state store (no {SPEC_FILE}); make one with `peagle extract`") from None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: cannot be read ({type(error).__name__}); remove this store, or extract into another folder"
        ) from None
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise StoreError(f"{path}: not a store of format {FORMAT}; extract again into another folder")
    try:
        spec = StoreSpec(**{**stored["spec"], "aux_layer_ids": tuple(stored["spec"]["aux_layer_ids"])})
        spec.check_types()
        return spec, bool(stored["is_complete"])
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path}: damaged ({error}); extract again into another folder") from None


def write_spec(folder: Path, spec: StoreSpec, is_complete: bool) -> None:
    """Write `store.json`."""
    state = {"format": FORMAT, "last_states": "before the final norm", "is_complete": is_complete}
    write_json(folder / SPEC_FILE, {**state, "spec": asdict(spec)})


def read_index(path: Path) -> Shard:
    """Read a shard's index; a StoreError if it is not one."""
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(RowEntry.read(entry) for entry in index["rows"])
        return Shard(path.with_name(index["file"]), int(index["bytes"]), str(index["sha256"]), rows)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise StoreError(f"{path}: damaged index ({type(error).__name__}); run `peagle extract` again") from None


def index_paths(folder: Path) -> list[Path]:
    """The indexes in a store, ascending by number."""
    return sorted(folder.glob("shard-*.json"))


class StoreReader:
    """Rows of a store, by id. A row's checksum is verified when it is read first, once per process."""

    def __init__(self, folder: Path, spec: StoreSpec, is_complete: bool, shards: Sequence[Shard]) -> None:
        self.folder, self.spec, self.is_complete = folder, spec, is_complete
        self._places: dict[str, tuple[Shard, int]] = {}
        for shard in shards:
            for place, entry in enumerate(shard.rows):
                self._places[entry.row_id] = (shard, place)
        self._verified: set[Path | str] = set()
        self._open: dict[Path, Any] = {}
        self._lock = threading.Lock()

    @staticmethod
    def open(folder: Path) -> StoreReader:
        """Open a store; a StoreError if it holds no rows, or names a shard that is missing or of another size."""
        folder = Path(folder)
        spec, is_complete = read_spec(folder)
        shards = [read_index(path) for path in index_paths(folder)]
        for shard in shards:
            if not shard.path.exists() or shard.path.stat().st_size != shard.num_bytes:
                raise damaged(shard, shard.fault() or "changed while it was read")
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
        """What the index says of a row, without reading its shard; a StoreError if there is no such row."""
        try:
            shard, place = self._places[row_id]
        except KeyError:
            raise StoreError(f"{self.folder}: no row {row_id} in the store; run `peagle extract` again") from None
        return shard.rows[place]

    def read(self, row_id: str) -> StoredRow:
        """A row with its states, which are searched for NaN and infinity when they are read first.

        Raises:
            StoreError: no such row, a damaged shard (named), or NaN or infinity in the states (the row is named).
        """
        # 1. the row's tokens, against their own hashes
        entry = self.entry(row_id)
        shard, place = self._places[row_id]
        row = entry.row(*self._tensors(shard, place, PARTS[:2]))
        if row is None:
            raise damaged(shard, f"holds other tokens for row {row_id} than its index says")
        # 2. its states, which are as they were written
        if not entry.states_xxh3 and shard.path not in self._verified:
            if fault := shard.fault():
                raise damaged(shard, fault)
            self._verified.add(shard.path)
        states = self._tensors(shard, place, PARTS[2:])
        aux, label_pos, last = states
        is_new = row_id not in self._verified
        if is_new and entry.states_xxh3 and states_checksum(states) != entry.states_xxh3:
            raise damaged(shard, f"holds other states for row {row_id} than when it was written")
        # 3. which are what the spec says, and finite where training reads them: of the last token nothing is drafted
        if misfit := self.spec.misfit(entry, aux, last):
            raise StoreError(
                f"{shard.path}: {misfit} by {SPEC_FILE}; one of the two is of another store: extract again into "
                "another folder"
            )
        if is_new:
            for name, part in (("aux_states", aux[:-1]), ("last_states", last)):
                if not all_finite(part):
                    raise StoreError(
                        f"{shard.path}: row {row_id}: {name} hold NaN or infinity; it cannot be trained on"
                    )
            self._verified.add(row_id)
        return StoredRow(row, aux, label_pos.to(torch.int64), last)

    def _tensors(self, shard: Shard, place: int, names: Sequence[str]) -> list[Tensor]:
        try:
            with self._lock:
                handle = self._open.get(shard.path)
                if handle is None:
                    if len(self._open) >= _OPEN_SHARDS:
                        self._open.pop(next(iter(self._open)))
                    handle = self._open[shard.path] = safe_open(shard.path, "pt")
            return [handle.get_tensor(f"{name}.{place}") for name in names]
        except (SafetensorError, OSError) as error:
            raise damaged(shard, f"cannot be read ({error})") from None


def states_checksum(parts: Sequence[Tensor]) -> str:
    """XXH3 (128 bit) of a row's tensors as stored, in hexadecimal; seven times as fast as SHA-256."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(_bits(part).data)
    return digest.hexdigest()


def all_finite(states: Tensor) -> bool:
    """Whether no number is NaN or infinite, by its exponent's bits: on a CPU `torch.isfinite` reads 0.2 GB/s of
    bfloat16, this some thirty times as much."""
    bits = _bits(states).reshape(-1)
    # Without the sign, what is not finite has the largest exponent.
    least = {torch.bfloat16: 0xFF00, torch.float16: 0xF800, torch.float32: 0xFF000000}[states.dtype]
    piece = 1 << 17  # stays in a core's cache
    return all(int((bits[i : i + piece] << 1).max()) < least for i in range(0, bits.size, piece))


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's bytes as unsigned integers of its width."""
    signed = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
    return signed.numpy().view({2: np.uint16, 4: np.uint32}[tensor.dtype.itemsize])


def _sha256(values: list[int]) -> str:
    """SHA-256 of whole numbers as little-endian int64, in hexadecimal: the identity of a tokenized row."""
    return hashlib.sha256(np.asarray(values, dtype="<i8").tobytes()).hexdigest()


def damaged(shard: Shard, fault: str) -> StoreError:
    return StoreError(f"{shard.path} {fault}; run the same `peagle extract` again: it re-makes this shard's rows")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return value[:12] if isinstance(value, str) else str(value)
