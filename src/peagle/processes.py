"""The processes of a run: its stages and its server, none of which outlives it or works beside a second run."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from peagle.errors import PeagleError

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_STOP_WAIT_S = 60.0
_LOCK_WAIT_S = 90.0


def take_lock(folder: Path) -> int:
    """Become the only run at work in a folder.

    A stage inherits the lock: a run that was killed frees it when its last stage has ended.

    Returns:
        The lock's file descriptor; closing it frees the folder.

    Raises:
        PeagleError: another run holds it, and still does after a wait.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    until_s = time.monotonic() + _LOCK_WAIT_S
    is_announced = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > until_s:
                os.close(lock)
                raise PeagleError(f"{folder}: another `peagle run` is at work here; wait for it or stop it") from None
            if not is_announced:
                logger.info("%s: waiting for an earlier run to end", folder)
                is_announced = True
            time.sleep(0.5)


def run_process(command: Sequence[str], lock: int, environment: Mapping[str, str]) -> int:
    """Run a command to its end, pass SIGTERM on to it, and leave Ctrl-C to it.

    Args:
        command: the command line.
        lock: inherited by the process (`take_lock`).
        environment: variables added to this process's own.

    Returns:
        Its exit status (negative: a signal). Never 0 after a SIGTERM: whoever wants to stop does not want the next
        command.
    """
    process = subprocess.Popen(
        command, pass_fds=(lock,), env={**os.environ, **environment}, preexec_fn=end_with_parent()
    )
    with _signals_to(process) as passed_on:
        return process.wait() or (-signal.SIGTERM if passed_on else 0)


class Server:
    """A server process with children of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent())

    def wait_ready(self, address: str, timeout_s: float) -> int:
        """Wait until `address` answers; returns 0, or the status that the server ended with, which is then gone."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            status = self._process.poll()
            if status is not None:
                return status or 1
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(address, timeout=5).status_code == 200:
                    return 0
            time.sleep(1.0)
        logger.error("%s: not ready after %.0f s", address, timeout_s)
        return 1

    def stop(self) -> None:
        """Stop it, with all its processes."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def end_with_parent() -> Callable[[], None] | None:
    """What a child runs first, so that it gets SIGTERM when this process dies, however it dies (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _signals_to(process: subprocess.Popen) -> Iterator[list[int]]:
    """Pass SIGTERM on to a child. Ctrl-C is ignored here: the terminal sends it to the child too, which ends first.

    Yields:
        The signals that were passed on so far.
    """
    passed_on: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        passed_on.append(number)
        process.send_signal(number)

    old_term = signal.signal(signal.SIGTERM, pass_on)
    old_int = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield passed_on
    finally:
        signal.signal(signal.SIGTERM, old_term)
        signal.signal(signal.SIGINT, old_int)
