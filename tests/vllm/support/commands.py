"""The commands, run as a user would run them, and a server for them that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from peagle.processes import stop
from tests.vllm.support.engines import QUIET, free_port, server


def command(*arguments: object) -> list[str]:
    """`python -m peagle ...`."""
    return [sys.executable, "-m", "peagle", *map(str, arguments)]


def peagle(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(*arguments), env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=3000
    )


def begin(*arguments: object) -> subprocess.Popen[str]:
    """Start a command."""
    return subprocess.Popen(command(*arguments), env={**os.environ, **QUIET}, stderr=subprocess.PIPE, text=True)


def must(*arguments: object) -> str:
    """Run a command that has to work; returns its standard error.

    Raises:
        RuntimeError: it failed.
    """
    done = peagle(*arguments)
    if done.returncode != 0:
        raise RuntimeError(f"peagle {arguments[0]} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stderr


def when(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s"
        time.sleep(0.05)


def kill_9(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and the server that it started, without warning."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    for child in children:
        os.killpg(int(child), signal.SIGKILL)
    process.wait()


class Servers:
    """One server at a time, always at the same address."""

    def __init__(self, verifier: Path, work: Path) -> None:
        self.verifier, self.work = verifier, work
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._running: object = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = ["launch-vllm", str(self.verifier), "--hidden-states-path", str(self.work / "shared")]
        arguments += ["--", "--max-num-batched-tokens", "256", "--max-num-seqs", "8"]
        self._running = server(arguments, self.work / "server.log", self.port)
        self.process, _ = self._running.__enter__()

    def kill(self) -> None:
        assert self.process is not None
        kill_9(self.process)

    def stop(self) -> None:
        if self.process is not None:
            stop(self.process, 30.0)


def records(path: Path) -> list[dict]:
    """Lines of a .jsonl file, the last one only if it is whole."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
