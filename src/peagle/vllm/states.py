"""Hidden states from served verifiers (`peagle launch-vllm`): many rows at once, each tied to its own ids.

Rows go as token ids, never as text, so no template or special token can creep in; what the server read comes back in
the file and is compared. A file holds as many states as ids, or it is asked for again. Files are deleted as they are
read, and those of a killed run of the same store are swept.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.config import ServerSettings
from peagle.data.records import TokenRow
from peagle.errors import DiskError, EndpointError, PeagleError
from peagle.files import is_disk_full
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.source import RowRefused, RowStates, first_difference
from peagle.vllm.client import REFUSALS_THAT_STOP, Endpoint, EndpointPool, RowRefusedError, ServedModel, in_parallel
from peagle.vllm.launch import IN_FLIGHT

logger = logging.getLogger(__name__)

MISMATCHES_THAT_STOP = 3
"""Rows in a row that the server read otherwise than they were sent."""
GREEDY: dict[str, float] = {
    "temperature": 0,
    # A model's generation_config.json may hold penalties, which the server would apply to its choice.
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
AXES = "tokens layers hidden"
"""Of the states in a file, as its metadata must say."""
_OTHER_COUNT = "states and ids differ in number"
_PROBE_IDS = [0, 1, 0]
_PROBE_WAIT_S, _FILE_WAIT_S, _LEFTOVER_WAIT_S = 15.0, 60.0, 2.0
_FIRST_LOOK_S, _SLOWEST_LOOK_S = 0.002, 0.1
_CHECKED_EVERY = 50
_LONGEST_CHECKED = 4096  # the server holds [num_tokens, vocab_size] log-probabilities for a row that is checked


class EndpointSource:
    """A `StateSource` over one or several servers of the same verifier.

    Args:
        verifier: the model that the rows were prepared for.
        aux_layer_ids: layers wanted, ascending; the last layer is always wanted too.
        dtype: "float32", "bfloat16" or "float16": what is to be stored; a server must not compute in less.
        servers: where they are and how they are asked.
        hidden_states_path: as given to `launch-vllm`, as this machine sees it.
        store: identity of the result (its output path), for naming files.
        check_all_positions: compare a sample of rows at every position with the server's prompt log-probabilities
            (`--validate-outputs`). The first row always is, and the last position of every row.

    Raises:
        EndpointError: unreachable, not ready, another model, no connector, other layers, or a folder not shared.
    """

    def __init__(
        self,
        *,
        verifier: VerifierConfig,
        aux_layer_ids: Sequence[int],
        dtype: str,
        servers: ServerSettings,
        hidden_states_path: Path,
        store: str,
        check_all_positions: bool,
    ) -> None:
        self._verifier, self._dtype, self._servers = verifier, dtype, servers
        self._wanted_layers = (*aux_layer_ids, verifier.num_layers)
        self._check_all = check_all_positions
        self._folder = StatesFolder(hidden_states_path, store)
        self._pool = EndpointPool([Endpoint(url, servers) for url in servers.endpoint], servers)
        self._refused_in_a_row = self._mismatched_in_a_row = 0
        try:
            limits = [self._connect(endpoint) for endpoint in self._pool.endpoints]
        except BaseException:
            self.close()
            raise
        self.max_tokens = min(limits)
        """The servers' limit, less the one token that each request generates."""
        if swept := self._folder.sweep():
            logger.info("removed %d files that an earlier run had left", swept)

    def states(self, rows: Sequence[TokenRow], wanted: AbstractSet[str]) -> Iterator[RowStates | RowRefused]:
        """See `StateSource`. At most `concurrency` rows are held at once, so memory is bounded by it."""
        source = (row for row in rows if row.row_id in wanted)
        jobs = (
            functools.partial(self._row, row, to_be_checked(row, number, self._check_all))
            for number, row in enumerate(source)
        )
        # When it ends early, requests under way are dropped, and the server removes their files.
        for result in in_parallel(jobs, self._servers.concurrency, self._pool.close):
            self._watch(result)
            yield result

    def fetch(self, row: TokenRow) -> RowStates | RowRefused:
        """One row, from any thread: for callers that keep their own requests under way (online training).

        Raises:
            EndpointError: the servers are gone for too long, or the fault is plainly not in single rows.
        """
        if len(row.input_ids) > self.max_tokens:
            return RowRefused(row.row_id, "longer than the servers take", f"{len(row.input_ids)} > {self.max_tokens}")
        result = self._row(row, False)
        self._watch(result)
        return result

    def second_opinion(self, ids: list[int], origin: str) -> dict[int, Tensor] | None:
        """The wanted layers' states of some tokens from another server than `origin`; None if there is no other."""
        others = [endpoint for endpoint in self._pool.endpoints if not origin.startswith(endpoint.root_url + " ")]
        if not others:
            return None
        row = TokenRow(
            row_id="second opinion",
            source="",
            input_ids=ids,
            loss_mask=[0] * len(ids),
            next_is_supervised=False,
            tail_length=0,
        )
        answer = self._row(row, False, EndpointPool(others, self._servers))
        if isinstance(answer, RowRefused):
            raise EndpointError(f"{others[0].root_url}: {answer.reason}: {answer.detail}")
        states = [*answer.aux_states.split(self._verifier.hidden_size, dim=-1), answer.last_states]
        return dict(zip(self._wanted_layers, states))

    def close(self) -> None:
        """Drop connections, remove this store's files."""
        self._pool.close()
        self._folder.sweep()

    def _connect(self, endpoint: Endpoint) -> int:
        """Check one server by a tiny request; returns the longest row that it takes."""
        served = endpoint.model()
        name = self._folder.new_name()
        probe = EndpointPool([endpoint], self._servers)
        answer = probe.post("/v1/completions", states_request(_PROBE_IDS, name, False))
        connector = connector_answer(answer.body.get("kv_transfer_params"), answer.url)
        try:
            self._check_server(endpoint, served, connector)
        except EndpointError:
            with contextlib.suppress(PeagleError):  # its file may still be on its way: leave none behind
                self._folder.read(name, _LEFTOVER_WAIT_S)
            raise
        try:
            self._folder.read(name, _PROBE_WAIT_S)
        except MissingFileError:
            raise EndpointError(
                f"{endpoint.root_url}: its files are not seen here. It writes {connector.get('hidden_states_path')}, "
                f"this machine looks in {self._folder.path}; both must see one folder (--hidden-states-path)"
            ) from None
        limit = connector.get("max_model_len") or served.max_model_len or self._verifier.max_position_embeddings
        return int(limit) - 1

    def _check_server(self, endpoint: Endpoint, served: ServedModel, connector: dict[str, Any]) -> None:
        where = endpoint.root_url
        self._layer_order(connector, where)
        for key in ("num_layers", "hidden_size", "vocab_size"):
            mine, its = getattr(self._verifier, key), connector.get(key)
            if its is not None and int(its) != mine:
                raise EndpointError(
                    f"{where}: serves another model, {served.root}, whose {key} is {its}; "
                    f"{self._verifier.name_or_path} has {mine}"
                )
        its_dtype = str(connector.get("dtype", self._dtype))
        if its_dtype not in (self._dtype, "float32"):
            raise EndpointError(
                f"{where}: computes in {its_dtype}, wanted is {self._dtype}; start it with `-- --dtype {self._dtype}`, "
                f"or extract with --dtype {its_dtype}"
            )
        endpoint.require_model(self._verifier.name_or_path, served, str(connector.get("model", "")))

    def _row(self, row: TokenRow, is_checked: bool, pool: EndpointPool | None = None) -> RowStates | RowRefused:
        """Ask for one row (in `pool`, or any server) until it is right, within bounds."""
        trouble: EndpointError | RowRefused | None = None
        for attempt in range(self._servers.max_retries + 1):
            if trouble is not None:
                logger.debug("row %s, try %d failed: %s", row.row_id, attempt, trouble)
            name = self._folder.new_name()
            # 1. the request
            try:
                answer = (pool or self._pool).post("/v1/completions", states_request(row.input_ids, name, is_checked))
            except RowRefusedError as error:
                return RowRefused(row.row_id, "refused by the server", str(error))
            connector = connector_answer(answer.body.get("kv_transfer_params"), answer.url)
            # 2. its file
            try:
                served = self._folder.read(name, _FILE_WAIT_S)
            except WriteFailedError as error:
                trouble = error
                continue
            except MissingFileError as error:
                reason = (connector.get("failed_writes") or {}).get(name)
                trouble = WriteFailedError(f"{error}: {reason}") if reason else error
                continue
            # 3. both together
            choice = answer.body["choices"][0]
            ranks = [{i: v.get("rank") for i, v in (of or {}).items()} for of in choice.get("prompt_logprobs") or []]
            order = self._layer_order(connector, answer.url)
            if (wrong := served.fault(connector)) is not None:
                return RowRefused(row.row_id, "the server's file is not what it says", f"{answer.url}: {wrong}")
            result = row_states(row, served, order, ranks, choice.get("token_ids") or (), answer.origin)
            if isinstance(result, RowStates) or result.reason != _OTHER_COUNT:
                return result
            trouble = result
        if isinstance(trouble, RowRefused):
            return trouble
        raise trouble or EndpointError(f"row {row.row_id}: no states")

    def _layer_order(self, connector: dict[str, Any], where: str) -> list[int]:
        """Places of the wanted layers among those that a server hands out."""
        has = [int(i) for i in connector["layer_ids"]]
        if any(i not in has for i in self._wanted_layers):
            aux = " ".join(str(i) for i in self._wanted_layers[:-1])
            raise EndpointError(
                f"{where}: hands out layers {has}, wanted are {list(self._wanted_layers)}; start it with "
                f"--target-layer-ids {aux}, or extract with its ids"
            )
        return [has.index(i) for i in self._wanted_layers]

    def _watch(self, result: RowStates | RowRefused) -> None:
        """Stop where the fault is plainly not in single rows."""
        if isinstance(result, RowStates):
            self._refused_in_a_row = self._mismatched_in_a_row = 0
            return
        self._refused_in_a_row += 1
        self._mismatched_in_a_row += result.reason != "refused by the server"
        if self._mismatched_in_a_row >= MISMATCHES_THAT_STOP or self._refused_in_a_row >= REFUSALS_THAT_STOP:
            raise EndpointError(
                f"row {result.row_id}: {result.detail}; {self._refused_in_a_row} rows in a row, stopped"
            )


