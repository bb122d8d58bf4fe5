"""What a training step computes besides matrix products, one function each, its definition in PyTorch beside it.

`attend` is the C kernel, by name: a caller asks `native_attention_problem` once, when settings are resolved. The loss's
functions take C where it is there and PyTorch elsewhere: the numbers are the same but for rounding. Below them stands
the C library (`kernels.c`) by ctypes: loaded once, its structs filled, its work shared by PyTorch's threads; parts of a
call write apart or in one order, so that no number depends on how many threads there are.
"""

import ctypes
import functools
import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Queries of a tile. The kernel passes over what a few neighbours do not see, so that only the keys count, which each
# tile reads once: flat from 60 to 240.
TILE_ROWS = 168
_HEAD_UNIT = 64  # a head is whole vectors of either build
# Elements of a softmax below which a second thread costs more than it saves.
_MIN_SHARED_ELEMENTS = 1 << 14


# -------------------- attention


@dataclass(frozen=True)
class Tile:
    """Queries that are solved together, and what they see."""

    own: slice
    """The queries, and with own keys those too."""
    context: slice
    """The context keys that some of them see."""
    mask: Tensor
    """0 where seen, -inf where not, over the LAST columns only, own keys included: the others are seen by all.
    float32, [num_own, num_masked]"""
    distinct_id: Tensor | None = None
    """Queries with the same id are equal, and all come from one tensor: which of them gets their gradient is left open.
    From 0 on, int32, [num_own]. None: all differ."""

    @property
    def num_distinct(self) -> int:
        """Distinct queries."""
        return self.own.stop - self.own.start if self.distinct_id is None else int(self.distinct_id.max()) + 1


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
    if _library() is None:
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
        probs = (scores + functional.pad(tile.mask.to(q.dtype), (num_unmasked, 0))).softmax(-1)
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
        q = _dense(q)
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        _native_attention(q, (k, v, own_k, own_v), tiles, out, log_sum, None)
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
        key_grads = (k_grad, v_grad, *own_grads)
        assert all(x is None or x.stride(-1) == 1 for x in key_grads)
        grad, q_grad = _dense(grads[0]), torch.empty_like(q)
        _native_attention(q, (k, v, own_k, own_v), ctx.tiles, out, log_sum, [grad, q_grad, *key_grads])
        return q_grad, *((None, None) if ctx.context_grads is not None else (k_grad, v_grad)), *own_grads, None, None


# -------------------- softmax with loss


