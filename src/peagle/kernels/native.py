"""Float32 matrix products and attention in C, for x86 processors with AVX-512 (`kernels.c`): built with the package.

PyTorch's library keeps its AVX-512 kernels for Intel's processors, and none has attention with a backward that is not
several products and as many passes over the scores. Where the kernels were not built, the processor lacks AVX-512 or
`PEAGLE_NATIVE=0` is set, `is_available()` is False and callers do without.

Work is shared by the threads that PyTorch has, in parts that write apart, so that the numbers do not depend on how many
there are.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SWITCH = "PEAGLE_NATIVE"
_PANEL, _ROWS = 64, 112  # PANEL and STRIP of kernels.c
# Fewer multiply-adds than this are not worth a second thread.
_WORTH_SHARING = 1 << 20
# Multiply-adds in the time of one number of SwiGLU or softmax.
_PER_ELEMENT = 64
_size, _pointer = ctypes.c_ssize_t, ctypes.c_void_p


# The structs of kernels.c.


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class _Product(ctypes.Structure):
    _fields_ = (
        *(*_fields(_pointer, "c"), *_fields(_size, "c_row")),
        *(*_fields(_pointer, "a"), *_fields(_size, "a_row a_col")),
        *(*_fields(_pointer, "b"), *_fields(_size, "b_row b_col m n k"), *_fields(_pointer, "room")),
    )


class _Swiglu(ctypes.Structure):
    _fields_ = (*_fields(_pointer, "gate up hidden grad up_grad"), *_fields(_size, "n"))


class _Softmax(ctypes.Structure):
    _fields_ = (
        *(*_fields(_pointer, "x"), *_fields(_size, "m n")),
        *(*_fields(_pointer, "wanted"), *_fields(_size, "wanted_row"), *_fields(_pointer, "label")),
        *(*_fields(_size, "is_written"), *_fields(_pointer, "best log_sum dot choice")),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (*_fields(_pointer, "data"), *_fields(_size, "row head"))


class _Tile(ctypes.Structure):
    _fields_ = (
        *_fields(_size, "own_first own_last context_first context_last masked mask_row"),
        *(*_fields(_pointer, "mask"), *_fields(_size, "places"), *_fields(_pointer, "place")),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *_fields(_Tensor, "q k v own_k own_v out grad q_grad k_grad v_grad own_k_grad own_v_grad"),
        *_fields(_pointer, "log_sum"),
        ("tiles", ctypes.POINTER(_Tile)),
        *_fields(_size, "num_tiles num_queries group head_dim first_head last_head most_rows most_keys is_backward"),
        *_fields(_pointer, "turns"),
        *(*_fields(ctypes.c_float, "scale"), *_fields(_pointer, "room")),
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
    [num_own, num_masked]"""
    place: Tensor | None = None
    """Queries of one place are equal, and all come from one tensor: which of them gets their gradient is left open.
    From 0 on, int32, [num_own]. None: all differ."""


@dataclass(frozen=True)
class Seen:
    """Keys and values, or their gradients: those of the context, and the queries' own (or None)."""

    k: Tensor
    """[num_keys, kv_heads, head_dim]"""
    v: Tensor
    own_k: Tensor | None
    """[num_queries, kv_heads, head_dim]"""
    own_v: Tensor | None


def is_available() -> bool:
    """Whether the kernels were built and this processor runs them."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("peagle.kernels._kernels")
    if os.environ.get(_SWITCH) == "0" or spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:  # built for another machine
        return None
    if not library.peagle_supported():
        return None
    for name in ("product", "swiglu", "swiglu_backward", "softmax", "attention"):
        solve = getattr(library, f"peagle_{name}")
        solve.argtypes, solve.restype = (_pointer,), None
    library.peagle_share.argtypes, library.peagle_share.restype = (*(_pointer,) * 3, _size, _size), None
    library.peagle_attention_room.argtypes = (_size, _size, _size, ctypes.c_int)
    library.peagle_product_room.restype = library.peagle_attention_room.restype = _size
    return library


def _loaded() -> ctypes.CDLL:
    library = _library()
    assert library is not None, "ask is_available() first"
    return library


# -------------------- products


def does_product(a: Tensor, b: Tensor) -> bool:
    """Whether `product` takes these: float32 in memory, and rows enough to be worth packing `b`."""
    return (
        a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and a.dim() == b.dim() == 2
        and a.shape[0] >= 32
        and a.shape[1] > 0
        and is_available()
    )


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b without a graph.

    Args:
        a: [rows, inner], any strides.
        b: [inner, columns], any strides.
        out: written if given, [rows, columns], columns next to each other.
    """
    (num_rows, inner), num_columns = a.shape, b.shape[1]
    if out is None:
        out = a.new_empty(num_rows, num_columns)
    assert b.shape[0] == inner
    assert out.shape == (num_rows, num_columns)
    assert out.stride(1) == 1 or num_columns == 1

    def part(index: int, rows: slice, columns: slice) -> _Product:
        some_a, some_b, into = a[rows], b[:, columns], out[rows, columns]
        return _Product(
            *(into.data_ptr(), into.stride(0)),
            *(some_a.data_ptr(), *some_a.stride(), some_b.data_ptr(), *some_b.stride()),
            *(into.shape[0], into.shape[1], inner, rooms[index].data_ptr()),
        )

    threads = _threads_for(num_rows * inner * num_columns)
    whole = slice(0, num_rows), slice(0, num_columns)
    if num_columns >= threads * _PANEL:
        parts = [(whole[0], some) for some in _cuts(num_columns, _PANEL, threads)]
    else:
        parts = [(some, whole[1]) for some in _cuts(num_rows, _ROWS, threads)]
    rooms = _product_rooms(len(parts))
    _solve("peagle_product", [part(index, *cut) for index, cut in enumerate(parts)])
    return out


