"""Child processes: the stages of a run, and servers. None outlives its parent or works beside a second run."""

import contextlib
import ctypes
import fcntl
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from peagle.errors import MASK, ConfigError, EndpointError, PeagleError, masked

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LOCK_WAIT_S = 90.0
# Flags of servers whose values are not shown.
_SECRET_FLAGS = ("--api-key", "--hf-token")


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
    It inherits `lock` (`take_lock`), and this process's variables with those of `environment`.

    Returns:
        Its exit status (negative: a signal). Never 0 after a SIGTERM: whoever wants to stop does not want the next
        command.
    """
    process = subprocess.Popen(
        command, pass_fds=(lock,), env={**os.environ, **environment}, preexec_fn=end_with_parent()
    )
    with _signals_to(process) as passed_on:
        return process.wait() or (-signal.SIGTERM if passed_on else 0)


@dataclass(frozen=True)
class ServerCommand:
    """A command and the environment variables that it needs beyond the caller's."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        shown = list(self.arguments)
        for place, argument in enumerate(shown):
            name, sign, _ = argument.partition("=")
            if name in _SECRET_FLAGS and sign:
                shown[place] = f"{name}={MASK}"
            elif name in _SECRET_FLAGS and place + 1 < len(shown):
                shown[place + 1] = MASK
        return masked(" ".join([*variables, shlex.join(shown)]))

    def full_environment(self) -> dict[str, str]:
        """The caller's environment with these added."""
        return {**os.environ, **self.environment}


def start(command: ServerCommand, output: Any) -> subprocess.Popen[bytes]:
    """Start a server in a process group of its own, so that all its processes can be stopped together.

    `output` is a file for stdout and stderr; None leaves them on this process's.
    """
    try:
        return subprocess.Popen(
            command.arguments,
            env=command.full_environment(),
            start_new_session=True,
            preexec_fn=end_with_parent(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
        )
    except OSError as error:
        raise ConfigError(f"{command.arguments[0]}: cannot be run ({error.strerror})") from None


def stop(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """Ask a server to stop, with its whole process group; kill what has not gone after `wait_s`."""
    for signum, patience_s in ((signal.SIGTERM, wait_s), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signum)
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
            if not _group_lives(process.pid):
                return
            time.sleep(0.1)


def wait_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float) -> None:
    """Wait until a server answers its health check.

    Raises:
        EndpointError: it ended first, or time ran out.
    """
    started_s = time.monotonic()
    with httpx.Client(timeout=5.0, trust_env=False) as http:
        while True:
            status = process.poll()
            if status is not None:
                found = f"the server ended with status {status} before it was ready"
                raise EndpointError(f"{found}; its own lines above say why")
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{url}/health").status_code == 200:
                    return
            if time.monotonic() - started_s > timeout_s:
                found = f"the server was not ready within {timeout_s:g} s"
                raise EndpointError(f"{found}; raise --ready-timeout-s if it still loads")
            time.sleep(0.5)


def exec_server(command: ServerCommand) -> None:
    """Become the server: signals, output and exit status are then its own. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.arguments[0], list(command.arguments), command.full_environment())


def _group_lives(group: int) -> bool:
    try:
        with contextlib.suppress(PermissionError):
            os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


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