def softmax_(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distributions of rows, and what a loss asks of them.

    Args:
        logits: [num_rows, vocab_size]; may be overwritten.

    Returns:
        p = softmax(logits), [num_rows, vocab_size]; log(sum(exp(logits))), sum(p * logits) and the first place of the
        largest logit (int64), each [num_rows].
    """
    if not _is_native(logits):
        return reference_softmax_(logits)
    best, log_sum, dot = _native_softmax(logits, None, None, is_written=True)
    return logits, log_sum, dot, best


def reference_softmax_(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The definition of `softmax_`."""
    probs, best = torch.softmax(logits, -1), logits.argmax(-1)
    return probs, _log_sum_exp(logits, probs, best), _row_dots(probs, logits), best


def soft_cross_entropy_(logits: Tensor, target: Tensor, target_row: Tensor, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Cross entropy of rows against distributions that several of them share.

    Args:
        logits: [num_rows, vocab_size]; with gradients softmax(logits) - target stands there afterwards.
        target: distributions, [num_targets, vocab_size].
        target_row: each row's own, int64, [num_rows].
        with_grad: whether `logits` becomes its gradient.

    Returns:
        -sum(target * log_softmax(logits)), and the first place of the largest logit (int64), each [num_rows].
    """
    if not _is_native(logits, target):
        return reference_soft_cross_entropy_(logits, target, target_row, with_grad)
    best, log_sum, dot = _native_softmax(logits, target, target_row, with_grad)
    return log_sum - dot, best


def reference_soft_cross_entropy_(
    logits: Tensor, target: Tensor, target_row: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """The definition of `soft_cross_entropy_`."""
    probs, best = torch.softmax(logits, -1), logits.argmax(-1)
    # One distribution is read as it is by all of its rows.
    target = target if target.shape[0] == 1 else target[target_row]
    losses = _log_sum_exp(logits, probs, best) - _row_dots(logits, target)
    if with_grad:
        torch.sub(probs, target, out=logits)
    return losses, best


def _log_sum_exp(logits: Tensor, probs: Tensor, best: Tensor) -> Tensor:
    """log(sum(exp(logits))) of rows whose softmax is known: the largest probability is exp(largest - log_sum)."""
    at_best = best[:, None]
    return (logits.gather(1, at_best) - probs.gather(1, at_best).log())[:, 0]


def _row_dots(rows: Tensor, others: Tensor) -> Tensor:
    """Dot product of each row with its own other, or with the one other, [num_rows]."""
    return torch.mv(rows, others[0]) if others.shape[0] == 1 else torch.linalg.vecdot(rows, others)


def _is_native(*tensors: Tensor) -> bool:
    return _library() is not None and all(
        x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors
    )


# -------------------- norm and MLP, whose backwards are written by hand: they are most of what a step holds


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, [..., size]; half precision is normed in float32.

    PyTorch's own is a chain of six operations on a CPU and keeps two copies of its input; on CUDA its fused one is
    taken.
    """
    if x.is_cuda:
        return functional.rms_norm(x, weight.shape, weight, eps)
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight' + bias, [..., num_outputs]; the weight's gradient goes where `weight_grad` puts it."""
    if getattr(weight, "main_grad", None) is None:
        return functional.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight)
    return out if bias is None else out + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        x_grad = (grad @ weight).reshape(x.shape) if ctx.needs_input_grad[0] else None
        return x_grad, weight_grad(weight, grad.t(), x.reshape(-1, x.shape[-1]))


def weight_grad(weight: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    """A weight's gradient a @ b, or None where it was added to `weight.main_grad`, float32, at once.

    A narrow weight's gradients of many blocks then are neither rounded one by one nor written and read again.
    """
    total: Tensor | None = getattr(weight, "main_grad", None)
    if total is None:
        return a @ b
    add_product_(total, a, b)
    return None


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, which may be in a narrower type than the total; a GPU rounds nothing in between."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)), [..., hidden_size].

    Autograd keeps four [num_slots, intermediate_size] tensors where two suffice, and of a long context none.
    """
    return _SwiGlu.apply(x, gate_weight, up_weight, down_weight)


# Rows whose inner tensors exist at a time in the backward, and from how many on none is kept from the forward.
_SWIGLU_ROWS, _SWIGLU_LONG = 8192, 32768


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        weights = gate_weight, up_weight, down_weight
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) < _SWIGLU_LONG:
            gate, up = functional.linear(x, gate_weight), functional.linear(x, up_weight)
            ctx.save_for_backward(x, *weights, gate, up)
            return functional.linear(functional.silu(gate).mul_(up), down_weight)
        ctx.save_for_backward(x, *weights)
        out = torch.empty_like(rows)
        for given, made in zip(rows.split(_SWIGLU_ROWS), out.split(_SWIGLU_ROWS)):
            inner = functional.silu(given @ gate_weight.t()).mul_(given @ up_weight.t())
            torch.mm(inner, down_weight.t(), out=made)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_weight, up_weight, down_weight, *kept = ctx.saved_tensors
        x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        flat = [t.reshape(-1, t.shape[-1]).split(_SWIGLU_ROWS) for t in (x, grads[0], x_grad, *kept)]
        sums: list[Tensor | None] = [None, None, None]
        for given, grad, given_grad, *inside in zip(*flat):
            gate, up = inside or (given @ gate_weight.t(), given @ up_weight.t())
            inner = grad @ down_weight
            activated = functional.silu(gate)
            down_grad = weight_grad(down_weight, grad.t(), activated * up)
            up_grad = activated.mul_(inner)
            gate_grad = torch.ops.aten.silu_backward(inner.mul_(up), gate)
            torch.mm(gate_grad, gate_weight, out=given_grad)
            given_grad.addmm_(up_grad, up_weight)
            found = (
                weight_grad(gate_weight, gate_grad.t(), given),
                weight_grad(up_weight, up_grad.t(), given),
                down_grad,
            )
            sums = [one if total is None or one is None else total + one for total, one in zip(sums, found)]
        return x_grad, *sums


# -------------------- the C library

_size, _pointer = ctypes.c_ssize_t, ctypes.c_void_p


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class _Softmax(ctypes.Structure):
    _fields_ = (
        *(*_fields(_pointer, "x"), *_fields(_size, "m n"), *_fields(_pointer, "target")),
        *(*_fields(_size, "target_stride"), *_fields(_pointer, "target_row"), *_fields(_size, "is_written")),
        *_fields(_pointer, "best log_sum dot"),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (*_fields(_pointer, "data"), *_fields(_size, "row head"))


class _Tile(ctypes.Structure):
    _fields_ = (
        *_fields(_size, "own_first own_last context_first context_last num_masked mask_row"),
        *(*_fields(_pointer, "mask"), *_fields(_size, "num_distinct"), *_fields(_pointer, "distinct_id")),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *_fields(_Tensor, "q k v own_k own_v out grad q_grad k_grad v_grad own_k_grad own_v_grad"),
        *(*_fields(_pointer, "log_sum"), ("tiles", ctypes.POINTER(_Tile))),
        *_fields(_size, "num_tiles num_queries group head_dim first_head last_head max_rows max_keys is_backward"),
        *(*_fields(_pointer, "turns"), *_fields(ctypes.c_float, "scale"), *_fields(_pointer, "workspace")),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The kernels for this processor; None if they were not built, it has no AVX2, or `PEAGLE_NATIVE=0` is set."""
    if os.environ.get("PEAGLE_NATIVE") == "0":
        return None
    # PyTorch knows the processor; ATEN_CPU_CAPABILITY=avx2 holds both of us to AVX2.
    builds = {"AVX512": ("_avx512", "_avx2"), "AVX2": ("_avx2",)}
    for build in builds.get(torch.backends.cpu.get_cpu_capability(), ()):
        spec = importlib.util.find_spec(f"{__package__}.{build}")
        if spec is None or spec.origin is None:
            continue
        try:
            loaded = ctypes.CDLL(spec.origin)
        except OSError:  # built for another machine
            continue
        for solve in (loaded.peagle_softmax, loaded.peagle_attention):
            solve.argtypes, solve.restype = (_pointer,), None
        loaded.peagle_share.argtypes, loaded.peagle_share.restype = (*(_pointer,) * 3, _size, _size), None
        loaded.peagle_attention_workspace.argtypes = (_size, _size, _size, ctypes.c_int)
        loaded.peagle_attention_workspace.restype = _size
        return loaded
    return None


def _loaded() -> ctypes.CDLL:
    loaded = _library()
    assert loaded is not None, "no kernels: ask for them first"
    return loaded


def _native_softmax(
    logits: Tensor, target: Tensor | None, target_row: Tensor | None, is_written: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of rows in three passes over a row while it is in a core's cache.

    Args:
        logits: contiguous float32, [num_rows, vocab_size]; with `is_written` softmax(logits) stands there afterwards,
            minus the target.
        target: distributions, rows contiguous, [num_targets, vocab_size]; None if there are none.
        target_row: each row's own, int64, [num_rows].
        is_written: whether `logits` is written.

    Returns:
        The first place of the largest logit (int64), log(sum(exp(logits))), and the sum of logits times the target (or
        times their own softmax), each [num_rows].
    """
    num_rows, vocab_size = logits.shape
    row = None if target_row is None else target_row.contiguous()
    stats = [logits.new_empty(num_rows, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.float32)]
    threads = num_native_threads() if logits.numel() >= _MIN_SHARED_ELEMENTS else 1
    parts = []
    for some in _cuts(num_rows, threads):
        at = [None if x is None else x[some].data_ptr() for x in (logits, row, *stats)]
        own_target = (None, 0) if target is None else (target.data_ptr(), target.stride(0))
        parts.append(_Softmax(at[0], some.stop - some.start, vocab_size, *own_target, at[1], is_written, *at[2:]))
    _solve("peagle_softmax", parts)
    return stats[0], stats[1], stats[2]


def _native_attention(
    q: Tensor,
    keys: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    tiles: Sequence[Tile],
    out: Tensor,
    log_sum: Tensor,
    grads: list[Tensor | None] | None,
) -> None:
    """Fill `out` and `log_sum`; with `grads`, those of `q` and `keys` instead, from that of `out`.

    Args:
        q, out: numbers of a head next to each other, [num_queries, heads, head_dim].
        keys: keys and values of the context, [num_keys, kv_heads, head_dim] each, and the queries' own, or None.
        tiles: in order, covering the queries.
        log_sum: logarithm of each query's sum of exp(scores), [heads, num_queries].
        grads: of `out`, of `q`, and of `keys`, which are added to.
    """
    loaded, (num_queries, heads, head_dim), kv_heads = _loaded(), q.shape, keys[0].shape[1]
    masks = [_dense(tile.mask) for tile in tiles]
    assert all(x is None or x.dtype == torch.float32 for x in (q, *keys, *masks)), "the kernels read float32"
    c_tiles = (_Tile * len(tiles))(
        *(
            _Tile(
                *(tile.own.start, tile.own.stop, tile.context.start, tile.context.stop),
                *(mask.shape[1], mask.stride(0), mask.data_ptr()),
                *((0, None) if tile.distinct_id is None else (tile.num_distinct, tile.distinct_id.data_ptr())),
            )
            for tile, mask in zip(tiles, masks)
        )
    )
    max_rows = max(tile.own.stop - tile.own.start for tile in tiles)
    last_of: dict[int, int] = {}
    for tile in tiles:
        last_of[tile.context.start] = max(last_of.get(tile.context.start, 0), tile.context.stop)
    max_keys = max(last - first for first, last in last_of.items())
    is_backward = grads is not None
    given = [q, *(None if x is None else _dense(x) for x in keys), out, *(grads or [None] * 6)]
    tensors = [_Tensor(None, 0, 0) if x is None else _Tensor(x.data_ptr(), x.stride(0), x.stride(1)) for x in given]
    # Heads of keys are independent; threads that have no head for themselves share one.
    threads, group = num_native_threads(), heads // kv_heads
    num_teams = math.gcd(threads, kv_heads)
    cuts = [cut for cut in _cuts(kv_heads, num_teams) for _ in range(threads // num_teams)]
    spaces = q.new_empty(len(cuts), loaded.peagle_attention_workspace(max_rows, max_keys, head_dim, is_backward))
    turns = torch.zeros(kv_heads, 1 + len(tiles) * group, dtype=torch.int64)
    parts = [
        _Attention(
            *(*tensors, log_sum.data_ptr(), c_tiles, len(tiles), num_queries, group, head_dim, own.start, own.stop),
            *(max_rows, max_keys, is_backward, turns.data_ptr(), head_dim**-0.5, space.data_ptr()),
        )
        for own, space in zip(cuts, spaces)
    ]
    _solve("peagle_attention", parts)


def _dense(x: Tensor) -> Tensor:
    """With the numbers of the last dimension next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _parallel() -> int | None:
    """Address of `GOMP_parallel` of the OpenMP library that PyTorch has loaded, if it has one."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, _pointer).value
    except (AttributeError, OSError):
        return None


def num_native_threads() -> int:
    """Threads that share the work: PyTorch's, or one where they can't be borrowed."""
    return torch.get_num_threads() if _parallel() else 1


def _cuts(length: int, most: int) -> list[slice]:
    """At most so many ranges, covering `length`."""
    count = max(1, min(most, length))
    ends = [-(-length * (place + 1) // count) for place in range(count)]
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends)]


def _solve(name: str, parts: Sequence[ctypes.Structure]) -> None:
    """Run a function of kernels.c on each part; several at once, by PyTorch's threads."""
    loaded, kind = _loaded(), type(parts[0])
    solve: Any = getattr(loaded, name)
    if len(parts) == 1:
        solve(ctypes.byref(parts[0]))
    else:
        loaded.peagle_share(_parallel(), solve, (kind * len(parts))(*parts), ctypes.sizeof(kind), len(parts))
