"""The demo's drafter with half its training, on hidden states that vLLM handed out: the commands, one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.vllm_engines import QUIET, SMALL

NUM_DEPTHS, ANSWER_LIMIT = 4, 200


def make_drafter(verifier: Path, work: Path, questions: int, steps: int) -> Path:
    """Answers, rows, states from vLLM in this machine's memory, training.

    Returns:
        The checkpoint.

    Raises:
        RuntimeError: a command failed.
    """
    answers, rows, states, checkpoints = work / "answers.jsonl", work / "rows", work / "states", work / "checkpoints"
    peagle("regenerate", "--model", verifier, "--data", "gsm8k=embedded:train", "--output", answers,
           "--max-samples", questions, "--max-new-tokens", ANSWER_LIMIT, "--dtype", "float32")  # fmt: skip
    peagle("prepare", "--model", verifier, "--data", answers, "--output", rows, "--seq-length", 1024)
    peagle("extract", "--preprocessed-data", rows, "--backend", "vllm", "--output", states, "--dtype", "float32",
           "--validate-outputs", "--", *SMALL)  # fmt: skip
    peagle("train", "--verifier-name-or-path", verifier, "--data-path", rows, "--hidden-states-path", states,
           "--save-path", checkpoints, "--num-layers", 2, "--num-depths", NUM_DEPTHS, "--total-seq-len", 1024,
           "--epochs", 100, "--max-steps", steps, "--optimizer", "muon", "--lr", "1.6e-3",
           "--scheduler-type", "cosine", "--depth-loss-decay", 1, "--train-data-ratio", 0.98,
           "--checkpoint-freq", steps, "--save-dtype", "float32")  # fmt: skip
    return checkpoints / "checkpoint_best"


def peagle(*arguments: object) -> None:
    """Run a command that has to work; what it says goes to stderr, so that stdout stays the caller's."""
    command = [sys.executable, "-m", "peagle", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **QUIET}, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"peagle {arguments[0]} ended with status {done.returncode}")
