"""Kernels against their definitions in float64, and against themselves on more threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels import cpu
from peagle.kernels import cpu as kernels
from peagle.kernels.cpu import Tile, attend, causal_tiles, reference_attend
from peagle.layout import sample, visible

CPU = torch.device("cpu")
PROBLEM = kernels.native_attention_problem(CPU, torch.float32, 64)
needs_native = pytest.mark.skipif(PROBLEM is not None, reason=f"no native kernels: {PROBLEM}")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


# -------------------- what is there


def test_kernels_are_there_where_they_can_be() -> None:
    """The other tests skip without them, which must not hide that they were not built."""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if shutil.which("cc") and has_vectors and os.environ.get("PEAGLE_NATIVE") != "0":
        assert PROBLEM is None


@pytest.mark.parametrize("variable", ["PEAGLE_NATIVE=0", "ATEN_CPU_CAPABILITY=default"])
def test_a_variable_switches_them_off(variable: str) -> None:
    code = """
import torch
from peagle.kernels import cpu as kernels
print(kernels.native_attention_problem(torch.device("cpu"), torch.float32, 64))
print(*kernels.softmax_(torch.zeros(1, 4)))
"""
    environment = {**os.environ, **dict([variable.split("=")])}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "PEAGLE_NATIVE=0 is set" in found.stdout
    assert "0.2500" in found.stdout


def test_native_attention_refuses_by_name_what_it_cannot_do() -> None:
    problem = kernels.native_attention_problem
    assert problem(CPU, torch.float64, 64) == "computes in float32, not in float64"
    assert problem(CPU, torch.float32, 96) == "heads of 96 are not a multiple of 64"
    assert problem(torch.device("meta"), torch.float32, 64) == "runs on a CPU, not on meta"
    q = drawn(4, 1, 8)
    with pytest.raises(AssertionError, match="settle"):
        attend(q, (q, q), None, causal_tiles([(0, 4)]), None)


# -------------------- attention


def test_the_definition_is_pytorchs_attention() -> None:
    q, k, v, own_k, own_v = (drawn(n, h, 8, seed=n + h).double() for n, h in [(9, 4), (7, 2), (7, 2), (9, 2), (9, 2)])
    seen = torch.rand(9, 7 + 9, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[:, :3] = True  # no mask there
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, torch.cat([k, own_k]), torch.cat([v, own_v]))),
        attn_mask=seen,
        enable_gqa=True,
    )
    mask = torch.zeros(9, 13).masked_fill(~seen[:, 3:], float("-inf"))
    found = reference_attend(q, (k, v), (own_k, own_v), [Tile(slice(0, 9), slice(0, 7), mask)])
    torch.testing.assert_close(found, wanted[0].transpose(0, 1).flatten(1))
    causal = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, own_k, own_v)), is_causal=True, enable_gqa=True
    )
    found = reference_attend(q, (own_k, own_v), None, causal_tiles([(0, 9)]))
    torch.testing.assert_close(found, causal[0].transpose(0, 1).flatten(1))


def check_attention(leaves: list[Tensor], tiles: list[Tile], equal: bool = False, atol: float = 2e-6) -> None:
    """float32 leaves (q, k, v, own k, own v) against the definition in float64."""
    made = [x.detach().requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = attend(made[0], (made[1], made[2]), (made[3], made[4]) if len(made) > 3 else None, tiles, None)
    wanted = reference_attend(exact[0], (exact[1], exact[2]), (exact[3], exact[4]) if len(made) > 3 else None, tiles)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=atol)
    grads, wanted_grads = gradients(found, made), gradients(wanted, exact)
    if equal:  # one query gets what its equals should: their sums are right
        grads[0], wanted_grads[0] = (equals_summed(one, tiles) for one in (grads[0], wanted_grads[0]))
    size = max(float(one.abs().max()) for one in wanted_grads)
    for ours, theirs in zip(grads, wanted_grads):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=2e-6 * size)


def equals_summed(grad: Tensor, tiles: list[Tile]) -> Tensor:
    found = []
    for tile in tiles:
        assert tile.distinct_id is not None
        sums = grad.new_zeros(tile.num_distinct, *grad.shape[1:])
        found.append(sums.index_add_(0, tile.distinct_id.long(), grad[tile.own]))
    return torch.cat(found)


@needs_native
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (4, 2, 64), (3, 1, 128)])
@pytest.mark.parametrize("bounds", [[(0, 1)], [(0, 37)], [(0, 300), (300, 301), (301, 700)]], ids=str)
@pytest.mark.usefixtures("threads")
def test_causal_attention_and_its_gradients(
    heads: int, kv_heads: int, head_dim: int, bounds: list[tuple[int, int]]
) -> None:
    num = bounds[-1][1]
    q, k, v = (drawn(num, count, head_dim, seed=seed) for seed, count in enumerate((heads, kv_heads, kv_heads)))
    check_attention([q, k, v], causal_tiles(bounds))


def chain_tiles(num_queries: int, num_keys: int, tile_rows: int, with_equal: bool, reach: int = 10**6) -> list[Tile]:
    """Queries that see the context up to some key, and of their neighbours a random part, themselves included.

    Args:
        reach: how far a neighbour may be; with less than a tile, whole panels of keys are hidden from many rows.
    """
    made = torch.Generator().manual_seed(3)
    tiles = []
    for begin in range(0, num_queries, tile_rows):
        own = slice(begin, min(begin + tile_rows, num_queries))
        rows, last = own.stop - own.start, min(num_keys, 20 + 2 * begin)
        masked = min(last, 13 if reach > tile_rows else 150)
        seen = torch.rand(rows, masked + rows, generator=made) < 0.5
        away = torch.arange(rows)[:, None] - torch.arange(-masked, rows)
        seen &= (away.abs() <= reach) | (away > rows)
        seen[:, masked:] |= torch.eye(rows, dtype=torch.bool)
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        tiles.append(Tile(own, slice(0, last), mask, (torch.arange(rows) // 3).int() if with_equal else None))
    return tiles


def chain_leaves(num_queries: int, num_keys: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    lengths = (num_queries, num_keys, num_keys, num_queries, num_queries)
    counts = (heads, kv_heads, kv_heads, kv_heads, kv_heads)
    return [drawn(n, count, head_dim, seed=seed) for seed, (n, count) in enumerate(zip(lengths, counts))]


@needs_native
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (2, 2, 128)])
@pytest.mark.parametrize("tile_rows", [1, 29, 170])
@pytest.mark.usefixtures("threads")
def test_queries_with_own_keys(heads: int, kv_heads: int, head_dim: int, tile_rows: int) -> None:
    check_attention(chain_leaves(200, 340, heads, kv_heads, head_dim), chain_tiles(200, 340, tile_rows, False))


@needs_native
@pytest.mark.parametrize("reach", [0, 5, 90])
@pytest.mark.parametrize("tile_rows", [170, 600])
@pytest.mark.usefixtures("threads")
def test_keys_that_no_neighbour_sees_are_passed_over(tile_rows: int, reach: int) -> None:
    check_attention(chain_leaves(600, 900, 4, 2, 64), chain_tiles(600, 900, tile_rows, False, reach))


@needs_native
@pytest.mark.parametrize("tile_rows", [29, 60])
def test_equal_queries_are_met_once(tile_rows: int) -> None:
    leaves, tiles = chain_leaves(200, 340, 4, 2, 64), chain_tiles(200, 340, tile_rows, True)
    for tile in tiles:
        assert tile.distinct_id is not None
        leaves[0][tile.own] = leaves[0][tile.own][tile.distinct_id.long() * 3]
    check_attention(leaves, tiles, equal=True)


@needs_native
def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = (drawn(90, 2, 64, seed=seed) * (8 if seed < 2 else 1) for seed in range(3))
    check_attention([q, k, v], causal_tiles([(0, 90)]), atol=1e-4)  # scores of hundreds round to 1e-5


@needs_native
def test_keys_of_any_layout_get_their_gradients() -> None:
    leaves = [drawn(9, 2, 64), *(drawn(2, 64, 9, seed=seed).permute(2, 0, 1) for seed in range(1, 5))]
    check_attention(leaves, chain_tiles(9, 9, 4, False))


@needs_native
def test_slots_see_their_context_and_their_chain() -> None:
    """A layout's slots in uneven tiles; the context's gradients are added where the caller collects them."""
    num_pairs, document = 24, torch.zeros(24, dtype=torch.int64)
    layout = sample(torch.ones(num_pairs, dtype=torch.bool), document, 5, 0.8, 0.2, [torch.Generator().manual_seed(4)])
    starts = (layout.depth == 1).nonzero()[:, 0].tolist()
    tiles = []
    for begin, end in pairwise([0, starts[len(starts) // 3], starts[-2], layout.num_slots]):
        anchor, depth = layout.anchor_pos[begin:end], layout.depth[begin:end]
        last = int(anchor[-1]) + 1
        after = torch.arange(int(anchor[0]) + 1, last)
        keys = torch.cat([after, anchor]), torch.cat([torch.zeros_like(after), depth])
        mask = torch.zeros(end - begin, keys[0].numel())
        mask.masked_fill_(~visible(anchor, depth, *keys, document), float("-inf"))
        tiles.append(Tile(slice(begin, end), slice(0, last), mask))
    leaves = [x.requires_grad_() for x in chain_leaves(layout.num_slots, num_pairs, 4, 2, 64)]
    check_attention(leaves, tiles)

    q, k, v, own_k, own_v = leaves
    pairs = torch.arange(num_pairs)
    keys = torch.cat([pairs, layout.anchor_pos]), torch.cat([torch.zeros_like(pairs), layout.depth])
    seen = visible(layout.anchor_pos, layout.depth, *keys, document)
    whole = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, torch.cat([k, own_k]), torch.cat([v, own_v]))),
        attn_mask=seen,
        enable_gqa=True,
    )
    wanted = whole[0].transpose(0, 1).flatten(1)
    wanted_grads = gradients(wanted, leaves)
    context_grads = torch.ones_like(k), torch.zeros_like(v)
    found = attend(q, (k.detach(), v.detach()), (own_k, own_v), tiles, context_grads)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    grads = gradients(found, [q, own_k, own_v])
    torch.testing.assert_close(grads, [wanted_grads[0], *wanted_grads[3:]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(list(context_grads), [1 + wanted_grads[1], wanted_grads[2]], rtol=1e-4, atol=1e-5)


@needs_native
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("with_equal", [False, True])
def test_the_number_of_threads_changes_no_bit(kv_heads: int, with_equal: bool) -> None:
    """Threads that share a head add to the same gradients: in one order, or sums would differ."""
    leaves = [x.requires_grad_() for x in chain_leaves(300, 700, 6, kv_heads, 64)]
    tiles = chain_tiles(300, 700, 40, with_equal)
    before, found = torch.get_num_threads(), []
    try:
        for threads in [1, 2, 3, 4, 6] * 5:
            torch.set_num_threads(threads)
            out = attend(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), tiles, None)
            found.append([out, *gradients(out, leaves)])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for one, other in zip(found[0], others):
            assert torch.equal(one, other)


@needs_native
def test_pytorchs_threads_share_the_work() -> None:
    """Else the tests above with several threads would hold because there is one."""
    code = """
