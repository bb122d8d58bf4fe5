"""Where the loop's rows come from: memory, a store, or a verifier that makes their states while training goes on.

A verifier has several rows under way at once: nothing waits that could have been requested before, and nothing is held
that has been used. `plan_states` says what states will be like before any weights are loaded, `open_rows` opens them.
"""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from peagle.config import ServerSettings
from peagle.data.prepared import Prepared, load_prepared
from peagle.data.records import TokenRow
from peagle.errors import ConfigError, StoreError
from peagle.hidden_states.batch import StoredRow
from peagle.hidden_states.config import ExtractConfig
from peagle.hidden_states.extract import open_proof, open_source, proving_head, to_stored
from peagle.hidden_states.proof import StateProof
from peagle.hidden_states.store import StoreReader, StoreSpec, index_paths, read_index, read_spec
from peagle.hidden_states.writer import StoreWriter
from peagle.layout.supervision import Extent, extent
from peagle.train.batches import Rows
from peagle.train.config import TrainConfig
from peagle.train.parallel import World
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.source import RowRefused, RowStates, StateSource

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 * 10**6
# Rows requested ahead of the trainer, in packs: enough for a server to batch well, few enough to be held in memory.
_PACKS_AHEAD = 4
_NUM_LOGGED = 5  # refused rows named in the log; all are counted


class MemoryRows:
    """Rows held in memory."""

    def __init__(self, rows: list[StoredRow]) -> None:
        self._rows = {stored.row.row_id: stored for stored in rows}
        if len(self._rows) != len(rows):
            raise ValueError("row ids must differ")
        for stored in rows:
            for name, states in (("aux_states", stored.aux_states[:-1]), ("last_states", stored.last_states)):
                if not torch.isfinite(states).all():
                    raise StoreError(f"row {stored.row.row_id}: {name} hold NaN or infinity; it cannot be trained on")

    def extents(self) -> dict[str, Extent]:
        return {
            row_id: extent(stored.row.loss_mask, stored.row.next_is_supervised) for row_id, stored in self._rows.items()
        }

    def read(self, row_id: str) -> StoredRow:
        return self._rows[row_id]

    def expect(self, row_ids: Sequence[str]) -> None:
        pass


class StoreRows:
    """Some rows of a hidden-state store, whose extents are known."""

    def __init__(self, reader: StoreReader, extents: dict[str, Extent]) -> None:
        self._extents = extents
        self.read = reader.read

    def extents(self) -> dict[str, Extent]:
        return self._extents

    def expect(self, row_ids: Sequence[str]) -> None:
        pass


@dataclass(frozen=True)
class OpenRows:
    """A run's two sets of rows, and how to let go of what is behind them."""

    train: Rows
    held_out: Rows
    close: Callable[[], None]
    refused: dict[str, str]
    """Rows that the verifier refused, with the reason; grows during the run."""


def plan_states(
    config: TrainConfig, verifier: VerifierConfig, prepared: Prepared, aux_layer_ids: tuple[int, ...] | None
) -> tuple[StoreSpec, StoreReader | None]:
    """Find out which states a run will have, before any weights are loaded.

    `aux_layer_ids` are the layers that a checkpoint to start from reads, or None.

    Returns:
        What the states are like, and the store if one is read and holds rows.

    Raises:
        StoreError: the store is missing where it is needed, or damaged.
        ConfigError: layer ids that the verifier does not have.
    """
    folder = config.states_path
    if config.hidden_states == "offline":
        reader = StoreReader.open(folder)
        return reader.spec, reader
    if config.hidden_states == "hybrid" and (folder / "store.json").exists():
        spec = read_spec(folder)[0]
        if config.hidden_states_dtype not in ("auto", spec.dtype):
            raise StoreError(
                f"{folder}: the store holds {spec.dtype}, --hidden-states-dtype asks for {config.hidden_states_dtype}; "
                "omit the flag, or choose another --hidden-states-path"
            )
        return spec, StoreReader.open(folder) if index_paths(folder) else None
    spec = StoreSpec.of(
        verifier,
        aux_layer_ids=aux_layer_ids if config.target_layer_ids is None else config.target_layer_ids,
        dtype=config.hidden_states_dtype,
        tokenizer_sha256=str(prepared.summary["tokenizer_sha256"]),
        is_served=bool(config.endpoint),
    )
    return spec, None


