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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from peagle.errors import PeagleError
from peagle.files import whole_file

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
    has_said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > until_s:
                os.close(lock)
                raise PeagleError(f"{folder}: another `peagle run` is at work here; wait for it or stop it") from None
            if not has_said:
                logger.info("%s: waiting for an earlier run to end", folder)
                has_said = True
            time.sleep(0.5)


def run_process(command: Sequence[str], lock: int) -> int:
    """Run a command to its end, pass SIGTERM on to it, and leave Ctrl-C to it.

    Returns:
        Its exit status (negative: a signal). Never 0 after a SIGTERM: who asked to stop does not want the next command.
    """
    process = subprocess.Popen(command, pass_fds=(lock,), preexec_fn=_end_with_parent())
    with _signals_to(process) as has_stopped:
        return process.wait() or (-signal.SIGTERM if has_stopped else 0)


class Server:
    """A recipe's vLLM, started when first needed."""

    def __init__(self, verifier: str, output: Path, settings: dict[str, Any] | None) -> None:
        self._verifier, self._output, self._settings = verifier, output, settings
        self._process: subprocess.Popen | None = None

    def start(self) -> int:
        """Start it, unless it runs, and wait until it answers; 0, or the status it ended with."""
        if self._process is not None or self._settings is None:
            return 0
        settings = {"hidden_states_path": str(self._output / "hidden_states"), **self._settings}
        port = str(settings.pop("port", 8000))
        extra = [str(part) for part in settings.pop("extra_args", [])]
        settings_file = self._output / "settings" / "launch-vllm.yaml"
        with whole_file(settings_file) as temporary:
            temporary.write_text(
                yaml.safe_dump({"model": self._verifier, **settings}, sort_keys=False), encoding="utf-8"
            )
        command = [sys.executable, "-m", "peagle", "launch-vllm", "--config", str(settings_file), "--", "--port", port]
        self._process = subprocess.Popen([*command, *extra], start_new_session=True, preexec_fn=_end_with_parent())
        return self._wait_ready(f"http://localhost:{port}/health", float(settings.get("ready_timeout_s", 1800)))

    def stop(self) -> None:
        """Stop it, with all its processes."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _wait_ready(self, address: str, timeout_s: float) -> int:
        assert self._process is not None
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            status = self._process.poll()
            if status is not None:
                self._process = None
                return status or 1
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(address, timeout=5).status_code == 200:
                    return 0
            time.sleep(1.0)
        logger.error("%s: not ready after %.0f s", address, timeout_s)
        self.stop()
        return 1


def _end_with_parent() -> Callable[[], None] | None:
    """What a child runs first, so that it gets SIGTERM when this process dies, however it dies (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _signals_to(process: subprocess.Popen) -> Iterator[list[int]]:
    """Hand SIGTERM on to a child. Ctrl-C reaches it from the terminal, so here it is only not died of.

    Yields:
        The signals that were handed on so far.
    """
    handed: list[int] = []

    def hand_on(number: int, frame: object) -> None:
        handed.append(number)
        process.send_signal(number)

    old_term = signal.signal(signal.SIGTERM, hand_on)
    old_int = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield handed
    finally:
        signal.signal(signal.SIGTERM, old_term)
        signal.signal(signal.SIGINT, old_int)
