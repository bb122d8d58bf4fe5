"""What a training step computes besides matrix products, one function each, its definition in PyTorch beside it.

`attend` is the C kernel, by name: a caller asks `native_attention_problem` once, when settings are resolved. The loss's
functions take C where it is there and PyTorch elsewhere: the numbers are the same but for rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from peagle.kernels import native
from peagle.kernels.native import Tile

# Queries of a tile. The kernel passes over what a few neighbours do not see, so that only the keys count, which each
# tile reads once: flat from 60 to 240.
TILE_ROWS = 168
_HEAD_UNIT = 64  # a head is whole vectors of either build


# -------------------- attention


def causal_tiles(bounds: list[tuple[int, int]]) -> list[Tile]:
    """Tiles of causal attention, document by document; the keys are the context.

    Args:
        bounds: range of rows of each document, covering all of them.
    """
    triangle = torch.full((TILE_ROWS, TILE_ROWS), float("-inf")).triu_(1)
    tiles = []
    for first, last in bounds:
        for begin in range(first, last, TILE_ROWS):
            end = min(begin + TILE_ROWS, last)
            tiles.append(Tile(slice(begin, end), slice(first, end), triangle[: end - begin, : end - begin]))
    return tiles


def native_attention_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why `attend` does not take such queries, to be told after "--attention native: "; None if it does."""
    if device.type != "cpu":
        return f"runs on a CPU, not on {device.type}"
    if dtype != torch.float32:
        return f"computes in float32, not in {str(dtype).removeprefix('torch.')}"
    if head_dim % _HEAD_UNIT:
        return f"heads of {head_dim} are not a multiple of {_HEAD_UNIT}"
    if native.library() is None:
        return "the kernels were not built (no C compiler), the processor has no AVX2, or PEAGLE_NATIVE=0 is set"
    return None


def attend(
    q: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor] | None,
    tiles: list[Tile],
    context_grads: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attention of queries to context keys, and to their own. Keeps no probabilities: the backward forms them again.

    Args:
        q: float32, [num_queries, heads, head_dim].
        context: keys and values, each [num_keys, kv_heads, head_dim].
        own: keys and values of the queries themselves, each [num_queries, kv_heads, head_dim]; None if the context
            holds them.
        tiles: in order, covering the queries.
        context_grads: the backward adds the gradients of the context's keys and values here, shaped like them; None
            sends them on through the graph.

    Returns:
        [num_queries, heads * head_dim]
    """
    out: Tensor = _Attend.apply(q, *context, *(own or (None, None)), tiles, context_grads)
    return out.flatten(1)


def reference_attend(
    q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor] | None, tiles: list[Tile]
) -> Tensor:
    """The definition of `attend`, in any float type."""
    out, group = [], q.shape[1] // context[0].shape[1]
    for tile in tiles:
        k, v = (
            torch.cat([x[tile.context], *([] if own is None else [own[index][tile.own]])]).repeat_interleave(group, 1)
            for index, x in enumerate(context)
        )
        scores = torch.einsum("qhd,khd->hqk", q[tile.own], k) * q.shape[-1] ** -0.5
        num_unmasked = k.shape[0] - tile.mask.shape[1]
        probs = (scores + F.pad(tile.mask.to(q.dtype), (num_unmasked, 0))).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", probs, v).flatten(1))
    return torch.cat(out)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
        tiles: list[Tile],
        context_grads: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        assert native_attention_problem(q.device, q.dtype, q.shape[-1]) is None, "settle the attention's name first"
        out, log_sum = native.attention_forward(q, (k, v, own_k, own_v), tiles)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, log_sum)
        ctx.tiles, ctx.context_grads = tiles, context_grads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, out, log_sum = ctx.saved_tensors
        # Not zeros_like: the kernel wants the numbers of a head next to each other.
        k_grad, v_grad = ctx.context_grads or (k.new_zeros(k.shape), v.new_zeros(v.shape))
        own_grads = (None, None) if own_k is None else (own_k.new_zeros(own_k.shape), own_v.new_zeros(own_v.shape))
        keys, key_grads = (k, v, own_k, own_v), (k_grad, v_grad, *own_grads)
        q_grad = native.attention_backward(q, keys, ctx.tiles, out, log_sum, grads[0], key_grads)
        return q_grad, *((None, None) if ctx.context_grads is not None else (k_grad, v_grad)), *own_grads, None, None


# -------------------- softmax with loss


def softmax_with_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Distributions of rows, and how sure they are.

    Args:
        logits: [num_rows, vocab_size]; may be overwritten.

    Returns:
        p = softmax(logits), [num_rows, vocab_size], and sum(p log p), [num_rows].
    """
    if not _is_native(logits):
        return reference_softmax_with_entropy(logits)
    _, log_sum, dot = native.softmax(logits, None, None, is_written=True)
    return logits, dot - log_sum


