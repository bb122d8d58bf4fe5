"""A tiny verifier, prepared rows and their states on disk, as `peagle train` finds them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.data.config import PrepareConfig
from peagle.data.prepare import prepare
from peagle.hidden_states.config import ExtractConfig
from peagle.hidden_states.extract import extract
from peagle.train.config import TrainConfig
from tests.fakes import tiny_verifier


@dataclass(frozen=True)
class Files:
    """Where things are."""

    verifier: Path
    data: Path
    states: Path

    def config(self, save_path: Path, **values: Any) -> TrainConfig:
        """Settings of a short run on them."""
        plain = {
            "verifier_name_or_path": str(self.verifier),
            "data_path": self.data,
            "hidden_states_path": self.states,
            "save_path": save_path,
            "num_layers": 1,
            "num_depths": 3,
            "epochs": 1,
            "total_seq_len": 256,
            "lr": 1e-3,
            "device": "cpu",
            "train_data_ratio": 0.8,
        }
        return TrainConfig.build({**plain, **values})


def conversations(path: Path, count: int, seed: int = 0) -> Path:
    """A file of one-turn conversations."""
    rng = random.Random(seed)
    words = [
        "the",
        "sum",
        "of",
        "two",
        "and",
        "three",
        "is",
        "five",
        "so",
        "we",
        "add",
        "them",
        "up",
        "and",
        "get",
        "a",
        "number",
    ]
    with open(path, "w") as handle:
        for i in range(count):
            question = " ".join(rng.choices(words, k=4)) + f" {i}?"
            answer = " ".join(rng.choices(words, k=rng.randint(5, 14)))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            handle.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_files(folder: Path, count: int = 24, seq_length: int = 128, **verifier: Any) -> Files:
    """Prepare and extract `count` conversations for a random verifier."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(tiny_verifier(folder / "verifier", **verifier), folder / "data", folder / "states")
    prepare(
        PrepareConfig.build(
            {
                "model": str(files.verifier),
                "data": (str(conversations(folder / "conversations.jsonl", count)),),
                "output": files.data,
                "seq_length": seq_length,
                "num_preprocessing_workers": 1,
            }
        )
    )
    extract(ExtractConfig.build({"preprocessed_data": files.data, "output": files.states, "device": "cpu"}))
    return files
