"""The commands of the road, run as a user would, against servers that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.vllm_engines import QUIET


def command(*arguments: object) -> list[str]:
    """`python -m peagle ...`."""
    return [sys.executable, "-m", "peagle", *map(str, arguments)]


def peagle(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command(*arguments), env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=600)


def begin(*arguments: object) -> subprocess.Popen[str]:
    """Start a command."""
    return subprocess.Popen(command(*arguments), env={**os.environ, **QUIET}, stderr=subprocess.PIPE, text=True)


def must(*arguments: object) -> str:
    """Run a command that has to work; returns what it said."""
    done = peagle(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def when(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for something to be so."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.05)


def kill_9(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and the server that it started, without warning."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    for child in children:
        os.killpg(int(child), signal.SIGKILL)
    process.wait()


def records(path: Path) -> list[dict]:
    """Lines of a .jsonl file, the last one only if it is whole."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
