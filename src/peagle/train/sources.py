"""Where rows and their states come from, and what of a row training needs.

`Rows` is all that the loop knows of a store, a list in memory, or a served verifier that makes states as they are asked
for: extents for planning, stored rows for training, and a word about what will be asked for next.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from peagle.data.prepared import Prepared, load_prepared
from peagle.data.records import TokenRow
from peagle.errors import ConfigError, StoreError, VerifierError
from peagle.hidden_states.batch import StoredRow
from peagle.hidden_states.config import ExtractConfig
from peagle.hidden_states.extract import choice_fault, fault, open_source, to_stored
from peagle.hidden_states.shards import index_paths, read_index
from peagle.hidden_states.store import StoreReader, StoreSpec, StoreWriter, read_spec
from peagle.train.config import TrainConfig
from peagle.train.parallel import World
from peagle.verifier.model_config import VerifierConfig, load_verifier_config, resolve_aux_layer_ids
from peagle.verifier.source import RowRefused, RowStates, StateSource
from peagle.verifier.weights import VerifierHead, fingerprint, load_head


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


# ---- Which rows a run reads: those of a store, or those that a verifier makes as they are asked for.


# Rows asked for ahead of the trainer, in packs: enough for a server to batch well, few enough to be held in memory.
_PACKS_AHEAD = 4


@dataclass(frozen=True)
class OpenRows:
    """A run's two sets of rows, and how to let go of what is behind them."""

    train: Rows
    held_out: Rows
    close: Callable[[], None]
    refused: dict[str, str]
    """Rows that the verifier refused, with the reason; grows during the run."""


@dataclass(frozen=True)
class Planned:
    """What states will be, and those that are there already."""

    spec: StoreSpec
    reader: StoreReader | None
    """The store, if it is read and holds rows."""


def hidden_states_path(config: TrainConfig) -> Path:
    """Where the store is, or (online) where the server puts what it hands over."""
    return config.hidden_states_path or config.data_path / "hidden_states"


def plan_states(
    config: TrainConfig, verifier_config: VerifierConfig, prepared: Prepared, aux_layer_ids: tuple[int, ...] | None
) -> Planned:
    """Find out which states a run will have, before any weights are loaded.

    Args:
        config: the run's settings.
        verifier_config: the verifier.
        prepared: the rows.
        aux_layer_ids: layers that a checkpoint to start from reads, or None.

    Raises:
        StoreError: the store is missing where it is needed, or damaged.
        ConfigError: layer ids that the verifier does not have; several ranks that would fill one store.
    """
    folder = hidden_states_path(config)
    if config.hidden_states == "offline":
        reader = StoreReader.open(folder)
        return Planned(reader.spec, reader)
    if config.hidden_states == "hybrid" and (folder / "store.json").exists():
        spec = read_spec(folder)[0]
        if config.hidden_states_dtype not in ("auto", spec.dtype):
            raise StoreError(
                f"{folder}: the store holds {spec.dtype}, --hidden-states-dtype asks for {config.hidden_states_dtype}; "
                "leave the flag away, or choose another --hidden-states-path"
            )
        return Planned(spec, StoreReader.open(folder) if index_paths(folder) else None)
    asked = aux_layer_ids if config.target_layer_ids is None else config.target_layer_ids
    try:
        weights = fingerprint(verifier_config)
    except VerifierError:
        if not config.endpoint:
            raise
        weights = ""  # only the server has them
    spec = StoreSpec(
        verifier=verifier_config.name_or_path,
        verifier_fingerprint=weights,
        model_type=verifier_config.model_type,
        num_layers=verifier_config.num_layers,
        hidden_size=verifier_config.hidden_size,
        vocab_size=verifier_config.vocab_size,
        aux_layer_ids=resolve_aux_layer_ids(verifier_config.num_layers, asked),
        dtype=verifier_config.dtype if config.hidden_states_dtype == "auto" else config.hidden_states_dtype,
        tokenizer_sha256=str(prepared.summary["tokenizer_sha256"]),
    )
    return Planned(spec, None)