def reference_softmax_with_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of `softmax_with_entropy`."""
    probs = torch.softmax(logits, -1)
    return probs, _row_dots(probs, logits) - log_sum_exp(logits.amax(-1), probs)


def soft_cross_entropy_(logits: Tensor, target: Tensor, target_row: Tensor, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Cross entropy of rows against distributions that several of them share.

    Args:
        logits: [num_rows, vocab_size]; with gradients softmax(logits) - target stands there afterwards.
        target: distributions, [num_targets, vocab_size].
        target_row: each row's own, int64, [num_rows].
        with_grad: whether `logits` becomes its gradient.

    Returns:
        -sum(target * log_softmax(logits)), and the largest logit, each [num_rows].
    """
    if not _is_native(logits, target):
        return reference_soft_cross_entropy_(logits, target, target_row, with_grad)
    best, log_sum, dot = native.softmax(logits, target, target_row, with_grad)
    return log_sum - dot, best


def reference_soft_cross_entropy_(
    logits: Tensor, target: Tensor, target_row: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """The definition of `soft_cross_entropy_`."""
    best, probs = logits.amax(-1), torch.softmax(logits, -1)
    # One distribution is read as it is by all of its rows.
    target = target if target.shape[0] == 1 else target[target_row]
    losses = log_sum_exp(best, probs) - _row_dots(logits, target)
    if with_grad:
        torch.sub(probs, target, out=logits)
    return losses, best


def log_sum_exp(best: Tensor, probs: Tensor) -> Tensor:
    """log(sum(exp(logits))) of rows whose largest logit and softmax are known: the largest probability is
    exp(best - log_sum)."""
    return best - probs.amax(-1).log()


def _row_dots(rows: Tensor, others: Tensor) -> Tensor:
    """Dot product of each row with its own other, or with the one other, [num_rows]."""
    return torch.mv(rows, others[0]) if others.shape[0] == 1 else torch.linalg.vecdot(rows, others)


def _is_native(*tensors: Tensor) -> bool:
    return native.library() is not None and all(
        x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors
    )


# -------------------- norm and MLP, whose backwards are written by hand: they are most of what a step holds


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, [..., size]; half precision is normed in float32.

    PyTorch's own is a chain of six operations on a CPU and keeps two copies of its input; on CUDA its fused one is
    taken.
    """
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    if x.dtype in (torch.bfloat16, torch.float16):
        return _RmsNorm.apply(x.float(), weight.float(), eps).to(x.dtype)
    return _RmsNorm.apply(x, weight, eps)


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


def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)), [..., hidden_size].

    Autograd keeps four [num_slots, intermediate_size] tensors where two suffice.
    """
    return _SwiGlu.apply(x, gate_weight, up_weight, down_weight)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
        ctx.save_for_backward(x, gate, up, gate_weight, up_weight, down_weight)
        return F.linear(F.silu(gate).mul_(up), down_weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        size = x.shape[-1]
        grad, x2 = grads[0].reshape(-1, size), x.reshape(-1, size)
        gate, up = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1])
        inner = grad @ down_weight
        activated = F.silu(gate)
        down_grad = grad.t() @ (activated * up)
        up_grad = activated.mul_(inner)
        gate_grad = torch.ops.aten.silu_backward(inner.mul_(up), gate)
        x_grad = (gate_grad @ gate_weight).add_(up_grad @ up_weight)
        return x_grad.reshape(x.shape), gate_grad.t() @ x2, up_grad.t() @ x2, down_grad