import os, torch
from peagle.kernels import cpu as kernels
torch.set_num_threads(3)
before = len(os.listdir("/proc/self/task"))
kernels.softmax_(torch.ones(600, 2000))
print(kernels.num_native_threads(), len(os.listdir("/proc/self/task")) - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "3 2\n"


# -------------------- softmax with loss


@pytest.mark.parametrize("vocab_size", [1, 15, 64, 1000, 4099])
@pytest.mark.parametrize("scale", [0.1, 30.0])
@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.usefixtures("threads")
def test_softmax_with_what_a_loss_asks_of_it(vocab_size: int, scale: float, num_targets: int) -> None:
    logits, target = drawn(40, vocab_size) * scale, torch.softmax(drawn(num_targets, vocab_size, seed=1), -1)
    row, exact = torch.arange(40) % num_targets, logits.double()
    wanted, rounding = exact.softmax(-1), 1e-6 + 1e-6 * float(logits.abs().max())  # differences of logits lose bits
    for softmax in (kernels.softmax_, cpu.reference_softmax_):
        probs, log_sum, dot, best = softmax(logits.clone())
        torch.testing.assert_close(probs, wanted.float(), rtol=2e-5, atol=1e-7)
        torch.testing.assert_close(dot - log_sum, torch.xlogy(wanted, wanted).sum(-1).float(), rtol=1e-5, atol=rounding)
        torch.testing.assert_close(log_sum, exact.logsumexp(-1).float(), rtol=1e-5, atol=rounding)
        assert torch.equal(best, logits.argmax(-1))
    wanted_loss = -(exact.log_softmax(-1) * target[row].double()).sum(-1)
    for cross in (kernels.soft_cross_entropy_, cpu.reference_soft_cross_entropy_):
        changed, kept = logits.clone(), logits.clone()
        loss, best = cross(changed, target, row, True)
        torch.testing.assert_close(loss, wanted_loss.float(), rtol=1e-5, atol=rounding)
        assert torch.equal(best, logits.argmax(-1))
        torch.testing.assert_close(changed, (wanted - target[row]).float(), rtol=1e-4, atol=1e-6)
        assert torch.equal(cross(kept, target, row, False)[0], loss)
        assert torch.equal(kept, logits)


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 65, 1023, 1024, 1025, 2048, 4099])
def test_of_several_largest_logits_the_first_counts(vocab_size: int) -> None:
    logits = drawn(60, vocab_size).bfloat16().float()  # ties in many rows
    places = torch.randint(vocab_size, (60, 3), generator=torch.Generator().manual_seed(0))
    logits[:40] = logits[:40].scatter(1, places[:40], 9.0)
    logits[40:50] = 0.0
    logits[50:] = -logits[50:].abs() - 100.0
    wanted, target = logits.argmax(-1), torch.softmax(logits[:1], -1)
    assert wanted[:40].tolist() == places[:40].amin(1).tolist()
    for softmax in (kernels.softmax_, cpu.reference_softmax_):
        assert torch.equal(softmax(logits.clone())[3], wanted)
    for cross in (kernels.soft_cross_entropy_, cpu.reference_soft_cross_entropy_):
        assert torch.equal(cross(logits.clone(), target, torch.zeros(60, dtype=torch.int64), True)[1], wanted)


