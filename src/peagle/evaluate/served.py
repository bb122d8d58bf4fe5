"""A drafter that a vLLM server runs: acceptance from the server's own counters, and its speed under load."""

import contextlib
import itertools
import json
import logging
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx

from peagle import log
from peagle.config import ServerSettings
from peagle.errors import EndpointError
from peagle.evaluate.config import EvaluateConfig
from peagle.evaluate.counts import DatasetCounts, PassCounts, pool
from peagle.evaluate.prompts import DEFAULT_LIMIT, Item, Read
from peagle.evaluate.results import Measurement
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.source import Generation, GenerationSettings, Prompt, RowAnswer
from peagle.vllm.answers import EndpointAnswers
from peagle.vllm.client import Endpoint, normal_url
from peagle.vllm.counters import Reading, difference, read_metrics

logger = logging.getLogger(__name__)

_SETTLE_PAUSE_S, _SETTLE_S = 0.2, 10.0


def measure_served(
    config: EvaluateConfig, verifier: VerifierConfig, eos_token_ids: tuple[int, ...], read: Read, depth: int
) -> Measurement:
    """Answer the prompts of each data set by a server and read its counters; then measure it under load, if asked to.

    Prompts that the server refuses are dropped. If it drafted anything, its own number of tokens per pass replaces
    `depth`.
    """
    notes = []
    if config.num_speculative_tokens is not None:
        notes.append("--num-speculative-tokens is the server's to choose; the table shows what it drafted")
    # 1. acceptance, a data set at a time
    limit = config.max_new_tokens or DEFAULT_LIMIT
    settings = GenerationSettings(
        max_new_tokens=limit, eos_ids=eos_token_ids, temperature=config.temperature, top_p=config.top_p, tail_tokens=0
    )
    served = ServedDrafter(verifier, settings, config)
    datasets, seconds, generated = {}, 0.0, 0
    with contextlib.closing(served):
        by_source: dict[str, list[Item]] = {}
        for item in read.items:
            if item.start < served.max_tokens:
                by_source.setdefault(item.source, []).append(item)
        for source, items in by_source.items():
            run = served.run([Prompt(f"{i}", item.prompt_ids, config.seed + i) for i, item in enumerate(items)])
            datasets[source] = DatasetCounts(run.counts, {})
            seconds += run.seconds
            generated += run.counts.num_generated_tokens
            for row_id, reason in run.refused.items():
                read.drop(items[int(row_id)].row_id, f"refused by the server: {reason}")
    depth = max((one.total.num_speculative_tokens for one in datasets.values()), default=depth)
    datasets = {name: one for name, one in datasets.items() if one.total.num_speculative_tokens == depth}
    # 2. speed at each concurrency
    prompt_ids = [item.prompt_ids for item in read.items if len(item.prompt_ids) + limit <= served.max_tokens]
    loads = _loads(config, prompt_ids, limit, eos_token_ids) if config.concurrencies and prompt_ids else []
    speed = {"tokens_per_s": generated / seconds if seconds else None, "by_concurrency": loads}
    return Measurement(depth=depth, datasets=datasets, notes=notes, served=speed)


