"""HTTP to served models: what is worth another try, for how long, and one clear line for everything else.

Two kinds of trouble are kept apart. A passing answer (408, 409, 425, 429, 5xx, or none in time) is tried again a few
times with growing pauses. A lost connection means that a server is gone: it may come back, so it is waited for, up to
`restart_wait_s`, by all threads together. Any other 4xx is not repeated: the same request would get the same answer.
"""

import contextlib
import logging
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from peagle.config import ServerSettings
from peagle.errors import EndpointError

logger = logging.getLogger(__name__)

PASSING_STATUS = frozenset({408, 409, 425, 429}) | frozenset(range(500, 600))
_ROW_STATUS = frozenset({400, 413, 422})
REFUSALS_THAT_STOP = 20
"""Rows in a row that the servers refused: the fault is then plainly not in single rows."""
_POLL_S = 0.5
_END_S = 15.0  # for requests that were interrupted; one that is connecting takes the longest

Result = TypeVar("Result")


@dataclass(frozen=True)
class ServedModel:
    """What `GET /v1/models` says."""

    name: str
    """To be sent with each request."""
    root: str
    """The folder or hub id that it was loaded from."""
    max_model_len: int | None
    """Tokens of prompt and answer together; None if the server does not say."""


@dataclass(frozen=True)
class ServerAnswer:
    """A JSON answer, and the endpoint that gave it."""

    body: dict[str, Any]
    url: str
    origin: str
    """The endpoint, and which of its lives: a server that was lost and came back may be another."""


class RowRefusedError(EndpointError):
    """The server will not take this one request; others may go on."""


