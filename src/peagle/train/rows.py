"""Where rows and their states come from, and what of a row training needs.

`Rows` is all that the loop knows of a store, a list in memory, or a served verifier that makes states as they are asked
for: extents for planning, stored rows for training, and a word about what will be asked for next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from peagle.data.rows import TokenRow
from peagle.errors import StoreError
from peagle.states.batch import StoredRow
from peagle.states.store import StoreReader


@dataclass(frozen=True)
class Extent:
    """What of a row training can use."""

    num_tokens: int
    """Tokens up to the last one that a supervised slot reads: x_0 .. x_p, y_p being the row's last target."""
    num_supervised: int
    """Supervised pair slots."""


class Rows(Protocol):
    """Rows with states, by id."""

    def extents(self) -> dict[str, Extent]:
        """How much of each row training uses, in a fixed order. No states are read."""
        ...

    def read(self, row_id: str) -> StoredRow:
        """The row with its states, finite. Called from another thread than the rest, and from two threads at once."""
        ...

    def expect(self, row_ids: Sequence[str]) -> None:
        """The rows that this rank will read next, in order: a source that makes states may begin with them."""
        ...


class MemoryRows:
    """Rows held in memory."""

    def __init__(self, rows: list[StoredRow]) -> None:
        self._rows = {stored.row.row_id: stored for stored in rows}
        if len(self._rows) != len(rows):
            raise ValueError("row ids must differ")
        for stored in rows:
            for name, states in (("aux_states", stored.aux_states), ("last_states", stored.last_states)):
                if not torch.isfinite(states).all():
                    raise StoreError(f"row {stored.row.row_id}: {name} hold NaN or infinity; it cannot be trained on")

    def extents(self) -> dict[str, Extent]:
        return {row_id: extent(stored.row) for row_id, stored in self._rows.items()}

    def read(self, row_id: str) -> StoredRow:
        return self._rows[row_id]

    def expect(self, row_ids: Sequence[str]) -> None:
        pass


class StoreRows:
    """Some rows of a hidden-state store, whose extents are known.

    Args:
        reader: the store.
        extents: of the rows to use.
    """

    def __init__(self, reader: StoreReader, extents: dict[str, Extent]) -> None:
        self._reader, self._extents = reader, extents

    def extents(self) -> dict[str, Extent]:
        return self._extents

    def read(self, row_id: str) -> StoredRow:
        return self._reader.read(row_id)

    def expect(self, row_ids: Sequence[str]) -> None:
        pass


class Remembered:
    """Rows that are read once and kept: what starts a drafter reads the same few rows several times.

    Args:
        rows: where they come from.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows, self._kept = rows, dict[str, StoredRow]()

    def extents(self) -> dict[str, Extent]:
        return self._rows.extents()

    def read(self, row_id: str) -> StoredRow:
        if row_id not in self._kept:
            self._kept[row_id] = self._rows.read(row_id)
        return self._kept[row_id]

    def expect(self, row_ids: Sequence[str]) -> None:
        self._rows.expect(row_ids)


def label_pos(row: TokenRow) -> Tensor:
    """Positions p >= 1 whose y_p is a target of training, ascending, int64: x_p and x_{p+1} belong to one reply.

    `TokenRow.label_positions` without the replay tail, computed at once.
    """
    mask = torch.tensor([*row.loss_mask, int(row.next_is_supervised)], dtype=torch.bool)
    found = (mask[:-1] & mask[1:]).nonzero()[:, 0]
    return found[found > 0]


def extent(row: TokenRow) -> Extent:
    """How much of a row a step needs; (0, 0) if nothing in it is supervised."""
    found = label_pos(row)
    return Extent(int(found[-1]) + 1, found.numel()) if found.numel() else Extent(0, 0)


def trim(stored: StoredRow) -> StoredRow:
    """Cut what no supervised slot reads off the end: a closing user turn, a replay tail. Losses stay what they were.

    Raises:
        StoreError: the row's states do not fit its tokens.
    """
    row = stored.row
    num_tokens = extent(row).num_tokens
    _check(stored)
    if num_tokens in (0, len(row.input_ids)):
        return stored
    kept = stored.label_pos < num_tokens
    cut = replace(
        row,
        input_ids=row.input_ids[:num_tokens],
        loss_mask=row.loss_mask[:num_tokens],
        next_is_supervised=True,
        tail_length=0,
    )
    return StoredRow(cut, stored.aux_states[:num_tokens], stored.label_pos[kept], stored.last_states[kept])


def _check(stored: StoredRow) -> None:
    row = stored.row
    if stored.aux_states.shape[0] < len(row.input_ids) - 1:
        raise StoreError(
            f"row {row.row_id}: {stored.aux_states.shape[0]} states for {len(row.input_ids)} tokens; extract it again"
        )
    if (
        stored.last_states.shape[0] != stored.label_pos.numel()
        or not torch.isin(label_pos(row), stored.label_pos).all()
    ):
        raise StoreError(f"row {row.row_id}: its target states are not those its loss mask asks for; extract it again")
