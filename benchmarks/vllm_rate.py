"""What extraction costs: tokens per second with it and without, by turns.

Two servers of the same vLLM with the same settings, of which only one hands out hidden states. Both are asked by the
same client with the same requests; extraction's time ends when the last row's states are in this process's memory and
its file is gone.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.vllm_engines import QUIET, SMALL, free_port, server
from peagle.data.rows import TokenRow
from peagle.verifier.facts import load_facts
from peagle.verifier.layers import resolve_aux_layer_ids
from peagle.verifier.source import RowRefused
from peagle.verifier.vllm_answers import states_request
from peagle.verifier.vllm_client import Endpoint, EndpointPool, RetryPolicy
from peagle.verifier.vllm_endpoint import EndpointSettings, EndpointSource
from peagle.verifier.vllm_launch import ServerCommand, start, stop, wait_ready
from peagle.verifier.vllm_parallel import in_parallel

OPTIONS = ("--no-enable-prefix-caching",)
CONCURRENCY = 16
POLICY = RetryPolicy(300.0, 3, 60.0)


def extract_rate_ratio(verifier: Path, rows: Sequence[list[int]], work: Path, rounds: int) -> dict[str, Any]:
    """Tokens per second of extraction against plain prefill, each in its best round, and their ratio.

    The best rounds, because whatever else the machine does only ever adds time; the median of the rounds' own ratios is
    given beside.
    """
    shared = work / "shared"
    extracting = ["launch-vllm", str(verifier), "--hidden-states-path", str(shared), "--", *OPTIONS]
    seconds: dict[str, list[float]] = {"extract": [], "prefill": []}
    with (
        server(extracting, work / "extract.log") as (_, extract_url),
        plain_server(verifier, work / "plain.log") as plain_url,
        extraction(verifier, rows, extract_url, shared) as extract,
        prefill(rows, plain_url) as plain,
    ):
        for number in range(rounds + 1):
            turns = [("extract", extract), ("prefill", plain)]
            for name, run in turns if number % 2 else reversed(turns):
                started_s = time.monotonic()
                run()
                seconds[name].append(time.monotonic() - started_s)
    pairs = list(zip(seconds["extract"], seconds["prefill"]))[1:]  # the first round warms up
    num_tokens = sum(map(len, rows))
    best_with, best_without = (min(column) for column in zip(*pairs))
    return {
        "extract_rate_ratio": best_without / best_with,
        "extract_rate_ratio_median": statistics.median(without / with_it for with_it, without in pairs),
        "extract_tokens_per_s": num_tokens / best_with,
        "prefill_tokens_per_s": num_tokens / best_without,
        "rate_seconds": [[round(value, 3) for value in pair] for pair in pairs],
        "rate_tokens": num_tokens,
    }


@contextlib.contextmanager
def extraction(verifier: Path, rows: Sequence[list[int]], url: str, shared: Path) -> Iterator[Callable[[], None]]:
    """Takes every row's states, as `peagle extract --endpoint` does."""
    facts = load_facts(str(verifier), False)
    aux = resolve_aux_layer_ids(facts.num_layers, None)
    settings = EndpointSettings((url,), None, None, CONCURRENCY, POLICY, shared)
    source = EndpointSource(facts, aux, "float32", settings, "rate", False)
    token_rows = [TokenRow(str(i), "x", list(ids), [1] * len(ids), False, 0) for i, ids in enumerate(rows)]
    wanted = {row.row_id for row in token_rows}

    def run() -> None:
        found = list(source.states(token_rows, wanted))
        if len(found) != len(rows) or any(isinstance(one, RowRefused) for one in found):
            raise RuntimeError("rows were refused")

    try:
        yield run
    finally:
        source.close()


@contextlib.contextmanager
def prefill(rows: Sequence[list[int]], url: str) -> Iterator[Callable[[], None]]:
    """Sends the same requests, for one token and no states."""
    endpoint = Endpoint(url, None, POLICY, CONCURRENCY)
    endpoint.model(None)
    pool = EndpointPool([endpoint], POLICY)
    payloads = [{**states_request(list(ids), "x", False), "kv_transfer_params": None} for ids in rows]

    def run() -> None:
        jobs = (lambda payload=payload: pool.post("/v1/completions", payload) for payload in payloads)
        for _ in in_parallel(jobs, CONCURRENCY, pool.close):
            pass

    try:
        yield run
    finally:
        pool.close()


@contextlib.contextmanager
def plain_server(verifier: Path, log: Path) -> Iterator[str]:
    """The same vLLM without extraction."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(verifier), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", *SMALL, *OPTIONS]
    with open(log, "ab") as output:
        process = start(ServerCommand(tuple(command), QUIET), output)
        try:
            wait_ready(process, f"http://127.0.0.1:{port}", 900.0)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)