class _PassingError(Exception):
    """Worth another try."""

    def __init__(self, reason: str, retry_after_s: float | None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Endpoint:
    """One served model.

    Args:
        url: `http://host:port`, with or without `/v1`.
        servers: key, time limit, requests that may be open at once, and the name under which the model is served.
    """

    def __init__(self, url: str, servers: ServerSettings) -> None:
        self.root_url = normal_url(url)
        limits = httpx.Limits(max_connections=servers.concurrency, max_keepalive_connections=servers.concurrency)
        timeout = httpx.Timeout(servers.request_timeout_s, connect=min(servers.request_timeout_s, 10.0))
        self._http = httpx.Client(headers=servers.authorization, limits=limits, timeout=timeout, trust_env=False)
        self._servers = servers
        self.served_name = ""
        """The model's name in requests; set by `model`."""
        self.in_flight = self.num_losses = 0
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock, self._is_interrupted = threading.Lock(), False

    @property
    def origin(self) -> str:
        """Address and life of the server."""
        return f"{self.root_url} ({self.num_losses} restarts)"

    def interrupt(self) -> None:
        """End the requests under way, and later ones, with an error; from any thread.

        Closing would not: a thread that is about to wait for an answer would wait on a descriptor that another socket
        has by then, for as long as one request may take.
        """
        self._is_interrupted = True
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Drop all connections; see `interrupt` for requests under way."""
        self._http.close()

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        """Note each connection's socket, as httpcore reports it."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._sockets.add(info["return_value"].get_extra_info("socket"))
            if self._is_interrupted:
                self.interrupt()

    def is_ready(self) -> bool:
        """Whether the server answers its health check."""
        try:
            return self._http.get(f"{self.root_url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def model(self) -> ServedModel:
        """Look up the served model (the first, unless `served_model_name` says which), and send its name from now on.

        Raises:
            EndpointError: unreachable, not ready, not an OpenAI-style server, or no model of that name.
        """
        wanted = self._servers.served_model_name
        url = f"{self.root_url}/v1/models"
        try:
            answer = self._http.get(url, timeout=10.0)
        except httpx.ConnectError:
            raise EndpointError(
                f"{self.root_url}: nobody answers there; start a server (`peagle launch-vllm MODEL "
                "--hidden-states-path DIR`; for a drafter `peagle serve CHECKPOINT`) or correct --endpoint"
            ) from None
        except httpx.TimeoutException:
            raise EndpointError(f"{self.root_url}: no answer within 10 s; is the server still loading?") from None
        except httpx.HTTPError as error:
            raise EndpointError(f"{self.root_url}: cannot be reached: {type(error).__name__}: {error}") from None
        if answer.status_code in (401, 403):
            raise EndpointError(f"{self.root_url}: access denied ({answer.status_code}); set --api-key")
        if answer.status_code >= 500:
            raise EndpointError(f"{self.root_url}: not ready ({answer.status_code}); wait until the model is loaded")
        try:
            entries = answer.json()["data"] if answer.status_code == 200 else []
            served = [ServedModel(str(e["id"]), str(e.get("root") or e["id"]), e.get("max_model_len")) for e in entries]
        except (ValueError, KeyError, TypeError):
            served = []
        if not served:
            raise EndpointError(f"{url}: no list of models there (status {answer.status_code}); is it a vLLM server?")
        chosen = next((m for m in served if wanted is None or wanted in (m.name, m.root)), None)
        if chosen is None:
            names = ", ".join(m.name for m in served)
            raise EndpointError(f"{self.root_url}: serves {names}, not {wanted}")
        self.served_name = chosen.name
        return chosen

    def require_model(self, name_or_path: str, served: ServedModel, *further_names: str) -> None:
        """Refuse a server of another model, unless `served_model_name` vouches for it.

        Raises:
            EndpointError: neither the names in `served` nor the `further_names` are those of the model that is meant.
        """
        if self._servers.served_model_name is None and not is_same_model(
            name_or_path, (served.name, served.root, *further_names)
        ):
            raise EndpointError(
                f"{self.root_url}: serves {served.root}, not {name_or_path}; if these are the same weights, say so "
                f"with --served-model-name {served.name}"
            )

    def get_text(self, path: str) -> str:
        """`GET` as text, for `/metrics`."""
        try:
            answer = self._http.get(self.root_url + path)
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise EndpointError(f"{self.root_url}{path}: status {error.response.status_code}") from None
        except httpx.HTTPError as error:
            raise EndpointError(f"{self.root_url}{path}: {type(error).__name__}: {error}") from None
        return answer.text

    def chat_ids(self, conversation: dict[str, Any]) -> list[int] | None:
        """What the server's own chat template makes of a conversation ("messages", and "tools" or
        "chat_template_kwargs" if there are any): token ids, or None where it does not tell."""
        try:
            answer = self._http.post(
                f"{self.root_url}/tokenize", json={"model": self.served_name, **conversation}, timeout=10.0
            )
            ids = answer.json()["tokens"] if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None
        return [int(i) for i in ids] if isinstance(ids, list) else None

    def post_once(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        """One try. Lost connections come out as `httpx.TransportError`, other trouble as the module says."""
        try:
            answer = self._http.post(self.root_url + path, json=payload, extensions={"trace": self._trace})
        except httpx.TimeoutException as error:
            if isinstance(error, httpx.ConnectTimeout):
                raise
            raise _PassingError(f"no answer within {self._servers.request_timeout_s:g} s", None) from None
        if answer.status_code == 200:
            try:
                body = answer.json()
            except ValueError:
                raise _PassingError("the answer is not JSON", None) from None
            if isinstance(body, dict):
                return body
            raise _PassingError("the answer is not a JSON object", None)
        reason = f"status {answer.status_code}: {_message(answer)}"
        if answer.status_code in PASSING_STATUS:
            raise _PassingError(reason, _retry_after_s(answer))
        if answer.status_code in _ROW_STATUS:
            raise RowRefusedError(f"{self.root_url}: {reason}")
        raise EndpointError(f"{self.root_url}{path}: {reason}")


class EndpointPool:
    """Several endpoints that serve the same model: each request goes to the least busy one that is there."""

    def __init__(self, endpoints: Sequence[Endpoint], servers: ServerSettings) -> None:
        self.endpoints = tuple(endpoints)
        self._servers = servers
        self._lock = threading.Lock()
        self._gone: dict[Endpoint, float] = {}  # endpoint -> when it was found gone
        self._looked_s: dict[Endpoint, float] = {}
        self._stopped = threading.Event()

    def close(self) -> None:
        """End waits and requests; they raise EndpointError."""
        self._stopped.set()
        for endpoint in self.endpoints:
            endpoint.interrupt()
        deadline_s = time.monotonic() + _END_S
        while any(endpoint.in_flight for endpoint in self.endpoints) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for endpoint in self.endpoints:
            endpoint.close()

    def post(self, path: str, payload: dict[str, Any]) -> ServerAnswer:
        """Send until an answer comes. The served model's name is filled in.

        Raises:
            RowRefusedError: status 400, 413 or 422: this request is at fault.
            EndpointError: another refusal; or retries and waits are used up.
        """
        tries = losses = 0
        while True:
            endpoint = self._take()
            try:
                body = endpoint.post_once(path, {"model": endpoint.served_name, **payload})
                return ServerAnswer(body, endpoint.root_url, endpoint.origin)
            except _PassingError as passing:
                tries += 1
                if tries > self._servers.max_retries:
                    raise EndpointError(
                        f"{endpoint.root_url}: {passing} (tried {tries} times); run the same command again to go on"
                    ) from None
                self._stopped.wait(min(passing.retry_after_s or 0.25 * 2**tries * (1 + random.random()), 60.0))
            except (httpx.TransportError, RuntimeError) as error:
                if self._stopped.is_set():  # closed by another thread: httpx raises RuntimeError then
                    raise EndpointError("stopped") from None
                if isinstance(error, RuntimeError):
                    raise
                self._lost(endpoint, error)
                losses += 1
                if losses > self._servers.max_retries + 1:  # does this very request bring the server down?
                    raise EndpointError(
                        f"{endpoint.root_url}: the connection was lost {losses} times during one request "
                        f"({type(error).__name__}); look at the server's log"
                    ) from None
            finally:
                with self._lock:
                    endpoint.in_flight -= 1

    def _take(self) -> Endpoint:
        """The least busy endpoint that is there; waits while none is."""
        while True:
            if self._stopped.is_set():
                raise EndpointError("stopped")
            with self._lock:
                there = [endpoint for endpoint in self.endpoints if endpoint not in self._gone]
                if there:
                    chosen = min(there, key=lambda endpoint: endpoint.in_flight)
                    chosen.in_flight += 1
                    looks = [e for e in self._gone if time.monotonic() - self._looked_s.get(e, 0.0) > 10 * _POLL_S]
                    for endpoint in looks:
                        self._looked_s[endpoint] = time.monotonic()
                    since = 0.0
                else:
                    looks, since = list(self._gone), max(self._gone.values())
            for endpoint in looks:
                if endpoint.is_ready():
                    with self._lock:
                        if self._gone.pop(endpoint, None) is not None:
                            logger.info("%s: back", endpoint.root_url)
            if there:
                return chosen
            if time.monotonic() - since > self._servers.restart_wait_s:
                names = ", ".join(endpoint.root_url for endpoint in self.endpoints)
                raise EndpointError(
                    f"{names}: gone for {self._servers.restart_wait_s:g} s; what is stored is kept. Start the server "
                    "again, then run the same command to go on"
                )
            self._stopped.wait(_POLL_S)

    def _lost(self, endpoint: Endpoint, error: Exception) -> None:
        with self._lock:
            if endpoint not in self._gone:
                self._gone[endpoint] = time.monotonic()
                endpoint.num_losses += 1
                logger.warning(
                    "%s: connection lost (%s); waiting up to %g s for it to come back",
                    endpoint.root_url, type(error).__name__, self._servers.restart_wait_s,
                )  # fmt: skip


def normal_url(url: str) -> str:
    """`http://host:port/v1/`, `host:port` and the like to `http://host:port`.

    Raises:
        EndpointError: not an address.
    """
    scheme, given, rest = url.strip().rpartition("://")
    rest = rest.rstrip("/").removesuffix("/v1").rstrip("/")
    text = f"{scheme}://{rest}" if given else f"http://{rest}"
    try:
        parsed = httpx.URL(text)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise EndpointError(f"--endpoint {url!r}: expected an address such as http://localhost:8000/v1")
    return text


def is_same_model(name_or_path: str, others: Sequence[str]) -> bool:
    """Whether a model goes by one of the other names: the same text, folder, or last part of the name."""
    mine = Path(name_or_path)
    for other in filter(None, others):
        if other == name_or_path or Path(other).name.lower() == mine.name.lower():
            return True
        if mine.exists() and Path(other).exists() and mine.resolve() == Path(other).resolve():
            return True
    return False


def _message(answer: httpx.Response) -> str:
    """The server's own words, one line of at most 300 characters."""
    try:
        body = answer.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        text = answer.text
    return " ".join(text.split())[:300] or "no reason given"


def _retry_after_s(answer: httpx.Response) -> float | None:
    value = answer.headers.get("retry-after", "")
    return float(value) if value.replace(".", "", 1).isdigit() else None


def in_parallel(jobs: Iterator[Callable[[], Result]], concurrency: int, abort: Callable[[], None]) -> Iterator[Result]:
    """Run jobs in threads, a bounded number at a time, and yield their results in the order in which they end.

    Args:
        jobs: taken one at a time, so that at most `concurrency` results are held at once.
        concurrency: jobs under way at once.
        abort: makes the jobs under way end soon; called when one raises, or when the caller stops listening.

    Raises:
        Whatever a job raises first.
    """
    workers = ThreadPoolExecutor(concurrency, thread_name_prefix="requests")
    under_way: set[Future[Result]] = set()
    try:
        while True:
            while len(under_way) < concurrency and (job := next(jobs, None)) is not None:
                under_way.add(workers.submit(job))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BaseException:
        abort()
        raise
    finally:
        workers.shutdown(wait=True, cancel_futures=True)
