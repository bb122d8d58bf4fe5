"""Tiles against the definition written out, gradients included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from peagle.kernels import tiles
from peagle.layout import sample
from peagle.layout.visibility import visible
from peagle.train.attention import reference


def drawn(num: int, heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, heads, 8, generator=generator, dtype=torch.float64).requires_grad_()


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30], ids=["formed again", "kept"])
@pytest.mark.parametrize("part_keys", [2, 4096])
@pytest.mark.parametrize("tile_rows", [1, 3, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
def test_causal_tiles_equal_the_definition(
    tile_rows: int, keep_bytes: int, part_keys: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "KEEP_BYTES", keep_bytes)
    monkeypatch.setattr(tiles, "PART_KEYS", part_keys)
    monkeypatch.setattr(tiles, "TILE_ROWS", tile_rows)
    bounds = [(0, 7), (7, 8), (8, 20)]
    q, k, v = drawn(20, heads[0], 1), drawn(20, heads[1], 2), drawn(20, heads[1], 3)
    found = tiles.attend(q, (k, v), None, tiles.causal_tiles(bounds, q), None)
    wanted = torch.cat([reference(q[a:b], k[a:b], v[a:b], None) for a, b in bounds])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, [q, k, v]), gradients(wanted, [q, k, v]))


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30], ids=["formed again", "kept"])
@pytest.mark.parametrize("part_keys", [2, 4096])
def test_slots_see_their_context_and_their_chain(
    keep_bytes: int, part_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "KEEP_BYTES", keep_bytes)
    monkeypatch.setattr(tiles, "PART_KEYS", part_keys)
    num_pairs, document = 24, torch.zeros(24, dtype=torch.int64)
    layout = sample(torch.ones(num_pairs, dtype=torch.bool), document, 5, 0.8, 0.2, [torch.Generator().manual_seed(4)])
    slots = layout.num_slots
    q, own_k, own_v = drawn(slots, 4, 5), drawn(slots, 2, 6), drawn(slots, 2, 7)
    context_k, context_v = drawn(num_pairs, 2, 8), drawn(num_pairs, 2, 9)
    starts = (layout.depth == 1).nonzero()[:, 0].tolist()
    cuts = [0, starts[len(starts) // 3], starts[-2], slots]
    cut = []
    for begin, end in pairwise(cuts):
        anchor, depth = layout.anchor_pos[begin:end], layout.depth[begin:end]
        last = int(anchor[-1]) + 1
        after = torch.arange(int(anchor[0]) + 1, last)
        keys = torch.cat([after, anchor]), torch.cat([torch.zeros_like(after), depth])
        seen = visible(anchor, depth, *keys, document)
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))
        cut.append(tiles.Tile(slice(begin, end), slice(0, last), mask))
    found = tiles.attend(q, (context_k, context_v), (own_k, own_v), cut, None)

    pairs = torch.arange(num_pairs)
    keys = torch.cat([pairs, layout.anchor_pos]), torch.cat([torch.zeros_like(pairs), layout.depth])
    seen = visible(layout.anchor_pos, layout.depth, *keys, document)
    wanted = reference(q, torch.cat([context_k, own_k]), torch.cat([context_v, own_v]), seen)
    torch.testing.assert_close(found, wanted)
    leaves = [q, context_k, context_v, own_k, own_v]
    wanted_grads = gradients(wanted, leaves)
    torch.testing.assert_close(gradients(found, leaves), wanted_grads)

    sinks = torch.ones_like(context_k), torch.zeros_like(context_v)
    sunk = tiles.attend(q, (context_k.detach(), context_v.detach()), (own_k, own_v), cut, sinks)
    torch.testing.assert_close(gradients(sunk, [q, own_k, own_v]), [wanted_grads[0], *wanted_grads[3:]])
    torch.testing.assert_close(list(sinks), [1 + wanted_grads[1], wanted_grads[2]])


def test_tiles_equal_pytorchs_own_attention_in_float32() -> None:
    q, k, v = (drawn(300, heads, seed).detach().float() for heads, seed in ((4, 1), (2, 2), (2, 3)))
    found = tiles.attend(q, (k, v), None, tiles.causal_tiles([(0, 300)], q), None)
    parts = [x.transpose(0, 1)[None] for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, wanted[0].transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-6)


def test_only_cpu_tensors_of_full_precision_are_tiled() -> None:
    assert tiles.fits(torch.zeros(1))
    assert tiles.fits(torch.zeros(1, dtype=torch.float64))
    assert not tiles.fits(torch.zeros(1, dtype=torch.bfloat16))
    assert not tiles.fits(torch.zeros(1, device="meta"))