class WriteFailedError(EndpointError):
    """The server could not write a file."""


class MissingFileError(EndpointError):
    """The server answered, but its file did not appear here."""


@dataclass(frozen=True)
class ServedStates:
    """What one file holds. The tensor may be mapped from a file that is deleted already: copy what is to be kept."""

    hidden_states: Tensor
    """Ascending layer id, the server's dtype, [num_tokens, num_layers, hidden_size]."""
    token_ids: list[int]
    metadata: dict[str, str]
    """What the writer says of the file: see `plugin/`'s `StatesWriter`."""

    def fault(self, connector: dict[str, Any]) -> str | None:
        """Compare the file with its own metadata and with what the server says of all its files: None, or what
        differs."""
        try:
            layer_ids, axes = json.loads(self.metadata["layer_ids"]), self.metadata["axes"]
        except (KeyError, ValueError):
            return "the file does not say its layers and axes; start the server again with this version of peagle"
        if layer_ids != connector["layer_ids"]:
            return f"the file holds layers {layer_ids}, the server hands out {connector['layer_ids']}"
        sizes = {"layers": len(layer_ids), "hidden": connector.get("hidden_size"), "tokens": len(self.token_ids)}
        expected = [sizes.get(axis) for axis in AXES.split()]
        shape = list(self.hidden_states.shape)
        if axes != AXES or len(shape) != 3 or any(b is not None and a != b for a, b in zip(shape[1:], expected[1:])):
            return f"the file holds {shape} as {axes}, expected is {expected} as {AXES}"
        dtype, its = str(self.hidden_states.dtype).removeprefix("torch."), connector.get("dtype")
        if its is not None and dtype != its:
            return f"the file holds {dtype}, the server computes in {its}"
        return None


