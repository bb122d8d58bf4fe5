"""What extraction costs: tokens per second with it and without it, in turn.

Two servers of the same vLLM with the same settings, of which only one hands out hidden states. The same client sends
both the same requests; extraction's time ends when the last row's states are in this process's memory and its file is
gone.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peagle.config import ServerSettings
from peagle.data.records import TokenRow
from peagle.processes import ServerCommand, start, stop, wait_ready
from peagle.verifier.model_config import load_verifier_config, resolve_aux_layer_ids
from peagle.verifier.source import RowRefused
from peagle.vllm.client import Endpoint, EndpointPool, in_parallel
from peagle.vllm.states import EndpointSource, states_request
from tests.vllm.support.engines import QUIET, SMALL, free_port, server

OPTIONS = ("--no-enable-prefix-caching",)
CONCURRENCY = 32
ROWS, LENGTHS, PORTION, ROUNDS = 128, (100, 1000), 64, 5  # tokens of a row: what conversations have
SETTINGS = ServerSettings(concurrency=CONCURRENCY, request_timeout_s=300.0, restart_wait_s=60.0)
Run = Callable[[Sequence[list[int]]], None]


def extract_rate_ratio(verifier: Path, vocab_size: int, work: Path) -> dict[str, Any]:
    """Tokens per second of extraction over those of plain prefill: median over portions of rows, in turn.

    Portions take a few seconds, because the load of the machine varies: both sides of a pair meet the same.
    """
    rng = random.Random(2)
    rows = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(*LENGTHS))] for _ in range(ROWS)]
    shared = work / "shared"
    extracting = ["launch-vllm", str(verifier), "--hidden-states-path", str(shared), "--", *OPTIONS]
    portions = [rows[i : i + PORTION] for i in range(0, len(rows), PORTION)]
    pairs: list[tuple[int, float, float]] = []
    with (
        server(extracting, work / "extract.log") as (_, extract_url),
        plain_server(verifier, work / "plain.log") as plain_url,
        extraction(verifier, extract_url, shared) as extract,
        prefill(plain_url) as plain,
    ):
        for _ in range(ROUNDS + 1):
            for portion in portions:
                turns = {"extract": extract, "prefill": plain}
                seconds = {}
                for name in sorted(turns, reverse=len(pairs) % 2 == 1):
                    started_s = time.monotonic()
                    turns[name](portion)
                    seconds[name] = time.monotonic() - started_s
                pairs.append((sum(map(len, portion)), seconds["extract"], seconds["prefill"]))
    pairs = pairs[len(portions) :]  # the first round warms up
    ratios = [without / with_it for _, with_it, without in pairs]
    return {
        "extract_rate_ratio": statistics.median(ratios),
        "extract_rate_ratio_quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
        "extract_rate_pairs": len(ratios),
        "extract_tokens_per_s": statistics.median(tokens / with_it for tokens, with_it, _ in pairs),
        "prefill_tokens_per_s": statistics.median(tokens / without for tokens, _, without in pairs),
    }


@contextlib.contextmanager
def extraction(verifier: Path, url: str, shared: Path) -> Iterator[Run]:
    """Takes every row's states, as `peagle extract --endpoint` does."""
    verifier_config = load_verifier_config(str(verifier), False)
    aux = resolve_aux_layer_ids(verifier_config.num_layers, None)
    source = EndpointSource(
        verifier=verifier_config,
        aux_layer_ids=aux,
        dtype="float32",
        servers=SETTINGS.model_copy(update={"endpoint": (url,)}),
        hidden_states_path=shared,
        store="rate",
        check_all_positions=False,
    )

    def run(rows: Sequence[list[int]]) -> None:
        token_rows = [
            TokenRow(
                row_id=str(i),
                source="x",
                input_ids=list(ids),
                loss_mask=[1] * len(ids),
                next_is_supervised=False,
                tail_length=0,
            )
            for i, ids in enumerate(rows)
        ]
        wanted = {row.row_id for row in token_rows}
        for found in source.states(token_rows, wanted):
            if isinstance(found, RowRefused):
                raise RuntimeError(f"{found.row_id}: {found.reason}: {found.detail}")

    try:
        yield run
    finally:
        source.close()


@contextlib.contextmanager
def prefill(url: str) -> Iterator[Run]:
    """Sends the same requests, for one token and no states."""
    endpoint = Endpoint(url, SETTINGS)
    endpoint.model()
    pool = EndpointPool([endpoint], SETTINGS)

    def run(rows: Sequence[list[int]]) -> None:
        payloads = [{**states_request(list(ids), "x", False), "kv_transfer_params": None} for ids in rows]
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
            stop(process, 30.0)
