"""A tiny verifier and prepared rows, made once."""

import json

import pytest

from peagle.data.config import PrepareConfig
from peagle.data.prepare import prepare
from tests import fakes


def write_rows(path, rows):
    """Ready-tokenized rows as `regenerate` writes them."""
    fields = ("input_ids", "loss_mask", "tail_length", "next_is_supervised", "source")
    lines = [json.dumps({"id": row.row_id, **{name: getattr(row, name) for name in fields}}) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def prepare_rows(folder, verifier, rows, seq_length=512):
    """A prepared folder with these rows, made by `peagle prepare`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    data = write_rows(folder.with_suffix(".jsonl"), rows)
    config = PrepareConfig(
        model=str(verifier), data=(str(data),), output=folder, seq_length=seq_length, num_preprocessing_workers=1
    )
    assert prepare(config) == 0
    return folder


@pytest.fixture(scope="session")
def verifier(tmp_path_factory):
    """A random Qwen3 of eight layers with a limit of 256 tokens."""
    folder = tmp_path_factory.mktemp("verifier")
    return fakes.tiny_verifier(folder, "qwen3", tie_word_embeddings=False, max_position_embeddings=256)


@pytest.fixture(scope="session")
def rows():
    """20 rows of 6 to 60 tokens."""
    return fakes.random_rows(20, 259, 0)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, verifier, rows):
    """They, prepared."""
    return prepare_rows(tmp_path_factory.mktemp("prepared") / "prepared", verifier, rows)
