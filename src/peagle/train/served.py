"""Rows whose states a verifier makes while training goes on: several requests under way, nothing waited for that can be
had in time, nothing kept that has been used.

    ServedRows    what the loop reads: asks ahead, within a window of tokens, for the rows that were announced
    Asker         one verifier behind both sets of rows: threads, checks, refusals
    Kept          hybrid: the store that the first epoch fills and later ones read
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.data.rows import TokenRow
from peagle.errors import StoreError
from peagle.states.batch import StoredRow
from peagle.states.checks import choice_fault, fault, to_stored
from peagle.states.shards import index_paths, read_index
from peagle.states.store import StoreReader, StoreSpec, StoreWriter
from peagle.train.rows import Extent
from peagle.verifier.source import RowRefused, RowStates
from peagle.verifier.weights import VerifierHead

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 * 10**6
_NAMED = 5  # refused rows named in the log; all are counted


class Kept:
    """The store of a hybrid run: what has been made before is read, what is made now is added.

    Args:
        folder: the store's, made if it is not there.
        spec: what it must be made for.
        fills: whether new rows are added (hybrid), or only those there are read (offline with `generate`).
    """

    def __init__(self, folder: Path, spec: StoreSpec, fills: bool) -> None:
        self._folder, self._spec = folder, spec
        self._lock = threading.RLock()
        self._writer = StoreWriter.open(folder, spec, SHARD_BYTES) if fills else None
        self._reader = self._open()

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._reader or (self._writer is not None and row_id in self._writer.entries)

    def read(self, row_id: str) -> StoredRow:
        """A row that is there."""
        with self._lock:
            if row_id not in self._reader and self._writer is not None:
                self._writer.flush()
                self._writer.flush()  # waits for the first
                self._reader = self._open()
        return self._reader.read(row_id)

    def add(self, stored: StoredRow) -> None:
        """Keep a row, once."""
        with self._lock:
            if self._writer is not None and stored.row.row_id not in self._writer.entries:
                self._writer.add(stored)

    def close(self, wanted: Iterable[str]) -> None:
        """Write what is pending; the store counts as complete if it holds all of `wanted`."""
        if self._writer is not None:
            with self._writer:
                if all(row_id in self._writer.entries for row_id in wanted):
                    self._writer.finish()

    def _open(self) -> StoreReader:
        # A store that is being filled holds no rows at first, and is not complete: neither is worth a word here.
        return StoreReader(self._folder, self._spec, True, [read_index(path) for path in index_paths(self._folder)])


class Asker:
    """Asks one verifier for rows, from several threads.

    Args:
        fetch: states of one row, or its refusal; called from several threads at once. Raises if the verifier is gone.
        row_of: a row's tokens.
        spec: what states must be like.
        head: the verifier's, to prove the first row's states; None to trust them.
        num_threads: requests under way at once.
        skips: whether a refused row is passed over; else it stops the run.
        kept: where states are kept; None keeps none.
    """

    def __init__(
        self,
        fetch: Callable[[TokenRow], RowStates | RowRefused],
        row_of: Callable[[str], TokenRow],
        spec: StoreSpec,
        head: VerifierHead | None,
        num_threads: int,
        skips: bool,
        kept: Kept | None,
    ) -> None:
        self._fetch, self._row_of, self._spec, self._head = fetch, row_of, spec, head
        self._skips, self.kept = skips, kept
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="peagle-states")
        self._lock = threading.Lock()
        self.num_asked = 0
        self.refused: dict[str, str] = {}
        """Row id -> why."""

    def later(self, row_id: str) -> Future[StoredRow]:
        """Begin to make a row's states."""
        return self._pool.submit(self.now, row_id)

    def now(self, row_id: str) -> StoredRow:
        """A row's states: kept ones, or made now.

        Raises:
            PeagleError: the verifier is gone, refused the row, or gave states that are not this row's.
        """
        if self.kept is not None and row_id in self.kept:
            return self.kept.read(row_id)
        row = self._row_of(row_id)
        with self._lock:
            is_first = self.num_asked == 0
            self.num_asked += 1
        found = self._fetch(row)
        if isinstance(found, RowRefused):
            return self._passed_over(row, f"{found.reason} ({found.detail})" if found.detail else found.reason)
        wrong = fault(found, row, self._spec)
        if wrong is not None:
            return self._passed_over(row, wrong)
        if is_first and self._head is not None:
            other = choice_fault(found, self._head, self._spec.torch_dtype)
            if other is not None:
                raise StoreError(f"row {row.row_id}: {other}")
        stored = to_stored(found, row, self._spec.torch_dtype)
        if self.kept is not None:
            self.kept.add(stored)
        return stored

    def close(self) -> None:
        """Drop what has not begun, wait for what has; call it after the verifier's own `close`."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _passed_over(self, row: TokenRow, why: str) -> StoredRow:
        """Stop, or go on with a stand-in that has nothing supervised and so adds nothing to any loss."""
        if not self._skips:
            raise StoreError(f"row {row.row_id}: {why}; --on-missing skip passes over such rows")
        with self._lock:
            self.refused[row.row_id] = why
            if len(self.refused) <= _NAMED:
                logger.warning("row %s passed over: %s", row.row_id, why)
        spec = self._spec
        empty = TokenRow(row.row_id, row.source, row.input_ids[:2], [0] * len(row.input_ids[:2]), False, 0)
        width, dtype = len(spec.aux_layer_ids) * spec.hidden_size, spec.torch_dtype
        return StoredRow(
            empty,
            torch.zeros(len(empty.input_ids), width, dtype=dtype),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0, spec.hidden_size, dtype=dtype),
        )


@dataclass
class _Asked:
    row_id: str
    num_tokens: int
    future: Future[StoredRow]


class ServedRows:
    """`Rows` from an `Asker`: announced rows are asked for in their order, at most `window_tokens` of them unread.

    Args:
        asker: shared by training and validation rows.
        extents: of the rows.
        window_tokens: tokens of rows that are under way or made and not read yet; one row always is allowed.
    """

    def __init__(self, asker: Asker, extents: dict[str, Extent], window_tokens: int) -> None:
        self._asker, self._extents, self._window_tokens = asker, extents, window_tokens
        self._lock = threading.Lock()
        self._announced: deque[str] = deque()
        self._asked: dict[str, deque[_Asked]] = defaultdict(deque)
        self._num_tokens = 0

    def extents(self) -> dict[str, Extent]:
        """See `Rows`."""
        return self._extents

    def expect(self, row_ids: Sequence[str]) -> None:
        """See `Rows`: they are asked for as the window allows."""
        with self._lock:
            self._announced.extend(row_ids)
            self._top_up()

    def read(self, row_id: str) -> StoredRow:
        """See `Rows`. A row that was not announced, or not asked for yet, is asked for now."""
        with self._lock:
            waiting = self._asked[row_id]
            one = waiting.popleft() if waiting else None
            if one is None and row_id in self._announced:
                self._announced.remove(row_id)
        if one is None:
            return self._asker.now(row_id)
        try:
            return one.future.result()
        finally:
            with self._lock:
                self._num_tokens -= one.num_tokens
                self._top_up()

    def _top_up(self) -> None:
        while self._announced:
            num_tokens = self._extents[self._announced[0]].num_tokens
            if self._num_tokens and self._num_tokens + num_tokens > self._window_tokens:
                return
            row_id = self._announced.popleft()
            self._num_tokens += num_tokens
            self._asked[row_id].append(_Asked(row_id, num_tokens, self._asker.later(row_id)))
