"""From packs to what a step takes: states read, layouts drawn, one optimizer step ahead in another thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from peagle import layout
from peagle.layout import CodLayout
from peagle.states.batch import Batch, pack
from peagle.train.config import FitConfig
from peagle.train.order import Pack, generator
from peagle.train.rows import Rows, trim

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Laid:
    """One pack, ready for `train_step`; on the CPU."""

    batch: Batch
    layout: CodLayout

    @property
    def supervised_by_depth(self) -> list[int]:
        """Supervised slots of each depth, depth 0 first."""
        deeper = torch.bincount(self.layout.depth[self.layout.is_supervised], minlength=self.layout.num_depths)
        return [int(self.batch.is_supervised.sum()), *deeper[1:].tolist()]

    @property
    def num_supervised(self) -> int:
        """Supervised slots, all depths."""
        return sum(self.supervised_by_depth)

    @property
    def num_pairs(self) -> int:
        """Pair slots without padding."""
        return int((self.batch.document_ids >= 0).sum())


def lay_out(rows: Rows, of: Pack, config: FitConfig, epoch: int | None) -> Laid:
    """Read a pack's states and draw its layout.

    Args:
        rows: where the states are.
        of: the rows, in order.
        config: depths and retention.
        epoch: each row's layout is drawn from a generator seeded by (seed, epoch, row id), so that it depends neither
            on the rows it is packed with nor on the rank; None takes all depths of all anchors (validation).
    """
    batch = pack([trim(rows.read(row_id)) for row_id in of.row_ids], None)
    if epoch is None:
        return Laid(batch, layout.full(batch.is_supervised, batch.document_ids, config.num_depths))
    drawn = layout.sample(
        batch.is_supervised,
        batch.document_ids,
        config.num_depths,
        config.down_sample_ratio,
        config.down_sample_ratio_min,
        [generator("cod", config.seed, epoch, row_id) for row_id in of.row_ids],
    )
    return Laid(batch, drawn)


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
