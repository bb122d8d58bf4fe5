"""The account of a step on a GPU: what the pretended device counts and refuses, and the step's limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_account, pretended_gpu
from benchmarks.pretended_gpu import CUDA, on_host, pretend
from peagle.train import step

PLACES = ("/tests/gpu/",)


def test_training_and_validation_equal_the_cpus_on_random_packs():
    assert gpu_account.check(6, 0) == []


def test_an_index_left_on_the_host_is_a_mismatch(monkeypatch):
    made = step.train_step

    def careless(drafter, head, batch, *rest):
        return made(drafter, head, replace(batch, rope_pos=batch.rope_pos.cpu()), *rest)

    monkeypatch.setattr(gpu_account.loop, "train_step", careless)
    problems = gpu_account.check(1, 0)
    assert len(problems) == 2
    assert all("device mismatch" in problem for problem in problems)


def test_a_wrong_gradient_is_a_mismatch(monkeypatch):
    from peagle.kernels import cpu

    made = cpu._SwiGlu.backward

    def wrong(ctx, *grads):
        x_grad, *rest = made(ctx, *grads)
        return (x_grad * (1 + 1e-5 * x_grad.is_cuda), *rest)

    monkeypatch.setattr(cpu._SwiGlu, "backward", staticmethod(wrong))
    problems = gpu_account.check(1, 1)
    assert problems
    assert all("differs" in problem for problem in problems)


@pytest.mark.parametrize(
    ("run", "waits"),
    [
        (lambda x, i: torch.arange(5, device=CUDA) + 1, 0),
        (lambda x, i: x[i], 0),
        (lambda x, i: x.sum().item(), 1),
        (lambda x, i: int(i.max()), 1),
        (lambda x, i: i.tolist(), 1),
        (lambda x, i: i.nonzero(), 1),
        (lambda x, i: x[:4][i > 1], 1),
        (lambda x, i: x.cpu(), 1),
        (lambda x, i: torch.tensor([1, 2], device=CUDA), 1),
        (lambda x, i: x.new_tensor([1.0]), 1),
        (lambda x, i: x[torch.tensor([1, 2])], 1),
        (lambda x, i: torch.ones(3).to(CUDA), 1),
        (lambda x, i: torch.ones(3).pin_memory().to(CUDA), 1),
        (lambda x, i: torch.ones(3).pin_memory().to(CUDA, non_blocking=True), 0),
        (lambda x, i: torch.empty_like(x).copy_(torch.ones(8).pin_memory(), non_blocking=True), 0),
        (lambda x, i: torch.empty_like(x).copy_(torch.ones(8), non_blocking=True), 1),
        (lambda x, i: torch.cuda.synchronize(), 1),
        (lambda x, i: x.to(torch.bfloat16).to(x.device), 0),
    ],
)
@pytest.mark.parametrize("ghost", [False, True])
def test_waits_of_the_host(run, waits: int, ghost: bool):
    with pretend(ghost=ghost, roots=PLACES) as device:
        x, i = torch.ones(8, device=CUDA), torch.arange(4, device=CUDA)
        device.start()
        run(x, i)
        assert device.counts.num_waits == waits


def test_mixed_devices_are_refused_and_host_numbers_are_not():
    with pretend(ghost=False, roots=PLACES):
        x = torch.ones(4, device=CUDA)
        for wrong in (
            lambda: x + torch.ones(4),
            lambda: torch.cat([x, torch.ones(4)]),
            lambda: torch.ones(4)[torch.arange(2, device=CUDA)],
            lambda: torch.ones(4, 4) @ x,
        ):
            with pytest.raises(RuntimeError, match="device mismatch"):
                wrong()
        assert on_host(x + torch.tensor(2.0)).tolist() == [3.0] * 4  # a scalar of the host is a kernel's argument
        with pytest.raises(TypeError):
            x.numpy()


def test_kernels_bytes_and_multiply_adds():
    with pretend(ghost=True, roots=PLACES) as device:
        a, b = torch.ones(64, 32, device=CUDA), torch.ones(32, 16, device=CUDA, dtype=torch.float32)
        device.start()
        c = a @ b
        assert device.counts.flops["product"] == 2 * 64 * 32 * 16
        assert not device.counts.moved
        assert device.counts.product_bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)
        device.start()
        c.view(16, 64).add_(1.0)  # a view costs nothing, in place reads and writes
        assert device.counts.num_kernels == 1
        assert sum(device.counts.moved.values()) == 2 * 4 * 64 * 16
        device.start()
        torch.empty_like(c).copy_(c)
        assert sum(device.counts.moved.values()) == 2 * 4 * 64 * 16
        device.start()
        a[torch.arange(5, device=CUDA)]
        assert device.counts.kernels == {"arange": 1, "index": 1}
        assert sum(device.counts.moved.values()) == 5 * 8 + (2 * 5 * 32 * 4 + 5 * 8)
        ((_, where),) = [key for key in device.counts.moved if key[0] == "index"]
        assert where.startswith("test_account.py:")


def test_memory_is_what_is_alive():
    with pretend(ghost=True, roots=PLACES) as device:
        before = device.live
        x = torch.zeros(1 << 20, device=CUDA)
        view, y = x[10:], x * 2
        assert device.live - before == 2 * (4 << 20)
        del x
        assert device.live - before == 2 * (4 << 20)  # the view holds it
        del view, y
        assert device.live == before
        assert device.counts.peak - before == 2 * (4 << 20)
        kept = torch.zeros(1, device=CUDA)
        assert device.live - before == 512
        del kept


def test_ghosts_have_shapes_and_real_integers():
    with pretend(ghost=True, roots=PLACES):
        x = torch.randn(6, device=CUDA)
        assert on_host(x).device.type == "meta"
        order = torch.arange(6, device=CUDA).flip(0)
        assert order.tolist() == [5, 4, 3, 2, 1, 0]
        assert x[order].shape == (6,)
        assert float(x.sum()) == pretended_gpu.PLACEHOLDER


def test_nothing_stays_behind():
    real = torch.tensor, torch.cuda.Stream, torch.Tensor.pin_memory, torch.nn.functional.rms_norm
    with pytest.raises(ZeroDivisionError), pretend(ghost=True), torch.device("meta"):
        torch.ones(1 // 0)
    assert real == (torch.tensor, torch.cuda.Stream, torch.Tensor.pin_memory, torch.nn.functional.rms_norm)
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == "meta"
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):  # a build without CUDA says so again
            torch.ones(1).to(CUDA)


LIMITS = {"syncs_per_step": 8, "kernels_per_step": 3_500, "elementwise_gb": 130.0, "peak_gb": 36.0}


@pytest.fixture(scope="module")
def found() -> dict:
    return gpu_account.account(8192, 4, detail=False)


def test_a_step_of_an_8b_drafter_stays_within_its_limits(found):
    assert {name: found[name] for name, limit in LIMITS.items() if found[name] > limit} == {}
    assert found["tokens_per_s_estimate"] >= 22_500
    # Fewer multiply-adds than the rows need would mean that something was not counted.
    assert found["product_tflop"] == pytest.approx(111.4, rel=0.01)
    assert found["slots"] > 15_000


def test_a_long_context_fits_as_documented():
    assert gpu_account.account(131_072, 4, detail=False)["peak_gb"] <= 60


def test_the_peers_step_is_counted_by_its_rows():
    peer = gpu_account.speculators_step(2048, 4)
    supervised = 2046 * 0.6
    assert peer["slots"] == pytest.approx(2046 + supervised * (0.7 + 0.49 + 0.343), rel=0.02)
    assert peer["product_tflop"] > 8192 / 2048 * 7


def test_the_docs_and_doctor_say_what_is_counted(found):
    assert 0.7 * gpu_account.doctor_gb(8192, False) < found["peak_gb"] < gpu_account.doctor_gb(8192, False)
    row = gpu_account.table_row("8,192", found)
    (written,) = [
        line
        for line in gpu_account.DOCS.read_text().splitlines()
        if line.startswith("| 8,192 |") and line.count("|") == row.count("|")
    ]
    for here, there in zip(written.split("|")[2:-1], row.split("|")[2:-1]):
        number, counted = (float(cell.replace(",", "")) for cell in (here, there))
        assert number == pytest.approx(counted, rel=0.1, abs=2), "run benchmarks/gpu_account.py --docs"
