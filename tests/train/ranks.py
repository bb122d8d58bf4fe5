"""Starts the ranks of a test as processes, as torchrun would, and waits for them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LIMIT_S = 400
"""For both ranks together: they take a few seconds, on a machine that has nothing else to do."""
_AFTER_FAILURE_S = 20
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How each rank ended."""

    codes: list[int]
    errors: list[str]


def run_ranks(scenarios: str, folder: Path, collective_s: float) -> Ended:
    """Run `tests.train.worker` on two ranks; a rank that does not end in time is killed and fails the test."""
    num_ranks = 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    logs = [folder / f"stderr.{port}.rank{rank}" for rank in range(num_ranks)]
    for rank in range(num_ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.train.worker", scenarios, str(folder), str(collective_s)]
        with open(logs[rank], "w") as log:
            processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stderr=log))
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Ended([process.returncode for process in processes], [log.read_text() for log in logs])


def _wait(processes: list[subprocess.Popen]) -> None:
    """Wait for all; when one has failed the others get a few seconds more (they may wait for it)."""
    end_s = time.monotonic() + _LIMIT_S
    while any(process.poll() is None for process in processes) and time.monotonic() < end_s:
        time.sleep(0.1)
        if any(process.poll() for process in processes):
            end_s = min(end_s, time.monotonic() + _AFTER_FAILURE_S)


def found(scenario: str, folder: Path, rank: int = 0) -> dict[str, Any]:
    """What a rank wrote."""
    return json.loads((folder / f"{scenario}.rank{rank}.json").read_text())
