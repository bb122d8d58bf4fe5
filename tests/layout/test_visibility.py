"""Who sees whom, against an oracle written from the paper: unroll each chain as if it were decoded alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from peagle.errors import LayoutError
from peagle.layout import full, visible
from tests.layout.test_cod import packs


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
