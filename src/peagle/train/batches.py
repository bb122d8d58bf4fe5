"""From rows to what a step takes: what of a row is used, which rows go together, their states and layouts, read ahead.

Order, packing and sharing are pure functions of row ids, lengths, seed and epoch, so that N ranks, and a run that is
resumed, see what one uninterrupted process sees.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from peagle import layout
from peagle.errors import DataError, StoreError
from peagle.hidden_states.batch import Batch, StoredRow, pack
from peagle.layout import CodLayout
from peagle.layout.supervision import Extent, extent, label_positions
from peagle.train.blocks import PackPlan, plan_pack
from peagle.train.plan import TrainPlan

Item = TypeVar("Item")
Made = TypeVar("Made")

# Rows are packed among neighbours of the shuffled order: enough of them to fill packs well (97 % and more), few enough
# that packing a million rows takes seconds.
_PACKS_PER_WINDOW = 32


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


def trim(stored: StoredRow) -> StoredRow:
    """Cut what no supervised slot reads off the end: a closing user turn, a replay tail. Losses stay what they were.

    Raises:
        StoreError: the row's states do not fit its tokens.
    """
    row = stored.row
    num_tokens = extent(row.loss_mask, row.next_is_supervised).num_tokens
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
    supervised_pos = torch.tensor(label_positions(row.loss_mask, row.next_is_supervised, 0), dtype=torch.int64)
    has_states = stored.last_states.shape[0] == stored.label_pos.numel()
    if not has_states or not torch.isin(supervised_pos, stored.label_pos).all():
        raise StoreError(f"row {row.row_id}: its target states are not those its loss mask asks for; extract it again")


@dataclass(frozen=True)
class Pack:
    """Rows laid one after another in one sequence."""

    row_ids: tuple[str, ...]
    num_tokens: int
    """Of its rows together, after `trim`."""


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on every part: equal parts, equal seed, on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU generator seeded by `seed_of(parts)`."""
    return torch.Generator().manual_seed(seed_of(*parts))


