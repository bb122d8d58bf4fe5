"""Two operations whose backward is written by hand: they are most of what a step holds, and many of its passes.

PyTorch's own RMS norm is a chain of six operations on the CPU and keeps two copies of its input; its SwiGLU keeps four
[num_slots, intermediate_size] tensors where two suffice. On CUDA the fused RMS norm is taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels import native
from peagle.kernels.products import linear, product


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        scale = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, size = grads[0], x.shape[-1]
        product = (grad * x).reshape(-1, size)
        flat_scale = scale.reshape(-1)
        weight_grad = torch.mv(product.t(), flat_scale) if ctx.needs_input_grad[1] else None
        pull = (torch.mv(product, weight) * flat_scale.pow(3)).div_(size).reshape(scale.shape)
        x_grad = (grad * weight).mul_(scale).addcmul_(x, pull, value=-1)
        return x_grad, weight_grad, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, [..., size]; half precision is normed in float32."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    if x.dtype in (torch.bfloat16, torch.float16):
        return _RmsNorm.apply(x.float(), weight.float(), eps).to(x.dtype)
    return _RmsNorm.apply(x, weight, eps)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        gate, up = linear(x, gate_weight), linear(x, up_weight)
        ctx.save_for_backward(x, gate, up, gate_weight, up_weight, down_weight)
        hidden = native.swiglu(gate, up) if native.does_elements(gate, up) else F.silu(gate).mul_(up)
        return linear(hidden, down_weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        size = x.shape[-1]
        grad, x2 = grads[0].reshape(-1, size), x.reshape(-1, size)
        gate, up = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1])
        inner = product(grad, down_weight)
        if native.does_elements(gate, up, inner):
            hidden, gate_grad, up_grad = native.swiglu_backward(gate, up, inner)
        else:
            activated = F.silu(gate)
            hidden = activated * up
            up_grad = activated.mul_(inner)
            gate_grad = torch.ops.aten.silu_backward(inner.mul_(up), gate)
        down_grad = product(grad.t(), hidden)
        x_grad = product(gate_grad, gate_weight).add_(product(up_grad, up_weight))
        return x_grad.reshape(x.shape), product(gate_grad.t(), x2), product(up_grad.t(), x2), down_grad


def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)), [..., hidden_size]."""
    return _SwiGlu.apply(x, gate_weight, up_weight, down_weight)
