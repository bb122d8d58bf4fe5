"""vLLM for tests and benchmarks: engines in forked children, and servers, with one thread per process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peagle.processes import ServerCommand, start, stop, wait_ready
from peagle.vllm.launch import plugin_environment

QUIET = {
    # Two cores: with more threads per process the CPU kernels starve each other.
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # without it `--distributed-executor-backend uni` becomes `mp` on CPU
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SMALL = ("--enforce-eager", "--distributed-executor-backend", "uni")
"""Server arguments that every test server gets, those of several ranks or engines excepted."""
SEVERAL = {
    **QUIET,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each rank wants a NUMA node of its own
    "VLLM_LOGGING_LEVEL": "INFO",  # says which of them writes
}
"""For servers of several ranks or engines."""


class Engines:
    """The other side of `zygote`.

    Args:
        log: receives vLLM's output.
    """

    def __init__(self, log: Path) -> None:
        self._log = open(log, "ab")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "zygote.py")],
            env={**os.environ, **plugin_environment(), **QUIET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self.log = log
        self._answer()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job to its end.

        Raises:
            RuntimeError: it failed; the log says why.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(f"{answer['error']} (see {self.log})")
        return answer

    def states(
        self, model: Path, rows: Sequence[list[int]], aux: Sequence[int], folder: Path, arguments: Sequence[str]
    ) -> dict[str, Any]:
        """Float32 hidden states: "I.aux" and "I.last" of row I."""
        from safetensors.torch import load_file

        folder.mkdir(parents=True, exist_ok=True)
        job = {
            "kind": "states",
            "model": str(model),
            "rows": list(rows),
            "aux": list(aux),
            "dtype": "float32",
            "folder": str(folder),
            "output": str(folder / "states.safetensors"),
            "arguments": [*SMALL, *arguments],
        }
        answer = self.run(job)
        if answer["refused"]:
            raise RuntimeError(f"refused: {answer['refused']}")
        return {"tensors": load_file(job["output"]), **answer}

    def generate(
        self,
        model: Path,
        speculative: dict[str, Any] | None,
        tasks: Sequence[dict[str, Any]],
        record_drafts: bool,
        repair_sampling: bool = False,
    ) -> list[dict[str, Any]]:
        """Float32 answers of one engine to several tasks.

        Args:
            repair_sampling: work around a fault of vLLM's CPU kernels (`zygote.repair_cpu_sampling`); greedy answers
                are not touched by it.
        """
        job = {
            "kind": "generate",
            "model": str(model),
            "speculative": speculative,
            "dtype": "float32",
            "arguments": {},
            "tasks": list(tasks),
            "record_drafts": record_drafts,
            "repair_sampling": repair_sampling,
        }
        return list(self.run(job)["tasks"])

    def close(self) -> None:
        """Stop."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._process.kill()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "vLLM could not be imported, or its process died"}


def speculative(checkpoint: Path, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's settings for a P-EAGLE checkpoint."""
    return {
        "model": str(checkpoint),
        "method": "eagle3",
        "parallel_drafting": True,
        "num_speculative_tokens": num_speculative_tokens,
    }


def greedy_task(prompts: Sequence[list[int]], max_tokens: int, eos_ids: Sequence[int], one: bool) -> dict[str, Any]:
    """Greedy answers, one at a time or eight at a time."""
    return {
        "prompts": list(prompts),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "eos_ids": list(eos_ids),
        "one_at_a_time": one,
        "seed": 0,
    }


@contextlib.contextmanager
def server(
    arguments: Sequence[str], log: Path, port: int | None = None, several: bool = False
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `python -m peagle ARGUMENTS -- --port PORT ...` (launch-vllm or serve) until the block ends.

    Args:
        arguments: vLLM's own behind a "--".
        log: receives the server's output.
        port: None picks one.
        several: whether the server has several ranks or engines.

    Yields:
        The process and the address.
    """
    port = port or free_port()
    command = [sys.executable, "-m", "peagle", *arguments]
    if "--" not in command:
        command.append("--")
    command += ["--port", str(port), "--dtype", "float32", *(SMALL[:1] if several else SMALL)]
    url = f"http://127.0.0.1:{port}"
    with open(log, "ab") as output:
        process = start(ServerCommand(tuple(command), SEVERAL if several else QUIET), output)
        try:
            wait_ready(process, url, 900.0)
            yield process, url
        finally:
            stop(process, 30.0)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