def open_rows(
    config: TrainConfig, spec: StoreSpec, train: dict[str, Extent], held_out: dict[str, Extent], world: World
) -> OpenRows:
    """Open what the run's `--hidden-states` asks for.

    Args:
        config: the run's settings.
        spec: what states are, as decided.
        train, held_out: extents of the rows.
        world: the ranks; each opens its own.

    Raises:
        PeagleError: a store or a verifier that cannot be used.
    """
    store = hidden_states_path(config)
    if not config.asks_verifier:
        reader = StoreReader.open(store)
        return OpenRows(StoreRows(reader, train), StoreRows(reader, held_out), lambda: None, {})
    if config.hidden_states == "hybrid" and world.size > 1:
        raise ConfigError(
            f"--hidden-states hybrid: {world.size} ranks cannot fill one store; run `peagle extract` first and train "
            "offline, or train online"
        )
    prepared = load_prepared(config.data_path)
    index = prepared.index_of()

    def row_of(row_id: str) -> TokenRow:
        return prepared.row(index[row_id])

    verifier_config = load_verifier_config(config.verifier_name_or_path, config.trust_remote_code)
    verifier_config = verifier_config.with_tensor_names(config.verifier_tensors)
    head = _head(verifier_config, config)
    source = open_source(
        _extract_config(config, spec), spec, verifier_config, head, row_of(next(iter(train))), world.rank
    )
    kept = None
    try:
        if config.hidden_states != "online":
            kept = Kept(store, spec, fills=config.hidden_states == "hybrid")
    except BaseException:
        source.close()
        raise
    skips = config.on_missing == "skip"
    asker = Asker(_fetcher(source), row_of, spec, head, config.concurrency, skips, kept)
    window = _PACKS_AHEAD * config.total_seq_len

    def close() -> None:
        source.close()
        asker.close()
        if kept is not None:
            kept.close(index)

    return OpenRows(ServedRows(asker, train, window), ServedRows(asker, held_out, window), close, asker.refused)


def _fetcher(source: StateSource) -> Callable[[TokenRow], RowStates | RowRefused]:
    """One row at a time from any thread: servers take several at once, a model in this process one after another."""
    from peagle.vllm.states import EndpointSource

    if isinstance(source, EndpointSource):
        return source.fetch
    lock = threading.Lock()

    def fetch(row: TokenRow) -> RowStates | RowRefused:
        if len(row.input_ids) > source.max_tokens:
            return RowRefused(row.row_id, f"longer than the verifier takes ({source.max_tokens} tokens)", "")
        with lock:
            return next(iter(list(source.states([row], {row.row_id}))))

    return fetch


def _head(verifier_config: VerifierConfig, config: TrainConfig) -> VerifierHead | None:
    try:
        return load_head(verifier_config).to(torch.device("cpu"), torch.float32)
    except VerifierError:
        if not config.endpoint:
            raise
        return None


def _extract_config(config: TrainConfig, spec: StoreSpec) -> ExtractConfig:
    """The same request as `peagle extract` would make."""
    return ExtractConfig.build(
        {
            "preprocessed_data": config.data_path,
            "output": hidden_states_path(config),
            "dtype": spec.dtype,
            "batch_size": 1,
            "device": config.device,
            "trust_remote_code": config.trust_remote_code,
            "verifier_tensors": config.verifier_tensors,
            "endpoint": config.endpoint,
            "concurrency": config.concurrency,
            "request_timeout_s": config.request_timeout_s,
            "max_retries": config.max_retries,
            "restart_wait_s": config.restart_wait_s,
            "api_key": config.api_key,
            "served_model_name": config.served_model_name,
        }
    )


# ---- Rows whose states a verifier makes while training goes on: several requests under way, nothing waited for
# that can be had in time, nothing kept that has been used.


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
