"""Claims about the learning rate."""

from __future__ import annotations

import math

import pytest

from peagle.train.optimizer import Schedule, make


def test_the_worked_example_of_the_linear_schedule():
    schedule = Schedule("linear", 2, 6)
    assert [schedule.factor(step) for step in range(7)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]


def test_cosine_is_at_half_in_the_middle_and_at_zero_at_the_end():
    schedule = Schedule("cosine", 0, 100)
    assert schedule.factor(0) == 1
    assert schedule.factor(50) == pytest.approx(0.5)
    assert schedule.factor(100) == pytest.approx(0)
    assert schedule.factor(25) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_none_stays_at_its_peak_after_warm_up():
    schedule = make("none", 0.1, None, 40)
    assert [schedule.factor(step) for step in (0, 3, 4, 39)] == [0.25, 1, 1, 1]


@pytest.mark.parametrize(
    ("ratio", "steps", "expected"), [(0.01, None, 10), (0.01, 7, 7), (0.0, None, 0), (1.0, None, 1000)]
)
def test_R16_warm_up_is_a_share_of_the_steps_or_a_number_of_them(ratio, steps, expected):
    assert make("linear", ratio, steps, 1000).warmup_steps == expected


def test_warm_up_never_exceeds_the_run():
    assert make("linear", 0.0, 50, 10).warmup_steps == 10


def test_past_its_end_the_schedule_stays_at_the_floor():
    assert Schedule("linear", 0, 10).factor(25) == 0
