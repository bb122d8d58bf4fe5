"""Products by either library are the same numbers, and autograd goes through them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from peagle.kernels import native, products


@pytest.mark.parametrize("rows", [7, 37])  # PyTorch's; ours where there are kernels
def test_products_are_pytorchs(rows: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(rows, 64), torch.randn(129, 64)
    wanted = a @ b.t()
    room = torch.full((50, 129), float("nan"))
    found = products.product(a, b.t(), out=room[:rows])
    assert found.data_ptr() == room.data_ptr()  # into the room that was given, past which nothing is written
    assert room[rows:].isnan().all()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(products.product(a, b.t()), wanted)
    torch.testing.assert_close(products.product(a.t(), a), a.t() @ a)  # columns first


@pytest.mark.parametrize("rows", [7, 37])
@pytest.mark.parametrize("frozen", ["none", "x", "weight"])
def test_linear_has_pytorchs_gradients(frozen: str, rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 16), torch.randn(65, 16)
    pull = torch.randn(rows, 65)
    grads = []
    for one in (products.linear, F.linear):
        leaves = [x.clone().requires_grad_(frozen != "x"), weight.clone().requires_grad_(frozen != "weight")]
        (one(*leaves) * pull).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*grads):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_only_plain_float32_rows_go_to_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("went to our kernels")

    monkeypatch.setattr(native, "product", fail)
    monkeypatch.setattr(native, "is_available", lambda: True)
    weight, bias = torch.randn(5, 16), torch.randn(5)
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(40, 16, dtype=dtype)
        torch.testing.assert_close(products.linear(x, weight.to(dtype)), F.linear(x, weight.to(dtype)))
        torch.testing.assert_close(products.product(x, weight.t().to(dtype)), x @ weight.t().to(dtype))
    torch.testing.assert_close(products.linear(torch.ones(2, 3, 16), weight), F.linear(torch.ones(2, 3, 16), weight))
    torch.testing.assert_close(
        products.linear(torch.ones(40, 16), weight, bias), F.linear(torch.ones(40, 16), weight, bias)
    )
    with pytest.raises(AssertionError, match="went to our kernels"):
        products.linear(torch.ones(40, 16), weight)
