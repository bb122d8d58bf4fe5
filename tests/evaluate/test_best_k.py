from __future__ import annotations

import pytest

from peagle.evaluate.best_k import PassCost, best, expected_speedups


def test_the_docstring_example_holds():
    found = expected_speedups((0.8, 0.5), PassCost(10.0, 2.0, 11.0, 2), is_sequential=False)
    assert [e.k for e in found] == [1, 2]
    assert found[0].acceptance_length == pytest.approx(1.8)
    assert found[0].speedup == pytest.approx(1.44)
    assert found[1].speedup == pytest.approx(2.3 * 10 / 13)


def test_a_verifier_that_gets_dear_with_length_makes_a_short_draft_the_best():
    cheap = expected_speedups((0.8, 0.5, 0.3, 0.1), PassCost(10.0, 1.0, 10.5, 4), is_sequential=False)
    dear = expected_speedups((0.8, 0.5, 0.3, 0.1), PassCost(10.0, 1.0, 40.0, 4), is_sequential=False)
    assert best(cheap).k == 4
    assert best(dear).k == 1


def test_sequential_drafting_costs_more_with_each_token():
    at_once = expected_speedups((0.8, 0.5), PassCost(10.0, 4.0, 11.0, 2), is_sequential=False)
    in_turn = expected_speedups((0.8, 0.5), PassCost(10.0, 4.0, 11.0, 2), is_sequential=True)
    assert in_turn[0].speedup > at_once[0].speedup
    assert in_turn[1].speedup == pytest.approx(at_once[1].speedup)


def test_nothing_measured_has_no_best():
    assert best([]) is None