def _loads(
    config: EvaluateConfig, prompts: list[list[int]], limit: int, eos_token_ids: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Tokens/s and latencies at each of --concurrencies, beside a server without a drafter if there is one."""
    settings = {
        "max_tokens": limit,
        "temperature": config.temperature,
        "top_p": config.top_p if config.temperature > 0 else 1.0,
        "ignore_eos": True,
        "stop_token_ids": list(eos_token_ids),
        "return_token_ids": True,
    }
    most = config.model_copy(update={"concurrency": max(config.concurrencies)})
    with contextlib.ExitStack() as servers:
        server = servers.enter_context(contextlib.closing(LoadedServer(config.endpoint[0], most)))
        plain = None
        if config.plain_endpoint:
            unnamed = most.model_copy(update={"served_model_name": None})
            plain = servers.enter_context(contextlib.closing(LoadedServer(config.plain_endpoint, unnamed)))
        return under_load(server, plain, prompts, settings, config.concurrencies)


@dataclass(frozen=True)
class ServedRun:
    """What a server made of some prompts."""

    counts: PassCounts
    """From its counters, all engines and all endpoints together."""
    generations: dict[str, Generation]
    """By row id; without the prompts that the server refused."""
    refused: dict[str, str]
    """Row id -> what the server said."""
    seconds: float
    """From the first prompt to the last answer."""


class ServedDrafter:
    """Servers that run a verifier with a drafter.

    Raises:
        EndpointError: see `EndpointAnswers`; or a server without speculative decoding.
    """

    def __init__(self, verifier: VerifierConfig, generation: GenerationSettings, servers: ServerSettings) -> None:
        assert generation.tail_tokens == 0, "a tail would be counted"
        self._source = EndpointAnswers(verifier, generation, servers, False)
        self.max_tokens = self._source.max_tokens
        """The servers' limit of prompt and answer together."""
        try:
            for endpoint in self._source.endpoints:
                difference(Reading({}), _read(endpoint))
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[Prompt]) -> ServedRun:
        """Answer the prompts and count what was drafted and accepted meanwhile.

        Raises:
            EndpointError: a server was restarted meanwhile, or the run cannot go on.
        """
        before = [_settled(endpoint) for endpoint in self._source.endpoints]
        started_s = time.monotonic()
        results = list(self._source.answers(prompts, {prompt.row_id for prompt in prompts}))
        seconds = time.monotonic() - started_s
        generations = {one.row_id: one.generation for one in results if isinstance(one, RowAnswer)}
        refused = {one.row_id: one.detail for one in results if not isinstance(one, RowAnswer)}
        after = [_settled(endpoint) for endpoint in self._source.endpoints]
        gains = [difference(b, a) for b, a in zip(before, after)]
        parts = [
            PassCounts(
                gain.num_drafts,
                gain.accepted_per_position,
                gain.num_generated_tokens,
                drafted=gain.num_draft_tokens,
            )
            for gain in gains
        ]
        depth = max(part.num_speculative_tokens for part in parts)
        if any(part.num_speculative_tokens not in (0, depth) for part in parts):
            raise EndpointError("the endpoints draft different numbers of tokens per pass; measure them one by one")
        counts = pool([part for part in parts if part.num_speculative_tokens], depth)
        counts = replace(counts, num_answers=len(generations))
        ours = sum(len(generation.ids) for generation in generations.values())
        if counts.num_generated_tokens != ours:
            logger.warning(
                "the server counted %d generated tokens, our answers have %d: somebody else used it meanwhile, and is "
                "in the figures", counts.num_generated_tokens, ours,
            )  # fmt: skip
        return ServedRun(counts, generations, refused, seconds)

    def close(self) -> None:
        """Drop connections."""
        self._source.close()


def _read(endpoint: Endpoint) -> Reading:
    return read_metrics(endpoint.get_text("/metrics"), endpoint.served_name)


def _settled(endpoint: Endpoint) -> Reading:
    """A reading once the counters stand still: vLLM answers a request before it counts its last step."""
    deadline_s = time.monotonic() + _SETTLE_S
    last, now = None, _read(endpoint)
    while now != last:
        if time.monotonic() > deadline_s:
            raise EndpointError(f"{endpoint.root_url}: its counters do not stand still; somebody else is using it")
        time.sleep(_SETTLE_PAUSE_S)
        last, now = now, _read(endpoint)
    return now


