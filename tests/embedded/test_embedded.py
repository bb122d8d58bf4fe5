"""What ships inside the package is there, small, licensed, and free of overlap between train and test."""

from __future__ import annotations

import json

import pytest

from peagle import embedded
from peagle.config import StageConfig
from peagle.errors import ConfigError


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_questions_come_with_answers_ids_and_their_licence():
    train, test = rows(embedded.TRAIN_QUESTIONS), rows(embedded.TEST_QUESTIONS)
    assert (len(train), len(test)) == (1000, 100)
    assert all(set(row) == {"id", "question", "answer"} and row["question"] and row["answer"] for row in train + test)
    assert not any("<<" in row["answer"] for row in train + test)
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert len({row["id"] for row in train + test}) == 1100
    assert "MIT" in (embedded.TRAIN_QUESTIONS.parent / "LICENSE").read_text()


def test_names_of_embedded_things_become_paths_in_every_config():
    class Asks(StageConfig):
        model: str
        data: tuple[str, ...]

    built = Asks.build({"model": "embedded:verifier", "data": ["embedded:train", "other.jsonl"]})
    assert built.model == str(embedded.VERIFIER)
    assert built.data == (str(embedded.TRAIN_QUESTIONS), "other.jsonl")


def test_a_label_before_an_embedded_name_stays():
    assert embedded.resolve("gsm8k=embedded:test") == f"gsm8k={embedded.TEST_QUESTIONS}"
    assert embedded.resolve("a=b.jsonl") == "a=b.jsonl"


def test_an_unknown_embedded_name_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match="embedded:verifier, embedded:train, embedded:test"):
        embedded.resolve("embedded:drafter")


def test_the_verifier_folder_is_small_and_complete():
    files = {path.name for path in embedded.VERIFIER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
    assert (embedded.VERIFIER / "model.safetensors").stat().st_size <= 12 * 1024**2


def test_a_shipped_path_is_told_by_the_name_that_commands_take():
    assert embedded.name_of(str(embedded.NAMES["embedded:verifier"])) == "embedded:verifier"
    assert embedded.name_of("/models/qwen") == "/models/qwen"