class StatesFolder:
    """The files of one run in a folder shared with the server.

    Args:
        hidden_states_path: as given to `peagle launch-vllm --hidden-states-path`, as this machine sees it.
        store: identity of what is being made (its output path): names of different stores differ, those of an earlier,
            killed run of the same store are recognized and swept.
    """

    def __init__(self, hidden_states_path: Path, store: str) -> None:
        self.path = hidden_states_path / IN_FLIGHT
        self._store = "pe-" + hashlib.sha256(store.encode()).hexdigest()[:12]
        self._run, self._numbers = os.urandom(4).hex(), itertools.count()

    def new_name(self) -> str:
        """Name for the next request of this run; from any thread."""
        return f"{self._store}-{self._run}-{next(self._numbers)}"

    def read(self, name: str, timeout_s: float) -> ServedStates:
        """Wait for a file, read it and delete it, whatever comes of it.

        Raises:
            WriteFailedError: the server could not write it.
            DiskError: because its disk is full.
            MissingFileError: nothing came in time.
            EndpointError: the file is damaged.
        """
        try:
            with safe_open(self._wait(name, timeout_s), "pt") as file:
                states, ids = file.get_tensor("hidden_states"), file.get_tensor("token_ids").tolist()
                return ServedStates(states, ids, file.metadata() or {})
        except WriteFailedError as error:
            if is_disk_full(error):
                raise DiskError(f"{self.path}: {error}; free some space and run again") from None
            raise
        except (SafetensorError, KeyError, OSError) as error:
            raise EndpointError(f"{self.path / name}: damaged file from the server: {error}") from None
        finally:
            self.delete(name)

    def delete(self, name: str) -> None:
        """Remove a file and its note, if there."""
        path = self.path / f"{name}.safetensors"
        for entry in (path, path.with_name(path.name + ".error")):
            try:
                entry.unlink(missing_ok=True)
            except OSError as error:
                raise EndpointError(
                    f"{entry}: cannot be removed ({error.strerror}); the server's files pile up"
                ) from None

    def sweep(self) -> int:
        """Remove every finished file of this store, of this and of earlier runs; returns how many."""
        removed = 0
        for entry in self.path.glob(f"{self._store}-*"):
            with contextlib.suppress(OSError):
                entry.unlink()
                removed += 1
        return removed

    def _wait(self, name: str, timeout_s: float) -> Path:
        """Wait for a file to appear whole."""
        path = self.path / f"{name}.safetensors"
        note = path.with_name(path.name + ".error")
        deadline_s = time.monotonic() + timeout_s
        pause_s, reason = _FIRST_LOOK_S, ""
        while not path.exists():
            if note.exists():
                with contextlib.suppress(OSError):
                    reason = note.read_text(encoding="utf-8", errors="replace").strip()
                reason = reason or "no reason given; is its disk full?"
                raise WriteFailedError(f"the server could not write hidden states: {reason}")
            if time.monotonic() > deadline_s:
                raise MissingFileError(f"{path}: did not appear within {timeout_s:g} s of the server's answer")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _SLOWEST_LOOK_S)
        return path


