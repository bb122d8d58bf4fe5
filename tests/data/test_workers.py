"""Rows over several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peagle.data.prepare import ordered_map
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


def test_no_more_processes_are_started_than_there_is_work_for():
    assert set(ordered_map(lambda _: os.getpid(), range(20), 500)) == {os.getpid()}
    assert len(set(ordered_map(lambda _: os.getpid(), range(70), 500))) <= 3


def test_workers_end_when_their_parent_is_killed():
    # One os.write a line: an unbuffered print writes text and line end apart, and two processes' lines then mix.
    code = (
        "import os, time\nfrom peagle.data.prepare import ordered_map\n"
        "def work(n):\n    os.write(1, b'%d\\n' % os.getpid())\n    time.sleep(0.01)\n    return n\n"
        "for _ in ordered_map(work, iter(range(10**6)), 2): pass\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workers = set()
    while len(workers) < 2:
        workers.add(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}/stat") and not is_dead(pid) for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.1)


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
