"""Float32 matrix products on a CPU, by our kernels where they run (`native`), by PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels import native


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b without a graph, [rows, inner] times [inner, columns]; into `out` if given, which is what is returned."""
    if native.does_product(a, b):
        return native.product(a.detach(), b.detach(), out)
    return torch.mm(a, b, out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.t() + bias, as `torch.nn.functional.linear`: [..., in_size] -> [..., out_size]."""
    if bias is not None or not native.does_product(x, weight):
        return F.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_grad = product(grads[0], weight) if ctx.needs_input_grad[0] else None
        return x_grad, product(grads[0].t(), x) if ctx.needs_input_grad[1] else None