def split(row_ids: list[str], train_ratio: float, conversation_of: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(training rows, validation rows): of the conversations by their hash, the first `train_ratio`, the rest.

    So the split depends on neither order nor seed, added rows move few others, and rows of one conversation stay
    together. With a ratio below 1 and at least two conversations neither side is empty. Both sides keep the order of
    `row_ids`. A row that `conversation_of` does not know is one of its own.
    """
    if train_ratio >= 1:
        return list(row_ids), []
    named = {row_id: conversation_of.get(row_id) or row_id for row_id in row_ids}
    conversations = sorted(set(named.values()), key=lambda name: (seed_of("split", name), name))
    num_train = max(1, min(round(train_ratio * len(conversations)), len(conversations) - 1))
    chosen = set(conversations[:num_train])
    train = [row_id for row_id in row_ids if named[row_id] in chosen]
    return train, [row_id for row_id in row_ids if named[row_id] not in chosen]


def first_by_hash(row_ids: list[str], limit: int | None) -> list[str]:
    """At most `limit` rows, those of the smallest hash, in the order of `row_ids`."""
    if limit is None or limit >= len(row_ids):
        return list(row_ids)
    kept = set(sorted(row_ids, key=lambda row_id: (seed_of("sample", row_id), row_id))[:limit])
    return [row_id for row_id in row_ids if row_id in kept]


def packs(lengths: dict[str, int], total_seq_len: int, seed: int, epoch: int | None) -> list[Pack]:
    """All rows of an epoch, each once, packed up to `total_seq_len` tokens.

    Rows are shuffled, then packed first-fit-decreasing among neighbours, then packs are shuffled.

    Args:
        lengths: tokens of each row, in a fixed order.
        total_seq_len: most tokens in a pack.
        seed, epoch: decide the order; epoch None keeps the order given (validation).

    Raises:
        DataError: a row is longer than a pack.
    """
    ids = list(lengths)
    for row_id in ids:
        if lengths[row_id] > total_seq_len:
            raise DataError(
                f"row {row_id} has {lengths[row_id]} tokens, --total-seq-len is {total_seq_len}; raise it, or prepare "
                f"again with --seq-length {total_seq_len}"
            )
    shuffle = None if epoch is None else generator("order", seed, epoch)
    if shuffle is not None:
        ids = [ids[i] for i in torch.randperm(len(ids), generator=shuffle).tolist()]
    found: list[Pack] = []
    for window in _windows(ids, lengths, _PACKS_PER_WINDOW * total_seq_len):
        bins: list[list[str]] = []
        space: list[int] = []
        for row_id in sorted(window, key=lambda row_id: -lengths[row_id]):
            for index, free in enumerate(space):
                if lengths[row_id] <= free:
                    bins[index].append(row_id)
                    space[index] -= lengths[row_id]
                    break
            else:
                bins.append([row_id])
                space.append(total_seq_len - lengths[row_id])
        found += [Pack(tuple(rows), total_seq_len - free) for rows, free in zip(bins, space)]
    if shuffle is not None:
        found = [found[i] for i in torch.randperm(len(found), generator=shuffle).tolist()]
    return found


def _windows(ids: list[str], lengths: dict[str, int], num_tokens: int) -> list[list[str]]:
    windows: list[list[str]] = []
    space = 0
    for row_id in ids:
        if not windows or lengths[row_id] > space:
            windows.append([])
            space = num_tokens
        windows[-1].append(row_id)
        space -= lengths[row_id]
    return windows


def share(group: list[Pack], num_ranks: int) -> list[list[int]]:
    """Deal the packs of one optimizer step to ranks, evenly by tokens: for each rank, indices into `group`, ascending.

    A rank may get none.
    """
    load = [0] * num_ranks
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(group)), key=lambda i: (-group[i].num_tokens, i)):
        rank = min(range(num_ranks), key=lambda r: (load[r], len(dealt[r]), r))
        load[rank] += group[index].num_tokens
        dealt[rank].append(index)
    return [sorted(indices) for indices in dealt]


@dataclass(frozen=True)
class TrainingPack:
    """One pack, ready for `train_step`."""

    batch: Batch
    layout: CodLayout
    plan: PackPlan

    @property
    def supervised_by_depth(self) -> list[int]:
        """Supervised slots of each depth, depth 0 first; read where the pack is."""
        return self.plan.total.tolist()

    @property
    def num_supervised(self) -> int:
        """Supervised slots, all depths."""
        return sum(self.supervised_by_depth)

    @property
    def num_pairs(self) -> int:
        """Pair slots without padding."""
        return self.plan.num_pairs


def lay_out(rows: Rows, of: Pack, plan: TrainPlan, epoch: int | None) -> TrainingPack:
    """Read a pack's states, draw its layout and plan its step; all on the CPU.

    Each row's is drawn from a generator seeded by (seed, epoch, row id), so that it depends neither on the rows it is
    packed with nor on the rank; epoch None takes all depths of all anchors (validation).
    """
    batch = pack([trim(rows.read(row_id)) for row_id in of.row_ids], None)
    if epoch is None:
        drawn = layout.full(batch.is_supervised, batch.document_ids, plan.num_depths)
    else:
        drawn = layout.sample(
            is_supervised=batch.is_supervised,
            document_ids=batch.document_ids,
            num_depths=plan.num_depths,
            down_sample_ratio=plan.down_sample_ratio,
            down_sample_ratio_min=plan.down_sample_ratio_min,
            generators=[generator("cod", plan.seed, epoch, row_id) for row_id in of.row_ids],
        )
    return TrainingPack(batch, drawn, plan_pack(batch, drawn, plan.step, plan.drafter))


@dataclass(frozen=True)
class Ready(Generic[Item, Made]):
    """What was made of an item, or why not."""

    item: Item
    made: Made | None
    error: Exception | None
    waited_s: float
    """How long the trainer stood still for it."""


def ahead(items: Iterable[Item], make: Callable[[Item], Made]) -> Iterator[Ready[Item, Made]]:
    """Yield `make(item)` of each item in order, the next one being made meanwhile. An error is yielded, not raised.

    So a rank whose data fails can still tell the others, instead of leaving them in a collective.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="peagle-data") as pool:
        pending: list[tuple[Item, Future[Made]]] = []
        left = iter(items)
        try:
            while True:
                while len(pending) < 2 and (item := next(left, None)) is not None:
                    pending.append((item, pool.submit(make, item)))
                if not pending:
                    return
                item, future = pending.pop(0)
                began_s = time.monotonic()
                error = future.exception()
                waited_s = time.monotonic() - began_s
                made = None if error is not None else future.result()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield Ready(item, made, error, waited_s)
        finally:
            for _, future in pending:
                future.cancel()