_kept = threading.local()


def _product_rooms(count: int) -> Tensor:
    """Room for the packed panels of each part, kept: fresh pages would cost as much as what is written to them."""
    if not hasattr(_kept, "rooms") or len(_kept.rooms) < count:
        _kept.rooms = torch.empty(count, _loaded().peagle_product_room(), dtype=torch.float32)
    found: Tensor = _kept.rooms
    return found


# -------------------- elementwise


def does_elements(*tensors: Tensor) -> bool:
    """Whether `swiglu` and `softmax` take these: float32 in memory, one number after the other."""
    return is_available() and all(
        x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors
    )


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, without a graph."""
    out = torch.empty_like(gate)
    _solve_swiglu("peagle_swiglu", gate, up, out)
    return out


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up once more, and the gradients of `gate` and `up`, from that of the former.

    Args:
        gate, up: as given to `swiglu`.
        grad: of what it returned; overwritten.
    """
    hidden, up_grad = torch.empty_like(gate), torch.empty_like(gate)
    _solve_swiglu("peagle_swiglu_backward", gate, up, hidden, grad, up_grad)
    return hidden, grad, up_grad


def _solve_swiglu(name: str, *tensors: Tensor) -> None:
    length, absent = tensors[0].numel(), [None] * (5 - len(tensors))
    cuts = _cuts(length, 1024, _threads_for(_PER_ELEMENT * length))
    starts = [[x.data_ptr() + x.element_size() * some.start for x in tensors] for some in cuts]
    _solve(name, [_Swiglu(*at, *absent, some.stop - some.start) for at, some in zip(starts, cuts)])


@dataclass(frozen=True)
class Softmax:
    """What is known of rows of logits."""

    best: Tensor
    """The largest, [num_rows]."""
    log_sum: Tensor
    """log(sum(exp(logits))), [num_rows]."""
    dot: Tensor
    """Sum of logits times their wanted distribution, or times their own, [num_rows]."""
    choice: Tensor | None
    """Place of the largest, int64, [num_rows]; not looked for where there is a wanted distribution."""


def softmax(logits: Tensor, wanted: Tensor | None, label_of_row: Tensor | None, is_written: bool) -> Softmax:
    """Softmax of rows, with what a loss asks of it, in three passes over a row while it is in a core's cache.

    Args:
        logits: [num_rows, vocab_size]; with `is_written` softmax(logits) stands there afterwards, less the wanted
            distribution.
        wanted: distributions, [num_labels, vocab_size]; None if there are none.
        label_of_row: each row's own, int64, [num_rows].
        is_written: whether `logits` is written.
    """
    (num_rows, vocab_size), labels = logits.shape, None if label_of_row is None else label_of_row.contiguous()
    best, log_sum, dot = (logits.new_empty(num_rows) for _ in range(3))
    choice = logits.new_empty(num_rows, dtype=torch.int64) if wanted is None else None

    def part(some: slice) -> _Softmax:
        of = [None if x is None else x[some].data_ptr() for x in (logits, labels, best, log_sum, dot, choice)]
        return _Softmax(
            *(of[0], some.stop - some.start, vocab_size),
            *((None, 0) if wanted is None else (wanted.data_ptr(), wanted.stride(0))),
            *(of[1], is_written, *of[2:]),
        )

    _solve("peagle_softmax", [part(some) for some in _cuts(num_rows, 1, _threads_for(_PER_ELEMENT * logits.numel()))])
    return Softmax(best, log_sum, dot, choice)


# -------------------- attention


def does_attention(q: Tensor) -> bool:
    """Whether `attention` takes such queries, with keys and values of their type: float32 in memory, whole panels."""
    return q.dtype == torch.float32 and q.device.type == "cpu" and q.shape[-1] % _PANEL == 0 and is_available()


def attention_forward(q: Tensor, seen: Seen, tiles: Sequence[Tile]) -> tuple[Tensor, Tensor]:
    """Attention of queries to context keys, and to their own.

    Args:
        q: [num_queries, heads, head_dim].
        seen: keys and values.
        tiles: in order, covering the queries.

    Returns:
        Its output, shaped like `q`, and the logarithm of each query's sum of exp(scores), [heads, num_queries].
    """
    q, seen = _dense(q), _dense_seen(seen)
    out, log_sum = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    _attend(q, seen, tiles, out, log_sum, None, None, None)
    return out, log_sum


