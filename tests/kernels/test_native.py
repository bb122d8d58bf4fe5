"""Our own kernels against PyTorch in float64, and against themselves on more threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels import native, products
from peagle.kernels.native import Tile
from peagle.kernels.ops import swiglu
from peagle.kernels.tiles import attend, causal_tiles

needs_kernels = pytest.mark.skipif(not native.is_available(), reason="no kernels: no C compiler, or no AVX-512")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_kernels_are_there_where_they_can_be() -> None:
    """The other tests skip without them, which must not hide that they were not built."""
    cpu = Path("/proc/cpuinfo")
    if shutil.which("cc") and cpu.exists() and "avx512vl" in cpu.read_text() and os.environ.get("PEAGLE_NATIVE") != "0":
        assert native.is_available()


def test_a_variable_switches_them_off() -> None:
    code = "from peagle import native; print(native.is_available())"
    environment = {**os.environ, "PEAGLE_NATIVE": "0"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


# -------------------- products


@needs_kernels
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(32, 1, 1), (33, 3, 63), (40, 17, 64), (64, 600, 65), (113, 513, 700), (225, 390, 128), (700, 31, 30)],
)
@pytest.mark.parametrize("turned", ["none", "a", "b", "both"])
def test_products_are_pytorchs(rows: int, inner: int, columns: int, turned: str, threads: int) -> None:
    a = drawn(inner, rows).t() if turned in ("a", "both") else drawn(rows, inner)
    b = drawn(columns, inner, seed=1).t() if turned in ("b", "both") else drawn(inner, columns, seed=1)
    assert native.does_product(a, b)
    wide = torch.full((rows + 1, columns + 5), 7.0)
    found = native.product(a, b, out=wide[:rows, :columns])
    assert found.data_ptr() == wide.data_ptr()
    wanted = (a.double() @ b.double()).float()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * inner**0.5)
    assert (wide[rows:] == 7).all()
    assert (wide[:, columns:] == 7).all()
    assert torch.equal(native.product(a, b), found)
    torch.set_num_threads(1)
    assert torch.equal(native.product(a, b), found)  # however many threads share it


@needs_kernels
def test_strided_operands_are_read_where_they_lie() -> None:
    a, b = drawn(80, 200)[:, ::2], drawn(100, 300, seed=1)[:, ::3]
    torch.testing.assert_close(native.product(a, b), a @ b, rtol=1e-5, atol=1e-4)


@needs_kernels
def test_products_are_not_taken_for_what_pytorch_does_better_or_only_pytorch_does() -> None:
    a, b = drawn(64, 8), drawn(8, 64)
    assert native.does_product(a, b)
    assert not native.does_product(a[:31], b)  # packing b would cost more than the product
    assert not native.does_product(a.double(), b.double())
    assert not native.does_product(a.bfloat16(), b.bfloat16())
    assert not native.does_product(a.to("meta"), b.to("meta"))
    assert not native.does_product(a[None], b)


# -------------------- attention


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


def check_attention(leaves: list[Tensor], tiles: list[Tile], equal: bool = False, atol: float = 2e-6) -> None:
    """float32 leaves (q, k, v, own k, own v) against tiles of float64, which never take the kernels."""

    def solve(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        made = [x.to(dtype).requires_grad_() for x in leaves]
        cut = [Tile(tile.own, tile.context, tile.mask.to(dtype), tile.place) for tile in tiles]
        own = (made[3], made[4]) if len(made) > 3 else None
        out = attend(made[0], (made[1], made[2]), own, cut, None)
        return out, gradients(out, made)

    found, grads = solve(torch.float32)
    wanted, wanted_grads = solve(torch.float64)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=atol)
    if equal:  # one query gets what its equals should: sums over a place are right
        grads[0], wanted_grads[0] = (places_summed(one, tiles) for one in (grads[0], wanted_grads[0]))
    size = max(float(one.abs().max()) for one in wanted_grads)
    for ours, theirs in zip(grads, wanted_grads):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=2e-6 * size)


def places_summed(grad: Tensor, tiles: list[Tile]) -> Tensor:
    found = []
    for tile in tiles:
        assert tile.place is not None
        room = grad.new_zeros(int(tile.place.max()) + 1, *grad.shape[1:])
        found.append(room.index_add_(0, tile.place.long(), grad[tile.own]))
    return torch.cat(found)


@needs_kernels
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (4, 2, 64), (3, 1, 128)])
@pytest.mark.parametrize("bounds", [[(0, 1)], [(0, 37)], [(0, 300), (300, 301), (301, 700)]], ids=str)
@pytest.mark.usefixtures("threads")
def test_causal_attention_and_its_gradients(
    heads: int, kv_heads: int, head_dim: int, bounds: list[tuple[int, int]]
) -> None:
    num = bounds[-1][1]
    q, k, v = (drawn(num, count, head_dim, seed=seed) for seed, count in enumerate((heads, kv_heads, kv_heads)))
    assert native.does_attention(q)
    check_attention([q, k, v], causal_tiles(bounds, q))


def chain_tiles(num_queries: int, num_keys: int, tile_rows: int, with_places: bool, reach: int = 10**6) -> list[Tile]:
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
        place = (torch.arange(rows) // 3).int() if with_places else None
        tiles.append(Tile(own, slice(0, last), mask, place))
    return tiles


@needs_kernels
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (2, 2, 128)])
@pytest.mark.parametrize("tile_rows", [1, 29, 170])
@pytest.mark.usefixtures("threads")
def test_queries_with_own_keys(heads: int, kv_heads: int, head_dim: int, tile_rows: int) -> None:
    counts = (heads, kv_heads, kv_heads, kv_heads, kv_heads)
    lengths = (200, 340, 340, 200, 200)
    leaves = [drawn(n, count, head_dim, seed=seed) for seed, (n, count) in enumerate(zip(lengths, counts))]
    check_attention(leaves, chain_tiles(200, 340, tile_rows, False))


@needs_kernels
@pytest.mark.parametrize("reach", [0, 5, 90])
@pytest.mark.parametrize("tile_rows", [170, 600])
@pytest.mark.usefixtures("threads")
def test_keys_that_no_neighbour_sees_are_passed_over(tile_rows: int, reach: int) -> None:
    lengths, counts = (600, 900, 900, 600, 600), (4, 2, 2, 2, 2)
    leaves = [drawn(n, count, 64, seed=seed) for seed, (n, count) in enumerate(zip(lengths, counts))]
    check_attention(leaves, chain_tiles(600, 900, tile_rows, False, reach))


@needs_kernels
@pytest.mark.parametrize("tile_rows", [29, 60])
def test_equal_queries_are_met_once(tile_rows: int) -> None:
    leaves = [drawn(n, count, 64, seed=n + count) for n, count in ((200, 4), (340, 2), (340, 2), (200, 2), (200, 2))]
    tiles = chain_tiles(200, 340, tile_rows, True)
    for tile in tiles:
        assert tile.place is not None
        leaves[0][tile.own] = leaves[0][tile.own][tile.place.long() * 3]
    check_attention(leaves, tiles, equal=True)


@needs_kernels
def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = (drawn(90, 2, 64, seed=seed) * (8 if seed < 2 else 1) for seed in range(3))
    check_attention([q, k, v], causal_tiles([(0, 90)], q), atol=1e-4)  # scores of hundreds round to 1e-5


# -------------------- elementwise


@needs_kernels
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 64), (300, 301)])
@pytest.mark.usefixtures("threads")
def test_swiglu_and_its_gradients(size: tuple[int, int]) -> None:
    gate, up, grad = (drawn(*size, seed=seed) * 30 for seed in range(3))
    leaves = [gate.double().requires_grad_(), up.double().requires_grad_()]
    wanted = F.silu(leaves[0]) * leaves[1]
    torch.testing.assert_close(native.swiglu(gate, up), wanted.float(), rtol=1e-5, atol=1e-6)
    wanted_grads = torch.autograd.grad(wanted, leaves, grad.double())
    hidden, gate_grad, up_grad = native.swiglu_backward(gate, up, grad.clone())
    torch.testing.assert_close(hidden, wanted.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close([gate_grad, up_grad], [one.float() for one in wanted_grads], rtol=1e-5, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("vocab_size", [1, 15, 64, 1000, 4099])
@pytest.mark.parametrize("scale", [0.1, 30.0])
@pytest.mark.usefixtures("threads")
def test_softmax_with_what_a_loss_asks_of_it(vocab_size: int, scale: float) -> None:
    logits, wanted = drawn(40, vocab_size) * scale, torch.softmax(drawn(3, vocab_size, seed=1), -1)
    label = torch.arange(40) % 3
    exact = logits.double()
    own = native.softmax(room := logits.clone(), None, None, is_written=True)
    torch.testing.assert_close(room, exact.softmax(-1).float(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(own.best, logits.amax(-1))
    torch.testing.assert_close(own.log_sum, exact.logsumexp(-1).float())
    torch.testing.assert_close(own.dot, (exact * exact.softmax(-1)).sum(-1).float(), rtol=1e-5, atol=1e-5)
    assert own.choice is not None
    assert torch.equal(own.choice, logits.argmax(-1))
    against = native.softmax(room := logits.clone(), wanted, label, is_written=True)
    torch.testing.assert_close(room, (exact.softmax(-1) - wanted[label]).float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(against.dot, (exact * wanted[label].double()).sum(-1).float(), rtol=1e-5, atol=1e-5)
    kept = logits.clone()
    assert torch.equal(native.softmax(kept, wanted, label, is_written=False).dot, against.dot)
    assert torch.equal(kept, logits)


@needs_kernels
def test_what_is_not_a_number_stays_so() -> None:
    logits = drawn(2, 100)
    logits[0, 40] = float("nan")
    found = native.softmax(logits, None, None, is_written=True)
    assert found.log_sum.isnan().tolist() == [True, False]
    assert logits[0].isnan().all()
    assert not logits[1].isnan().any()
    q = drawn(20, 1, 64)
    q[3] = float("nan")
    out = attend(q, (drawn(20, 1, 64), drawn(20, 1, 64)), None, causal_tiles([(0, 20)], q), None)
    assert out.isnan().any(-1).nonzero().flatten().tolist() == [3]


@needs_kernels
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("with_places", [False, True])
def test_the_number_of_threads_changes_no_bit(kv_heads: int, with_places: bool) -> None:
    """Threads that share a head add to the same gradients: in one order, or sums would differ."""
    lengths, counts = (300, 700, 700, 300, 300), (6, kv_heads, kv_heads, kv_heads, kv_heads)
    leaves = [drawn(n, count, 64, seed=seed).requires_grad_() for seed, (n, count) in enumerate(zip(lengths, counts))]
    tiles = chain_tiles(300, 700, 40, with_places)
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


@needs_kernels
def test_keys_of_any_layout_get_their_gradients() -> None:
    leaves = [drawn(9, 2, 64), *(drawn(2, 64, 9, seed=seed).permute(2, 0, 1) for seed in range(1, 5))]
    check_attention(leaves, chain_tiles(9, 9, 4, False))


def test_products_of_nothing_are_zero() -> None:
    x, matrices = torch.randn(0, 64, requires_grad=True), [torch.randn(96, 64, requires_grad=True) for _ in range(2)]
    out = swiglu(x, *matrices, torch.randn(64, 96))
    assert [float(grad.abs().sum()) for grad in torch.autograd.grad(out.sum(), matrices)] == [0, 0]
    assert products.product(torch.randn(64, 0), torch.randn(0, 8)).abs().sum() == 0


@needs_kernels
def test_pytorchs_threads_share_the_work() -> None:
    """Else the tests above with several threads would hold because there is one."""
    code = """
import os, torch
from peagle import native
torch.set_num_threads(3)
a = torch.randn(600, 2000)
before = len(os.listdir("/proc/self/task"))
native.product(a, a.t())
print(native.num_threads(), len(os.listdir("/proc/self/task")) - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "3 2\n"
