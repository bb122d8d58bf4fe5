"""Which rows a run reads: those of a store, or those that a verifier makes as they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.data.prepared import Prepared, load_prepared
from peagle.data.rows import TokenRow
from peagle.errors import ConfigError, StoreError, VerifierError
from peagle.states.config import ExtractConfig
from peagle.states.shards import index_paths
from peagle.states.source import open_source
from peagle.states.store import StoreReader, StoreSpec, read_spec
from peagle.train.config import TrainConfig
from peagle.train.distributed import World
from peagle.train.rows import Extent, Rows, StoreRows
from peagle.train.served import Asker, Kept, ServedRows
from peagle.verifier.facts import VerifierFacts, load_facts
from peagle.verifier.layers import resolve_aux_layer_ids
from peagle.verifier.source import RowRefused, RowStates, StateSource
from peagle.verifier.weights import VerifierHead, fingerprint, load_head

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
    config: TrainConfig, facts: VerifierFacts, prepared: Prepared, aux_layer_ids: tuple[int, ...] | None
) -> Planned:
    """Find out which states a run will have, before any weights are loaded.

    Args:
        config: the run's settings.
        facts: the verifier.
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
        weights = fingerprint(facts)
    except VerifierError:
        if not config.endpoint:
            raise
        weights = ""  # only the server has them
    spec = StoreSpec(
        verifier=facts.name_or_path,
        verifier_fingerprint=weights,
        model_type=facts.model_type,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        aux_layer_ids=resolve_aux_layer_ids(facts.num_layers, asked),
        dtype=facts.dtype if config.hidden_states_dtype == "auto" else config.hidden_states_dtype,
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

    facts = load_facts(config.verifier_name_or_path, config.trust_remote_code)
    facts = facts.with_tensor_names(config.verifier_tensors)
    head = _head(facts, config)
    source = open_source(_extract_config(config, spec), spec, facts, head, row_of(next(iter(train))), world.rank)
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
    from peagle.verifier.vllm_endpoint import EndpointSource

    if isinstance(source, EndpointSource):
        return source.fetch
    lock = threading.Lock()

    def fetch(row: TokenRow) -> RowStates | RowRefused:
        if len(row.input_ids) > source.max_tokens:
            return RowRefused(row.row_id, f"longer than the verifier takes ({source.max_tokens} tokens)", "")
        with lock:
            return next(iter(list(source.states([row], {row.row_id}))))

    return fetch


def _head(facts: VerifierFacts, config: TrainConfig) -> VerifierHead | None:
    try:
        return load_head(facts).to(torch.device("cpu"), torch.float32)
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