def test_the_losss_gradient_is_autograds() -> None:
    logits, target = drawn(6, 50).double().requires_grad_(), torch.softmax(drawn(2, 50, seed=1).double(), -1)
    row = torch.tensor([0, 0, 1, 1, 1, 0])
    loss, _ = kernels.soft_cross_entropy_(changed := logits.detach().clone(), target, row, True)
    wanted = F.cross_entropy(logits, target[row], reduction="none")
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(changed, torch.autograd.grad(wanted.sum(), logits)[0])


def test_what_is_not_a_number_stays_so() -> None:
    logits = drawn(2, 100)
    logits[0, 40] = float("nan")
    probs, log_sum, _, _ = kernels.softmax_(logits)
    assert log_sum.isnan().tolist() == [True, False]
    assert probs[0].isnan().all()
    assert not probs[1].isnan().any()


@needs_native
def test_a_query_that_is_not_a_number_spoils_its_own_row_only() -> None:
    q = drawn(20, 1, 64)
    q[3] = float("nan")
    out = attend(q, (drawn(20, 1, 64), drawn(20, 1, 64)), None, causal_tiles([(0, 20)]), None)
    assert out.isnan().any(-1).nonzero().flatten().tolist() == [3]


# -------------------- norm and MLP


def test_rms_norm_and_its_gradients_are_pytorchs() -> None:
    x, weight = drawn(3, 5, 16).double().requires_grad_(), drawn(16, seed=1).double().requires_grad_()
    found, wanted = kernels.rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight, 1e-6)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, [x, weight]), gradients(wanted, [x, weight]))
    half = x.detach().bfloat16(), weight.detach().bfloat16()
    assert torch.equal(
        kernels.rms_norm(*half, 1e-6), kernels.rms_norm(half[0].float(), half[1].float(), 1e-6).bfloat16()
    )


def test_swiglu_and_its_gradients_are_autograds() -> None:
    x, *weights = (drawn(*shape, seed=sum(shape)).double() for shape in [(2, 7, 8), (12, 8), (13, 8), (8, 12)])
    weights[1] = weights[1][:12]
    leaves = [one.requires_grad_() for one in (x, *(w.clone() for w in weights))]
    found = kernels.swiglu(*leaves)
    wanted = F.linear(F.silu(F.linear(leaves[0], leaves[1])) * F.linear(leaves[0], leaves[2]), leaves[3])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, leaves), gradients(wanted, leaves))


def test_no_rows_give_no_gradients() -> None:
    x, matrices = torch.randn(0, 64, requires_grad=True), [torch.randn(96, 64, requires_grad=True) for _ in range(2)]
    out = kernels.swiglu(x, *matrices, torch.randn(64, 96))
    assert [float(grad.abs().sum()) for grad in torch.autograd.grad(out.sum(), matrices)] == [0, 0]


def test_tiles_count_their_distinct_queries() -> None:
    tile = Tile(slice(4, 9), slice(0, 3), torch.zeros(5, 5))
    assert tile.num_distinct == 5
    assert replace(tile, distinct_id=torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)).num_distinct == 2