def to_be_checked(row: TokenRow, number: int, check_all: bool) -> bool:
    """Whether vLLM is asked for its own choice at every position of the `number`-th row: the first, or a sample."""
    is_chosen = number == 0 or (check_all and number % _CHECKED_EVERY == 0)
    return is_chosen and len(row.input_ids) <= _LONGEST_CHECKED


def states_request(ids: list[int], name: str, is_checked: bool) -> dict[str, Any]:
    """A completion of one token whose prompt's states are stored under `name`."""
    checked = {"prompt_logprobs": 1} if is_checked else {}
    transfer = {"kv_transfer_params": {"hidden_states_name": name}}
    return {"prompt": ids, "max_tokens": 1, **GREEDY, "return_token_ids": True, **transfer, **checked}


def connector_answer(answer: Any, where: str) -> dict[str, Any]:
    """What the connector says in an answer's `kv_transfer_params`.

    Raises:
        EndpointError: no connector, or its complaint.
    """
    if not isinstance(answer, dict) or "layer_ids" not in answer:
        raise EndpointError(
            f"{where}: runs without peagle's hidden-states connector; start it with `peagle launch-vllm MODEL "
            "--hidden-states-path DIR`"
        )
    if "hidden_states_error" in answer:
        raise EndpointError(f"{where}: {answer['hidden_states_error']}")
    return answer


def row_states(
    row: TokenRow,
    served: ServedStates,
    order: list[int],
    ranks: Sequence[Mapping[Any, Any]],
    generated: Sequence[int],
    origin: str,
) -> RowStates | RowRefused:
    """A row's states, and the verifier's own choices as far as they are known, if what was served is this row's.

    Args:
        row: what was sent.
        served: what came back.
        order: places of the auxiliary layers, ascending layer id, then of the last layer.
        ranks: token -> rank for each position of the prompt, of the token there; empty where it was not asked for.
        generated: the completion's tokens.
        origin: see `RowStates`.
    """
    sent, read, states = row.input_ids, served.token_ids, served.hidden_states
    if read != sent:
        first = first_difference(sent, read)
        detail = (
            f"the server read {len(read)} ids, {len(sent)} were sent; first difference at index {first} (sent "
            f"{sent[first : first + 1]}, read {read[first : first + 1]})"
        )
        return RowRefused(row.row_id, "the server read other ids", detail)
    if states.shape[0] != len(sent):
        return RowRefused(row.row_id, _OTHER_COUNT, f"{states.shape[0]} states for {len(sent)} ids")
    # The rank of a position's token was judged one place before it.
    choices = {index - 1: int(i) for index, of in enumerate(ranks) for i, rank in of.items() if rank == 1}
    if generated:
        choices[len(sent) - 1] = int(generated[0])
    aux_places, first = order[:-1], order[0]
    is_run = aux_places == list(range(first, first + len(aux_places)))
    aux = states[:, first : first + len(aux_places)] if is_run else states[:, aux_places]
    return RowStates(
        row_id=row.row_id,
        input_ids=read,
        # One copy each, into memory of their own: what was served may be mapped from a file.
        aux_states=aux.clone(memory_format=torch.contiguous_format).flatten(1),
        last_states=states[:, order[-1]].clone(),
        choice_pos=list(choices),
        choice_ids=list(choices.values()),
        origin=origin,
    )
