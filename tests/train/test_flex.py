"""FlexAttention's block mask, built in closed form, against the definition; and the step that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from benchmarks.parity import WHOLE, compare
from peagle.layout import full, sample, visible
from peagle.train import flex
from peagle.train.attention import MaskSlots, rollout_attention

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures").glob("peagle_*.safetensors"))


def tiles(dense: torch.Tensor, reduce, blocks: torch.Tensor) -> torch.Tensor:
    """What each tile of a mask, padded to as many tiles as `blocks` has, holds; padding counts as not seen."""
    rows, columns = (count * flex.BLOCK - size for count, size in zip(blocks.shape, dense.shape))
    padded = F.pad(dense, (0, columns, 0, rows)).unflatten(0, (-1, flex.BLOCK)).unflatten(2, (-1, flex.BLOCK))
    return reduce(reduce(padded, 3), 1)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(2, 6),
    st.floats(0.3, 1.0),
    st.integers(0, 99),
    st.floats(0.1, 1.0),
)
@settings(max_examples=100, deadline=None)
def test_closed_form_blocks_are_those_of_the_dense_mask(lengths, num_depths, ratio, seed, share):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", 16)  # many blocks in a small mask
        check_blocks(lengths, num_depths, ratio, seed, share)


def check_blocks(lengths, num_depths, ratio, seed, share):
    ids = torch.tensor([d for d, n in enumerate(lengths) for _ in range(n)])
    supervised = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed)) < share**0.2
    generators = [torch.Generator().manual_seed(seed + d) for d in range(len(lengths))]
    layout = sample(supervised, ids, num_depths, ratio, 0.0, generators)
    starts = torch.tensor([sum(lengths[:d]) for d in range(len(lengths))])
    # Any part of a layout between two chains is a block of the step; take the second half of the chains.
    chains = (layout.depth == 1).nonzero()[:, 0]
    for begin in {0, int(chains[len(chains) // 2]) if len(chains) else 0}:
        anchor, depth = layout.anchor_pos[begin:], layout.depth[begin:]
        if not anchor.numel():
            continue
        doc_start = starts[ids[anchor]]
        seen = MaskSlots(
            anchor=anchor, depth=depth, doc_start=doc_start, first=int(doc_start[0]), last=int(anchor[-1]) + 1
        )
        pairs = torch.arange(seen.first, seen.last)
        defined = visible(anchor, depth, torch.cat([pairs, anchor]), torch.cat([torch.zeros_like(pairs), depth]), ids)
        assert torch.equal(seen.dense, defined)
        some, everything = flex.key_blocks(anchor, depth, doc_start, seen.first, seen.last - seen.first)
        assert torch.equal(everything & ~tiles(seen.padded, torch.all, some), torch.zeros_like(everything))
        missed = tiles(seen.padded, torch.any, some) & ~(some | everything)
        assert not missed.any()
        assert not (some & everything).any()


def test_a_long_document_is_mostly_whole_blocks():
    """Whole blocks are what makes the kernel fast: all but the rim of the triangle must be found."""
    ids = torch.zeros(2048, dtype=torch.int64)
    layout = full(torch.ones(2048, dtype=torch.bool), ids, 2)
    start = torch.zeros_like(layout.anchor_pos)
    some, everything = flex.key_blocks(layout.anchor_pos, layout.depth, start, 0, 2047)
    assert everything.sum() >= 15 * 16 // 2 - 15
    assert some.sum() <= 4 * 16


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_flex_equals_sdpa_forward_and_backward(kv_heads):
    torch.manual_seed(0)
    ids = torch.tensor([0] * 90 + [1] * 110)
    layout = full(torch.ones(200, dtype=torch.bool), ids, 3)
    doc_start = torch.tensor([0, 90])[ids[layout.anchor_pos]]
    seen = MaskSlots(
        anchor=layout.anchor_pos,
        depth=layout.depth,
        doc_start=doc_start,
        first=0,
        last=int(layout.anchor_pos[-1]) + 1,
        flex=flex.plan_blocks(layout.anchor_pos, layout.depth, doc_start, 0, int(layout.anchor_pos[-1]) + 1),
    )
    shapes = [(layout.num_slots, 4, 16), *[(seen.last, kv_heads, 16)] * 2, *[(layout.num_slots, kv_heads, 16)] * 2]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weight = torch.randn(layout.num_slots, 64, dtype=torch.float64)
    found = {}
    for name in ("sdpa", "flex", "reference"):
        q, base_k, base_v, own_k, own_v = tensors
        out = rollout_attention(name, q, (base_k, base_v), (own_k, own_v), seen)
        found[name] = [out, *torch.autograd.grad((out * weight).sum(), tensors)]
    for name in ("flex", "reference"):
        for ours, theirs in zip(found[name], found["sdpa"]):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def mask_slots(lengths: tuple[int, ...], begin: int, num_slots: int | None, seed: int) -> MaskSlots:
    """`num_slots` (None: all) of a drawn layout over documents of these lengths, from anchor `begin`'s chain on."""
    ids = torch.tensor([d for d, n in enumerate(lengths) for _ in range(n)])
    generators = [torch.Generator().manual_seed(seed + d) for d in range(len(lengths))]
    layout = sample(torch.ones(len(ids), dtype=torch.bool), ids, 3, 0.7, 0.2, generators)
    starts = torch.tensor([sum(lengths[:d]) for d in range(len(lengths))])
    from_begin = layout.anchor_pos >= begin
    anchor, depth = layout.anchor_pos[from_begin][:num_slots], layout.depth[from_begin][:num_slots]
    doc_start = starts[ids[anchor]]
    first, last = int(doc_start[0]), int(anchor[-1]) + 1
    return MaskSlots(anchor=anchor, depth=depth, doc_start=doc_start, first=first, last=last)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 2), (4, 4), (7, 1)])
def test_R07_four_graphs_serve_every_length_with_and_without_gradients(heads, kv_heads, monkeypatch):
    """The graphs that a GPU would compile, traced here and run as they are: COD gives every batch a length of its own.

    Blocks of less than 128 slots are among them, which Inductor cannot lower unpadded (pytorch#185349), and those of
    one block, whose size dynamic shapes take for a constant.
    """
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch._dynamo.reset()
    solve = flex.compiled(count)
    blocks = [(300, 0, 33), (40, 40, 20), (200, 0, None), (131, 0, 1), (260, 200, 90), (97, 97, 60), (310, 0, 130)]
    for length, begin, num_slots in blocks:
        slots = mask_slots((length, 77), begin, num_slots, length)
        position = torch.arange(length)
        base = flex.plan_blocks(position, None, torch.zeros_like(position), 0, length).mask
        causal = position[None] <= position[:, None]
        for with_grad in (True, False):
            for mask, dense in (
                (base, causal),
                (
                    flex.plan_blocks(
                        slots.anchor, slots.depth, slots.doc_start, slots.first, slots.last - slots.first
                    ).mask,
                    slots.padded,
                ),
            ):
                shapes = [(heads, dense.shape[0]), (kv_heads, dense.shape[1]), (kv_heads, dense.shape[1])]
                q, k, v = (torch.randn(1, h, rows, 16, requires_grad=with_grad) for h, rows in shapes)
                with torch.set_grad_enabled(with_grad):
                    found = flex.padded_call(solve, q, k, v, mask)
                wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=heads != kv_heads)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 4


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
@pytest.mark.parametrize("block", [60, WHOLE])
def test_step_with_flex_equals_speculators(path, block):
    found = compare(path, "flex", block, 64, False)
    assert found["loss_error"] <= 1e-5
    assert found["gradient_error"] <= 1e-4
