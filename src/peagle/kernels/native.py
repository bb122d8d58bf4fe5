"""The C library (`kernels.c`) by ctypes: loaded once, its structs filled, its work shared by PyTorch's threads.

Parts of a call write apart or in one order, so that no number depends on how many threads there are.
"""

from __future__ import annotations

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

# Elements of a softmax below which a second thread costs more than it saves.
_MIN_SHARED_ELEMENTS = 1 << 14
# Keys and values, or their gradients: the context's, [num_keys, kv_heads, head_dim] each, and the queries' own (or
# None), [num_queries, kv_heads, head_dim].
KeyValues = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_size, _pointer = ctypes.c_ssize_t, ctypes.c_void_p


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class _Softmax(ctypes.Structure):
    _fields_ = (
        *(*_fields(_pointer, "x"), *_fields(_size, "m n"), *_fields(_pointer, "target")),
        *(*_fields(_size, "target_stride"), *_fields(_pointer, "target_row"), *_fields(_size, "is_written")),
        *_fields(_pointer, "max log_sum dot"),
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


@functools.cache
def library() -> ctypes.CDLL | None:
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
    loaded = library()
    assert loaded is not None, "no kernels: ask library() first"
    return loaded


def softmax(
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
        The largest logit, log(sum(exp(logits))), and the sum of logits times the target (or times their own
        softmax), each [num_rows].
    """
    num_rows, vocab_size = logits.shape
    row = None if target_row is None else target_row.contiguous()
    stats = [logits.new_empty(num_rows) for _ in range(3)]
    threads = num_threads() if logits.numel() >= _MIN_SHARED_ELEMENTS else 1
    parts = []
    for some in _cuts(num_rows, threads):
        at = [None if x is None else x[some].data_ptr() for x in (logits, row, *stats)]
        own_target = (None, 0) if target is None else (target.data_ptr(), target.stride(0))
        parts.append(_Softmax(at[0], some.stop - some.start, vocab_size, *own_target, at[1], is_written, *at[2:]))
    _solve("peagle_softmax", parts)
    return stats[0], stats[1], stats[2]


def attention_forward(q: Tensor, keys: KeyValues, tiles: Sequence[Tile]) -> tuple[Tensor, Tensor]:
    """Attention of queries to context keys, and to their own.

    Args:
        q: [num_queries, heads, head_dim].
        keys: keys and values.
        tiles: in order, covering the queries.

    Returns:
        Its output, shaped like `q`, and the logarithm of each query's sum of exp(scores), [heads, num_queries].
    """
    q = _dense(q)
    out, log_sum = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    _attention(q, keys, tiles, out, log_sum, None)
    return out, log_sum


def attention_backward(
    q: Tensor, keys: KeyValues, tiles: Sequence[Tile], out: Tensor, log_sum: Tensor, grad: Tensor, grads: KeyValues
) -> Tensor:
    """The gradients of `attention_forward`.

    Args:
        q, keys, tiles: as given to the forward.
        out, log_sum: what it returned.
        grad: of `out`.
        grads: of keys and values, the numbers of a head next to each other; added to.

    Returns:
        The gradient of `q`.
    """
    q, grad = _dense(q), _dense(grad)
    assert all(x is None or x.stride(-1) == 1 for x in grads)
    q_grad = torch.empty_like(q)
    _attention(q, keys, tiles, out, log_sum, [grad, q_grad, *grads])
    return q_grad


def _attention(
    q: Tensor,
    keys: KeyValues,
    tiles: Sequence[Tile],
    out: Tensor,
    log_sum: Tensor,
    grads: list[Tensor | None] | None,
) -> None:
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
    threads, group = num_threads(), heads // kv_heads
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


def num_threads() -> int:
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