def open_rows(
    config: TrainConfig, spec: StoreSpec, train: dict[str, Extent], held_out: dict[str, Extent], world: World
) -> OpenRows:
    """Open what the run's `--hidden-states` asks for; each rank opens its own.

    Raises:
        PeagleError: a store or a verifier that cannot be used; several ranks that would fill one store.
    """
    # 1. A store alone.
    folder = config.states_path
    if not config.asks_verifier:
        reader = StoreReader.open(folder)
        return OpenRows(StoreRows(reader, train), StoreRows(reader, held_out), lambda: None, {})
    if config.hidden_states == "hybrid" and world.size > 1:
        raise ConfigError(
            f"--hidden-states hybrid: {world.size} ranks cannot fill one store; run `peagle extract` first and train "
            "offline, or train online"
        )
    # 2. The rows' tokens, and the verifier that makes their states as `peagle extract` would.
    prepared = load_prepared(config.data_path)
    index = prepared.index_of()

    def row_of(row_id: str) -> TokenRow:
        return prepared.row(index[row_id])

    verifier = load_verifier_config(config.verifier_name_or_path, config.trust_remote_code, config.verifier_tensors)
    head = proving_head(verifier, bool(config.endpoint))
    shared = (*ServerSettings.model_fields, "device", "trust_remote_code", "verifier_tensors")
    request = ExtractConfig.build(
        {
            **{name: getattr(config, name) for name in shared},
            "preprocessed_data": config.data_path,
            "output": folder,
            "dtype": spec.dtype,
            "batch_size": 1,
        }
    )
    source = open_source(
        config=request, spec=spec, verifier=verifier, head=head, sample=row_of(next(iter(train))), rank=world.rank
    )
    # 3. The store that is read first, and in a hybrid run filled.
    try:
        proof = open_proof(request, spec, verifier, head, source)
        fills = config.hidden_states == "hybrid"
        store = None if config.hidden_states == "online" else RunStore(folder, spec, fills=fills)
    except BaseException:
        source.close()
        raise
    maker = StateMaker(
        fetch=_fetcher(source),
        row_of=row_of,
        spec=spec,
        proof=proof,
        num_threads=config.concurrency,
        skips=config.on_missing == "skip",
        store=store,
    )
    window = _PACKS_AHEAD * config.total_seq_len

    def close() -> None:
        logger.info("%s", proof.summary())
        source.close()
        maker.close()
        if store is not None:
            store.close(index)

    return OpenRows(ServedRows(maker, train, window), ServedRows(maker, held_out, window), close, maker.refused)


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


class RunStore:
    """The store beside a verifier: rows that it holds are read, and if it `fills` (hybrid) new ones are added."""

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
        """Store a row, once."""
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
        # A store that is being filled holds no rows at first, and is not complete: neither is worth a warning here.
        return StoreReader(self._folder, self._spec, True, [read_index(path) for path in index_paths(self._folder)])


