"""The supervision rule against an oracle written slot by slot from its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.errors import LayoutError
from peagle.layout.supervision import Extent, extent, label_positions, supervised_run
from tests.layout.test_cod import eligible, packs


@st.composite
def rows(draw):
    """(loss mask, next_is_supervised, tail_length): replies anywhere; a tail only behind a row that ends in a reply."""
    mask = draw(st.lists(st.integers(0, 1), min_size=2, max_size=24))
    if draw(st.booleans()):
        tail_length = draw(st.integers(1, 6))
        return mask + [1] + [0] * tail_length, False, tail_length
    return mask, draw(st.booleans()), 0


def counts(mask: list[int], next_is_supervised: bool, anchor: int, depth: int) -> bool:
    """Slot (anchor, depth): its target's state y_{a+d+1} exists, and x_{a+1} .. x_{a+d+2} are one reply's tokens."""
    assistant = [bool(value) for value in mask] + [next_is_supervised]
    return anchor + depth + 1 < len(mask) and all(assistant[anchor + 1 : anchor + depth + 3])


@given(rows())
@settings(max_examples=300, deadline=None)
def test_slots_count_as_the_definition_says(row):
    mask, next_is_supervised, _ = row
    num_pairs = len(mask) - 1
    supervised = torch.zeros(num_pairs, dtype=torch.bool)
    for position in label_positions(mask, next_is_supervised, 0):
        supervised[position - 1] = True
    run = supervised_run(supervised, torch.zeros(num_pairs, dtype=torch.int64)).tolist()
    for anchor in range(num_pairs):
        for depth in range(num_pairs - anchor + 1):
            assert (run[anchor] > depth) == counts(mask, next_is_supervised, anchor, depth)


@given(rows())
@settings(max_examples=300, deadline=None)
def test_a_replay_tail_adds_the_labels_of_its_own_tokens_and_nothing_supervised(row):
    mask, next_is_supervised, tail_length = row
    supervised = label_positions(mask, next_is_supervised, 0)
    labels = label_positions(mask, next_is_supervised, tail_length)
    num_answer = len(mask) - tail_length
    # From the answer's last token (position 0 has no label) to the last but one, whose next token is the last.
    added = list(range(max(num_answer - 1, 1), len(mask) - 1)) if tail_length else []
    assert labels == supervised + added


@given(rows())
@settings(max_examples=300, deadline=None)
def test_what_lies_past_the_extent_changes_no_supervised_slot(row):
    mask, next_is_supervised, _ = row
    used = extent(mask, next_is_supervised)
    assert used.num_supervised == len(label_positions(mask, next_is_supervised, 0))
    if used.num_supervised:
        cut = label_positions(mask[: used.num_tokens], True, 0)
        assert cut == label_positions(mask, next_is_supervised, 0)
        assert cut[-1] == used.num_tokens - 1
    else:
        assert used == Extent(0, 0)


@given(packs())
@settings(max_examples=200, deadline=None)
def test_run_counts_supervised_pair_slots_without_a_gap(pack):
    supervised, ids = pack
    run = supervised_run(supervised, ids).tolist()
    for anchor in range(len(ids)):
        expected = 0
        while eligible(supervised, ids, anchor, expected):
            expected += 1
        assert run[anchor] == expected


def test_worked_example_of_the_module_docstring():
    mask = [0, 0, 1, 1, 1, 1, 0, 0]
    assert label_positions(mask, False, 0) == [2, 3, 4]
    assert extent(mask, False) == Extent(5, 3)
    supervised = torch.tensor([0, 1, 1, 1, 0, 0, 0], dtype=torch.bool)
    assert supervised_run(supervised, torch.zeros(7, dtype=torch.int64)).tolist() == [0, 3, 2, 1, 0, 0, 0]


def test_shapes_that_differ_are_refused():
    with pytest.raises(LayoutError, match="shapes differ"):
        supervised_run(torch.ones(3, dtype=torch.bool), torch.zeros(4, dtype=torch.int64))