def attention_backward(
    q: Tensor, seen: Seen, tiles: Sequence[Tile], out: Tensor, log_sum: Tensor, grad: Tensor, grads: Seen
) -> Tensor:
    """The gradients of `attention_forward`.

    Args:
        q, seen, tiles: as given to the forward.
        out, log_sum: what it returned.
        grad: of `out`.
        grads: of keys and values, context and own, with the numbers of a head next to each other; added to.

    Returns:
        The gradient of `q`.
    """
    q, seen, grad = _dense(q), _dense_seen(seen), _dense(grad)
    assert all(x is None or x.stride(-1) == 1 for x in (grads.k, grads.v, grads.own_k, grads.own_v))
    q_grad = torch.empty_like(q)
    _attend(q, seen, tiles, out, log_sum, grad, q_grad, grads)
    return q_grad


def _attend(
    q: Tensor,
    seen: Seen,
    tiles: Sequence[Tile],
    out: Tensor,
    log_sum: Tensor,
    grad: Tensor | None,
    q_grad: Tensor | None,
    grads: Seen | None,
) -> None:
    library, (num_queries, heads, head_dim), kv_heads = _loaded(), q.shape, seen.k.shape[1]
    masks = [tile.mask if tile.mask.stride(-1) == 1 else tile.mask.contiguous() for tile in tiles]
    laid = (_Tile * len(tiles))(
        *(
            _Tile(
                *(tile.own.start, tile.own.stop, tile.context.start, tile.context.stop),
                *(mask.shape[1], mask.stride(0), mask.data_ptr()),
                *((0, None) if tile.place is None else (int(tile.place.max()) + 1, tile.place.data_ptr())),
            )
            for tile, mask in zip(tiles, masks)
        )
    )
    most_rows = max(tile.own.stop - tile.own.start for tile in tiles)
    last_of: dict[int, int] = {}
    for tile in tiles:
        last_of[tile.context.start] = max(last_of.get(tile.context.start, 0), tile.context.stop)
    most_keys = max(last - first for first, last in last_of.items())
    given = [q, seen.k, seen.v, seen.own_k, seen.own_v, out, grad, q_grad]
    given += [None] * 4 if grads is None else [grads.k, grads.v, grads.own_k, grads.own_v]
    is_backward = grads is not None
    # Heads of keys are independent; threads that have no head for themselves share one.
    threads, group = num_threads(), heads // kv_heads
    num_teams = math.gcd(threads, kv_heads)
    cuts = [cut for cut in _cuts(kv_heads, 1, num_teams) for _ in range(threads // num_teams)]
    rooms = q.new_empty(len(cuts), library.peagle_attention_room(most_rows, most_keys, head_dim, is_backward))
    turns = torch.zeros(kv_heads, 1 + len(tiles) * group, dtype=torch.int64)

    def part(own_heads: slice, room: Tensor) -> _Attention:
        return _Attention(
            *(_given(tensor) for tensor in given),
            log_sum.data_ptr(),
            laid,
            *(len(tiles), num_queries, group, head_dim, own_heads.start, own_heads.stop),
            *(most_rows, most_keys, is_backward, turns.data_ptr(), head_dim**-0.5, room.data_ptr()),
        )

    _solve("peagle_attention", [part(some, room) for some, room in zip(cuts, rooms)])


def _given(x: Tensor | None) -> _Tensor:
    return _Tensor(None, 0, 0) if x is None else _Tensor(x.data_ptr(), x.stride(0), x.stride(1))


def _dense(x: Tensor) -> Tensor:
    """With the numbers of a head next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense_seen(seen: Seen) -> Seen:
    own = (None if x is None else _dense(x) for x in (seen.own_k, seen.own_v))
    return Seen(_dense(seen.k), _dense(seen.v), *own)


# -------------------- threads


@functools.cache
def _parallel() -> int | None:
    """Address of `GOMP_parallel` of the OpenMP library that PyTorch has loaded, if it has one."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return None
    return ctypes.cast(found, _pointer).value


def num_threads() -> int:
    """Threads that share the work: PyTorch's, or one where they can't be borrowed."""
    return torch.get_num_threads() if _parallel() else 1


def _threads_for(multiply_adds: int) -> int:
    return num_threads() if multiply_adds >= _WORTH_SHARING else 1


def _cuts(length: int, unit: int, most: int) -> list[slice]:
    """At most so many ranges of whole units, covering `length`."""
    units = -(-length // unit)
    count = max(1, min(most, units))
    ends = [min(length, -(-units * (place + 1) // count) * unit) for place in range(count)]
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends)]


def _solve(name: str, parts: Sequence[ctypes.Structure]) -> None:
    """Run a function of kernels.c on each part; several at once, by PyTorch's threads."""
    solve: Any = getattr(_loaded(), name)
    if len(parts) == 1:
        solve(ctypes.byref(parts[0]))
        return
    kind = type(parts[0])
    laid = (kind * len(parts))(*parts)
    _loaded().peagle_share(_parallel(), solve, laid, ctypes.sizeof(kind), len(parts))
