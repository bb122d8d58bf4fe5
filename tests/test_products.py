"""Products by either library are the same numbers, and the second one is taken only where it is known to serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from peagle import products


@pytest.fixture
def with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's products, whatever this machine would choose."""
    monkeypatch.setattr(products, "_is_numpy_faster", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.usefixtures("with_numpy")
def test_numpys_products_are_pytorchs() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(37, 64), torch.randn(129, 64)
    wanted = a @ b.t()
    room = torch.full((50, 129), float("nan"))
    found = products.product(a, b.t(), out=room[:37])
    assert found.data_ptr() == room.data_ptr()  # into the room that was given, past which nothing is written
    assert room[37:].isnan().all()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(products.product(a, b.t()), wanted)
    torch.testing.assert_close(products.product(a.t(), a), a.t() @ a)  # columns first
    torch.testing.assert_close(products.product(a[:, ::2], b[:, ::2].t()), a[:, ::2] @ b[:, ::2].t())


@pytest.mark.usefixtures("with_numpy")
@pytest.mark.parametrize("frozen", ["none", "x", "weight"])
def test_numpys_linear_has_pytorchs_gradients(frozen: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 16), torch.randn(5, 16)
    pull = torch.randn(7, 5)
    grads = []
    for one in (products.linear, F.linear):
        leaves = [x.clone().requires_grad_(frozen != "x"), weight.clone().requires_grad_(frozen != "weight")]
        (one(*leaves) * pull).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*grads):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("with_numpy")
def test_only_plain_float32_rows_go_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("went to NumPy")

    monkeypatch.setattr(products.np, "matmul", fail)
    weight, bias = torch.randn(5, 16), torch.randn(5)
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(7, 16, dtype=dtype)
        torch.testing.assert_close(products.linear(x, weight.to(dtype)), F.linear(x, weight.to(dtype)))
        torch.testing.assert_close(products.product(x, weight.t().to(dtype)), x @ weight.t().to(dtype))
    torch.testing.assert_close(products.linear(torch.ones(2, 3, 16), weight), F.linear(torch.ones(2, 3, 16), weight))
    torch.testing.assert_close(
        products.linear(torch.ones(3, 16), weight, bias), F.linear(torch.ones(3, 16), weight, bias)
    )
    with pytest.raises(AssertionError, match="went to NumPy"):
        products.linear(torch.ones(3, 16), weight)


@pytest.mark.parametrize(
    ("environment", "threads", "vendor", "taken"),
    [
        ({"OMP_NUM_THREADS": "1"}, 1, "AuthenticAMD", True),
        ({"OMP_NUM_THREADS": "1"}, 2, "AuthenticAMD", False),  # PyTorch was told otherwise since
        ({"OMP_NUM_THREADS": "2"}, 1, "AuthenticAMD", False),  # NumPy's pool is there already
        ({}, 1, "AuthenticAMD", False),
        ({"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"}, 1, "AuthenticAMD", False),  # the first that is set
        ({"OMP_NUM_THREADS": "1"}, 1, "GenuineIntel", False),
    ],
)
def test_numpy_is_taken_on_one_thread_of_a_processor_that_mkl_slights(
    environment: dict[str, str],
    threads: int,
    vendor: str,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id : {vendor}\n")
    for name in products.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(products, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(products, "_has_openblas", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    products._is_numpy_faster.cache_clear()
    try:
        assert products.uses_numpy(torch.ones(2, 2)) is taken
    finally:
        products._is_numpy_faster.cache_clear()
