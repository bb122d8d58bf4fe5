"""Rows over several processes."""

from __future__ import annotations

import os
import signal

import pytest

from peagle.data.workers import ordered_map
from peagle.errors import DataError, TemplateError


def double(number: int) -> int:
    return 2 * number


def killed(number: int) -> int:
    if number == 70:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def refused(number: int) -> int:
    raise TemplateError("no template")


@pytest.mark.parametrize("workers", [None, 1, 2, 3])
@pytest.mark.parametrize("number", [0, 1, 31, 33, 300])
def test_results_come_in_order(workers, number):
    assert list(ordered_map(double, iter(range(number)), workers)) == [2 * i for i in range(number)]


def test_few_rows_start_no_process():
    assert set(ordered_map(lambda _: os.getpid(), range(100), None)) == {os.getpid()}


def test_input_is_read_a_bounded_number_ahead():
    taken = []

    def rows():
        for number in range(5000):
            taken.append(number)
            yield number

    results = ordered_map(double, rows(), 2)
    next(results)
    assert len(taken) < 500
    results.close()


def test_a_killed_process_is_said_and_does_not_hang():
    with pytest.raises(DataError, match="a worker process was killed"):
        list(ordered_map(killed, range(200), 2))


def test_a_mistake_found_in_a_process_keeps_its_message():
    with pytest.raises(TemplateError, match="no template"):
        list(ordered_map(refused, range(200), 2))
