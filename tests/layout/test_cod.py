"""The COD layout against a slow oracle written from the definition, on random packed batches; who sees whom, against
an oracle written from the paper: each chain unrolled as if it were decoded alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.errors import LayoutError
from peagle.layout import full, sample, visible
from peagle.layout.supervision import supervised_run


@st.composite
def packs(draw):
    """(is_supervised, document_ids) of one to four documents and some padding."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    padding = draw(st.integers(0, 5))
    supervised = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    ids = [d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    flat = [value for part in supervised for value in part] + [False] * padding
    return torch.tensor(flat, dtype=torch.bool), torch.tensor(ids)


def eligible(supervised: torch.Tensor, ids: torch.Tensor, anchor: int, depth: int) -> bool:
    """Slot (anchor, depth) counts: pair slots anchor .. anchor+depth exist, are supervised and share a document."""
    last = anchor + depth
    return (
        last < len(ids)
        and ids[anchor] >= 0
        and all(supervised[i] and ids[i] == ids[anchor] for i in range(anchor, last + 1))
    )


def generators(ids: torch.Tensor, seed: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + d) for d in range(int(ids.max()) + 1)]


@given(packs(), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_full_layout_is_every_eligible_slot_in_order(pack, num_depths):
    supervised, ids = pack
    layout = full(supervised, ids, num_depths)
    expected = [(a, d) for a in range(len(ids)) for d in range(1, num_depths) if eligible(supervised, ids, a, d)]
    assert list(zip(layout.anchor_pos.tolist(), layout.depth.tolist())) == expected


@given(packs(), st.integers(1, 8), st.floats(0.3, 1.0), st.floats(0.0, 0.5), st.integers(0, 100))
@settings(max_examples=300, deadline=None)
def test_sampled_layout_is_nested_inside_documents_and_keeps_the_stated_counts(pack, num_depths, ratio, floor, seed):
    supervised, ids = pack
    layout = sample(
        is_supervised=supervised,
        document_ids=ids,
        num_depths=num_depths,
        down_sample_ratio=ratio,
        down_sample_ratio_min=floor,
        generators=generators(ids, seed),
    )
    slots = list(zip(layout.anchor_pos.tolist(), layout.depth.tolist()))
    assert slots == sorted(slots)
    assert len(set(slots)) == len(slots)
    chosen = set(slots)
    for anchor, depth in slots:
        assert anchor >= 0
        assert eligible(supervised, ids, anchor, depth)
        assert depth == 1 or (anchor, depth - 1) in chosen
    for document in range(int(ids.max()) + 1):
        inside = [a for a in range(len(ids)) if ids[a] == document]
        first = sum(eligible(supervised, ids, a, 1) for a in inside)
        kept = set(inside)
        for depth in range(1, num_depths):
            able = {a for a in kept if eligible(supervised, ids, a, depth)}
            now = {a for a in inside if (a, depth) in chosen}
            assert now <= able
            assert len(now) == min(len(able), math.floor(first * max(ratio**depth, floor)))
            kept = now


def test_worked_example_of_the_module_docstring():
    supervised = torch.tensor([0, 0, 1, 1, 1, 1, 0], dtype=torch.bool)
    ids = torch.zeros(7, dtype=torch.int64)
    assert supervised_run(supervised, ids).tolist() == [0, 0, 4, 3, 2, 1, 0]
    layout = sample(
        is_supervised=supervised,
        document_ids=ids,
        num_depths=4,
        down_sample_ratio=0.7,
        down_sample_ratio_min=0.0,
        generators=[torch.Generator().manual_seed(0)],
    )
    assert [(layout.depth == d).sum().item() for d in (1, 2, 3)] == [2, 1, 1]


def test_a_rows_layout_does_not_depend_on_its_neighbours():
    supervised = torch.ones(20, dtype=torch.bool)
    alone = sample(
        is_supervised=supervised,
        document_ids=torch.zeros(20, dtype=torch.int64),
        num_depths=4,
        down_sample_ratio=0.7,
        down_sample_ratio_min=0.2,
        generators=[torch.Generator().manual_seed(5)],
    )
    ids = torch.tensor([0] * 15 + [1] * 20)
    both = sample(
        is_supervised=torch.ones(35, dtype=torch.bool),
        document_ids=ids,
        num_depths=4,
        down_sample_ratio=0.7,
        down_sample_ratio_min=0.2,
        generators=[torch.Generator().manual_seed(9), torch.Generator().manual_seed(5)],
    )
    second = both.anchor_pos >= 15
    assert torch.equal(both.anchor_pos[second] - 15, alone.anchor_pos)
    assert torch.equal(both.depth[second], alone.depth)


def test_wrong_number_of_generators_is_refused():
    with pytest.raises(LayoutError, match="2 documents need as many generators"):
        sample(
            is_supervised=torch.ones(4, dtype=torch.bool),
            document_ids=torch.tensor([0, 0, 1, 1]),
            num_depths=4,
            down_sample_ratio=0.7,
            down_sample_ratio_min=0.2,
            generators=[torch.Generator()],
        )


# -------------------- who sees whom


def decoded_view(anchor: int, depth: int, ids: torch.Tensor) -> set[tuple[int, int]]:
    """What a server's drafter has in its cache when it drafts from `anchor` and stands at `depth`: the document's real
    pairs up to the anchor, then the mask slots drafted so far in this pass."""
    if ids[anchor] < 0:
        return set()
    pairs = {(p, 0) for p in range(anchor + 1) if ids[p] == ids[anchor]}
    return pairs | {(anchor, d) for d in range(1, depth + 1)}


@given(packs())
@settings(max_examples=150, deadline=None)
def test_visibility_is_what_a_drafter_would_have_cached(pack):
    supervised, ids = pack
    layout = full(supervised, ids, 4)
    slots = [(a, 0) for a in range(len(ids))] + list(zip(layout.anchor_pos.tolist(), layout.depth.tolist()))
    anchor = torch.tensor([a for a, _ in slots])
    depth = torch.tensor([d for _, d in slots])
    mask = visible(anchor, depth, anchor, depth, ids)
    for row, (a, d) in enumerate(slots):
        seen = {slots[i] for i in mask[row].nonzero()[:, 0].tolist()}
        assert seen == {s for s in decoded_view(a, d, ids) if s in set(slots)}


def test_anchors_outside_the_pack_are_refused():
    ids = torch.zeros(3, dtype=torch.int64)
    good, bad = torch.tensor([0]), torch.tensor([-1])
    with pytest.raises(LayoutError, match="anchors must lie in"):
        visible(bad, good, good, good, ids)
    with pytest.raises(LayoutError, match="depths must not be negative"):
        visible(good, bad, good, good, ids)
