"""Model folders that the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.toys import CHATML, model_folder, toy_tokenizer


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ChatML model folder."""
    return model_folder(tmp_path_factory.mktemp("models") / "chatml", toy_tokenizer(CHATML))


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a model folder of a template; further arguments go to `toy_tokenizer`."""

    def make(template: str | None, vocab_size: int | None = None, **how: Any) -> Path:
        return model_folder(tmp_path_factory.mktemp("models") / "model", toy_tokenizer(template, **how), vocab_size)

    return make