class StateMaker:
    """Has one verifier make rows' states, from several threads.

    Args:
        fetch: states of one row, or its refusal; called from several threads at once. Raises if the verifier is gone.
        row_of: a row's tokens.
        spec: what states must be like.
        proof: judges every row that is made.
        num_threads: requests under way at once.
        skips: whether a refused row is passed over; else it stops the run.
        store: read first, and given what is made; None stores nothing.
    """

    def __init__(
        self,
        *,
        fetch: Callable[[TokenRow], RowStates | RowRefused],
        row_of: Callable[[str], TokenRow],
        spec: StoreSpec,
        proof: StateProof,
        num_threads: int,
        skips: bool,
        store: RunStore | None,
    ) -> None:
        self._fetch, self._row_of, self._spec, self._proof = fetch, row_of, spec, proof
        self._skips, self._store = skips, store
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="peagle-states")
        self._lock = threading.Lock()
        self.refused: dict[str, str] = {}
        """Row id -> why."""

    def submit(self, row_id: str) -> Future[StoredRow]:
        """Begin to make a row's states."""
        return self._pool.submit(self.make, row_id)

    def make(self, row_id: str) -> StoredRow:
        """A row's states: from the store, or made now.

        Raises:
            PeagleError: the verifier is gone, refused the row, or gave states that are not this row's.
        """
        if self._store is not None and row_id in self._store:
            return self._store.read(row_id)
        row, dtype = self._row_of(row_id), self._spec.torch_dtype
        states = self._fetch(row)
        if isinstance(states, RowRefused):
            return self._pass_over(row, f"{states.reason} ({states.detail})" if states.detail else states.reason)
        if (wrong := self._proof.fault(states, row)) is not None:
            return self._pass_over(row, wrong)
        stored = to_stored(states, row, dtype)
        if self._store is not None:
            self._store.add(stored)
        return stored

    def close(self) -> None:
        """Drop what has not begun, wait for what has; call it after the verifier's own `close`."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _pass_over(self, row: TokenRow, why: str) -> StoredRow:
        """Stop, or go on with a stand-in that has nothing supervised and so adds nothing to any loss."""
        if not self._skips:
            raise StoreError(f"row {row.row_id}: {why}; --on-missing skip passes over such rows")
        with self._lock:
            self.refused[row.row_id] = why
            if len(self.refused) <= _NUM_LOGGED:
                logger.warning("row %s passed over: %s", row.row_id, why)
        spec = self._spec
        ids = row.input_ids[:2]
        empty = replace(row, input_ids=ids, loss_mask=[0] * len(ids), next_is_supervised=False, tail_length=0)
        width, dtype = len(spec.aux_layer_ids) * spec.hidden_size, spec.torch_dtype
        return StoredRow(
            empty,
            torch.zeros(len(empty.input_ids), width, dtype=dtype),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0, spec.hidden_size, dtype=dtype),
        )


class ServedRows:
    """`Rows` from a `StateMaker`: announced rows are requested in their order, as the window allows.

    Args:
        maker: shared by training and validation rows.
        extents: of the rows.
        window_tokens: tokens of rows that are under way or made and not read yet; one row always is allowed.
    """

    def __init__(self, maker: StateMaker, extents: dict[str, Extent], window_tokens: int) -> None:
        self._maker, self._extents, self._window_tokens = maker, extents, window_tokens
        self._lock = threading.Lock()
        self._announced: deque[str] = deque()
        self._under_way: dict[str, deque[Future[StoredRow]]] = defaultdict(deque)
        self._num_tokens = 0

    def extents(self) -> dict[str, Extent]:
        return self._extents

    def expect(self, row_ids: Sequence[str]) -> None:
        with self._lock:
            self._announced.extend(row_ids)
            self._top_up()

    def read(self, row_id: str) -> StoredRow:
        """See `Rows`. A row that was not announced, or not requested yet, is made now."""
        with self._lock:
            waiting = self._under_way[row_id]
            future = waiting.popleft() if waiting else None
            if future is None and row_id in self._announced:
                self._announced.remove(row_id)
        if future is None:
            return self._maker.make(row_id)
        try:
            return future.result()
        finally:
            with self._lock:
                self._num_tokens -= self._extents[row_id].num_tokens
                self._top_up()

    def _top_up(self) -> None:
        while self._announced:
            num_tokens = self._extents[self._announced[0]].num_tokens
            if self._num_tokens and self._num_tokens + num_tokens > self._window_tokens:
                return
            row_id = self._announced.popleft()
            self._num_tokens += num_tokens
            self._under_way[row_id].append(self._maker.submit(row_id))
