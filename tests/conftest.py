"""What every test gets: logging as it was, whatever command an earlier test ran in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from peagle import errors


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("peagle")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.propagate = before[1]
    logger.handlers[:] = before[2]


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests() -> Iterator[None]:
    yield
    errors._secrets.clear()
