"""One shard of the store: a safetensors file of whole rows, and beside it the index of those rows with checksums.

A shard counts once its index exists, and the index is written after the tensors: a run killed in between leaves a file
that the next run sweeps away.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.data.records import TokenRow
from peagle.errors import StoreError
from peagle.files import sha256_file, sha256_ids, whole_file, write_json
from peagle.hidden_states.batch import StoredRow

PARTS = ("input_ids", "loss_mask", "aux_states", "label_pos", "last_states")
_HEADER_BYTES = 95  # of the safetensors header, per tensor
_INDEX_BYTES = 370  # of the index, per row


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

    @staticmethod
    def read(found: dict[str, Any]) -> RowEntry:
        """An entry as an index has it.

        Raises:
            TypeError: a field is missing, unknown or of another type: the index was damaged.
        """
        entry = RowEntry(**found)
        for name, kind in RowEntry.__annotations__.items():
            if type(getattr(entry, name)).__name__ != kind:
                raise TypeError(f"{name} is no {kind}")
        return entry

    @staticmethod
    def of(row: TokenRow) -> RowEntry:
        """The entry that `row` has, or would have."""
        flags = [*row.loss_mask, int(row.next_is_supervised), row.tail_length]
        return RowEntry(
            row_id=row.row_id,
            source=row.source,
            num_tokens=len(row.input_ids),
            num_labels=len(row.label_positions()),
            next_is_supervised=row.next_is_supervised,
            tail_length=row.tail_length,
            ids_sha256=sha256_ids(row.input_ids),
            mask_sha256=sha256_ids(flags),
        )

    def stored_bytes(self, num_aux: int, hidden_size: int, itemsize: int) -> int:
        """What the row takes on disk: states, ids, masks, and its share of header and index."""
        states = (self.num_tokens * num_aux + self.num_labels) * hidden_size * itemsize
        tokens = self.num_tokens * (4 + 1) + self.num_labels * 4
        return states + tokens + len(PARTS) * _HEADER_BYTES + _INDEX_BYTES + len(self.row_id) + len(self.source)


@dataclass(frozen=True)
class Shard:
    """What a shard's index says."""

    path: Path
    """The safetensors file."""
    num_bytes: int
    sha256: str
    rows: tuple[RowEntry, ...]

    @property
    def index_path(self) -> Path:
        """The JSON file beside it."""
        return self.path.with_suffix(".json")

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

        The checksum guards the file; an index that was changed is found only so.
        """
        try:
            with safe_open(self.path, "pt") as handle:
                if len(handle.keys()) != len(PARTS) * len(self.rows):
                    return f"holds {len(handle.keys()) // len(PARTS)} rows, its index {len(self.rows)}"
                for place, entry in enumerate(self.rows):
                    ids, mask = (handle.get_tensor(f"{name}.{place}").tolist() for name in PARTS[:2])
                    row = TokenRow(
                        row_id=entry.row_id,
                        source=entry.source,
                        input_ids=ids,
                        loss_mask=mask,
                        next_is_supervised=entry.next_is_supervised,
                        tail_length=entry.tail_length,
                    )
                    if RowEntry.of(row) != entry:
                        return f"holds other tokens for row {entry.row_id} than its index says"
        except (SafetensorError, OSError, ValueError) as error:
            return f"cannot be read ({error})"
        return None


def write_shard(folder: Path, number: int, rows: list[StoredRow]) -> Shard:
    """Write rows as shard `number`: tensors first, then the index that makes them count.

    Raises:
        DiskError: no space; nothing of this shard is left.
    """
    tensors: dict[str, Tensor] = {}
    for place, stored in enumerate(rows):
        parts = (
            torch.tensor(stored.row.input_ids, dtype=torch.int32),
            torch.tensor(stored.row.loss_mask, dtype=torch.uint8),
            stored.aux_states.contiguous(),
            stored.label_pos.to(torch.int32),
            stored.last_states.contiguous(),
        )
        tensors |= {f"{name}.{place}": tensor for name, tensor in zip(PARTS, parts)}
    path = folder / f"shard-{number:05d}.safetensors"
    with whole_file(path) as temporary:
        save_file(tensors, temporary)
        num_bytes, digest = temporary.stat().st_size, sha256_file(temporary)
    shard = Shard(path, num_bytes, digest, tuple(RowEntry.of(stored.row) for stored in rows))
    index = {"file": path.name, "bytes": num_bytes, "sha256": digest, "rows": [asdict(entry) for entry in shard.rows]}
    write_json(shard.index_path, index)
    return shard


def read_index(path: Path) -> Shard:
    """Read a shard's index.

    Raises:
        StoreError: it is not one.
    """
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(RowEntry.read(entry) for entry in index["rows"])
        return Shard(path.with_name(index["file"]), int(index["bytes"]), str(index["sha256"]), rows)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise StoreError(f"{path}: damaged index ({type(error).__name__}); run `peagle extract` again") from None


def index_paths(folder: Path) -> list[Path]:
    """The indexes in a store, ascending by number."""
    return sorted(folder.glob("shard-*.json"))