@dataclass(frozen=True)
class Streamed:
    """One answer, as it arrived."""

    num_tokens: int
    first_s: float
    """From sending the prompt to the first token."""
    last_s: float
    """From sending the prompt to the last token."""

    @property
    def between_ms(self) -> float | None:
        """Mean time between tokens after the first; None for an answer of one token. Drafted tokens come in bunches."""
        return 1e3 * (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class LoadedServer:
    """A server to be measured.

    Raises:
        EndpointError: unreachable, or no model of that name.
    """

    def __init__(self, url: str, servers: ServerSettings) -> None:
        self.root_url = normal_url(url)
        with contextlib.closing(Endpoint(url, servers)) as endpoint:
            self._name = endpoint.model().name
        limits = httpx.Limits(max_connections=servers.concurrency, max_keepalive_connections=servers.concurrency)
        self._http = httpx.Client(
            headers=servers.authorization, limits=limits, timeout=servers.request_timeout_s, trust_env=False
        )

    def close(self) -> None:
        """Drop connections."""
        self._http.close()

    def stream(self, prompt_ids: Sequence[int], settings: dict[str, Any]) -> Streamed:
        """Send one prompt and time its answer.

        Raises:
            EndpointError: the server refused it, broke off, or sent no token.
        """
        payload = {"model": self._name, "prompt": list(prompt_ids), "stream": True, **settings}
        payload["stream_options"] = {"include_usage": True}
        began_s = time.perf_counter()
        first_s = last_s = 0.0
        counted = total = 0
        try:
            with self._http.stream("POST", f"{self.root_url}/v1/completions", json=payload) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise EndpointError(f"{self.root_url}: status {answer.status_code}: {answer.text[:200]}")
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    body = json.loads(line.removeprefix("data: "))
                    total = (body.get("usage") or {}).get("completion_tokens") or total
                    choice = next(iter(body.get("choices") or ()), None)
                    if choice is None or not (choice.get("token_ids") or choice.get("text")):
                        continue
                    last_s = time.perf_counter() - began_s
                    first_s = first_s or last_s
                    counted += len(choice.get("token_ids") or (0,))
        except (httpx.HTTPError, ValueError) as error:
            raise EndpointError(f"{self.root_url}: broke off an answer ({type(error).__name__}: {error})") from None
        if not first_s:
            raise EndpointError(f"{self.root_url}: an answer held no token")
        return Streamed(int(total or counted), first_s, last_s)

    def measure(
        self, prompts: Sequence[Sequence[int]], settings: dict[str, Any], concurrency: int
    ) -> dict[str, float | None]:
        """Keep `concurrency` requests under way until every prompt is answered; few prompts are sent more than once.

        Gives `requests`; `tokens_per_s` of all requests together; medians over the answers of the time to the first
        token (`ttft_ms`) and between tokens (`itl_ms`).
        """
        count = max(len(prompts), 2 * concurrency)
        with ThreadPoolExecutor(concurrency) as pool, log.progress(f"{concurrency} at once", count, "answers") as meter:
            began_s = time.perf_counter()
            jobs = [pool.submit(self.stream, prompts[i % len(prompts)], settings) for i in range(count)]
            streamed = []
            for job in jobs:
                streamed.append(job.result())
                meter.advance(1)
            seconds = time.perf_counter() - began_s
        between = [one.between_ms for one in streamed if one.between_ms is not None]
        return {
            "requests": count,
            "tokens_per_s": sum(one.num_tokens for one in streamed) / seconds,
            "ttft_ms": 1e3 * statistics.median(one.first_s for one in streamed),
            "itl_ms": statistics.median(between) if between else None,
        }


def under_load(
    server: LoadedServer,
    plain: LoadedServer | None,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, Any],
    concurrencies: Sequence[int],
) -> list[dict[str, Any]]:
    """Measure a server with a drafter, and one without beside it, in turn at each concurrency.

    Gives what `evaluation.json` holds as `speed.by_concurrency`; the plain server's figures are called `plain_*`.
    """
    with ThreadPoolExecutor(max(concurrencies)) as threads:  # warm-up: every prompt once, for a single token
        for one in (server, plain) if plain is not None else (server,):
            list(threads.map(one.stream, prompts, itertools.repeat({**settings, "max_tokens": 1})))
    points = []
    for concurrency in concurrencies:
        point = {"concurrency": concurrency, **server.measure(prompts, settings, concurrency)}
        if plain is not None:
            beside = plain.measure(prompts, settings, concurrency)
            point |= {f"plain_{key}": beside[key] for key in ("tokens_per_s", "ttft_ms", "itl_ms")}
        points.append(point)
    return points
