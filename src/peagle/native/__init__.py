"""Float32 matrix products and attention in C, for x86 processors with AVX-512 (`kernels.c`): built with the package.

PyTorch's library keeps its AVX-512 kernels for Intel's processors, and none has attention with a backward that is not
several products and as many passes over the scores. Where the kernels were not built, the processor lacks AVX-512 or
`PEAGLE_NATIVE=0` is set, `is_available()` is False and callers do without.

Work is shared by as many Python threads as PyTorch has (the calls let go of Python's lock), so that the numbers do not
depend on how many there are.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

_SWITCH = "PEAGLE_NATIVE"
_PANEL, _ROWS = 64, 112  # PANEL and STRIP of kernels.c
# Fewer multiply-adds than this are not worth a second thread.
_WORTH_SHARING = 1 << 22
# Multiply-adds in the time of one number of SwiGLU or softmax.
_PER_ELEMENT = 64
_size = ctypes.c_ssize_t


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("row", _size), ("head", _size))


class _Tile(ctypes.Structure):
    _fields_ = (
        *((name, _size) for name in ["own_first", "own_last", "context_first", "context_last", "masked", "mask_row"]),
        *(("mask", ctypes.c_void_p), ("places", _size), ("place", ctypes.c_void_p)),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _Tensor) for name in ["q", "k", "v", "own_k", "own_v", "out", "grad"]),
        *((name, _Tensor) for name in ["q_grad", "k_grad", "v_grad", "own_k_grad", "own_v_grad"]),
        ("log_sum", ctypes.c_void_p),
        ("tiles", ctypes.POINTER(_Tile)),
        *((name, _size) for name in ["num_tiles", "num_queries", "group", "head_dim", "first_head", "last_head"]),
        ("scale", ctypes.c_float),
        ("room", ctypes.c_void_p),
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
    spec = importlib.util.find_spec(f"{__name__}._kernels")
    if os.environ.get(_SWITCH) == "0" or spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:  # built for another machine
        return None
    if not library.peagle_supported():
        return None
    pointer = ctypes.c_void_p
    library.peagle_product.argtypes = (
        *(pointer, _size),
        *(pointer, _size, _size, pointer, _size, _size),
        *(_size, _size, _size, pointer),
    )
    library.peagle_product.restype = None
    library.peagle_swiglu.argtypes = (pointer, pointer, pointer, _size)
    library.peagle_swiglu_backward.argtypes = (*(pointer,) * 5, _size)
    library.peagle_softmax.argtypes = (
        *(pointer, _size, _size, _size, pointer, _size, pointer),
        *(ctypes.c_int, pointer, pointer, pointer, pointer),
    )
    library.peagle_swiglu.restype = library.peagle_swiglu_backward.restype = library.peagle_softmax.restype = None
    library.peagle_attention.argtypes = (ctypes.POINTER(_Attention), _size, _size, ctypes.c_int)
    library.peagle_attention.restype = None
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

    def part(rows: slice, columns: slice) -> None:
        some_a, some_b, into = a[rows], b[:, columns], out[rows, columns]
        _loaded().peagle_product(
            *(into.data_ptr(), into.stride(0)),
            *(some_a.data_ptr(), *some_a.stride(), some_b.data_ptr(), *some_b.stride()),
            *(into.shape[0], into.shape[1], inner, _product_room()),
        )

    threads = _threads_for(num_rows * inner * num_columns)
    whole = slice(0, num_rows), slice(0, num_columns)
    if num_columns >= threads * _PANEL:
        _share([functools.partial(part, whole[0], some) for some in _cuts(num_columns, _PANEL, threads)])
    else:
        _share([functools.partial(part, some, whole[1]) for some in _cuts(num_rows, _ROWS, threads)])
    return out


_rooms = threading.local()


def _product_room() -> int:
    """Room for packed panels, one for each thread: fresh pages would cost as much as what is written to them."""
    if not hasattr(_rooms, "product"):
        _rooms.product = torch.empty(_loaded().peagle_product_room(), dtype=torch.float32)
    found: int = _rooms.product.data_ptr()
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

    def part(some: slice) -> None:
        of = [x.view(-1)[some] for x in (gate, up, out)]
        _loaded().peagle_swiglu(*(x.data_ptr() for x in of), of[0].numel())

    _share_elements(part, gate.numel())
    return out


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up once more, and the gradients of `gate` and `up`, from that of the former.

    Args:
        gate, up: as given to `swiglu`.
        grad: of what it returned; overwritten.
    """
    hidden, up_grad = torch.empty_like(gate), torch.empty_like(gate)

    def part(some: slice) -> None:
        of = [x.view(-1)[some] for x in (gate, up, grad, hidden, up_grad)]
        _loaded().peagle_swiglu_backward(*(x.data_ptr() for x in of), of[0].numel())

    _share_elements(part, gate.numel())
    return hidden, grad, up_grad


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

    def part(some: slice) -> None:
        of = [None if x is None else x[some].data_ptr() for x in (logits, labels, best, log_sum, dot, choice)]
        _loaded().peagle_softmax(
            *(of[0], vocab_size, some.stop - some.start, vocab_size),
            *((None, 0) if wanted is None else (wanted.data_ptr(), wanted.stride(0))),
            *(of[1], is_written, *of[2:]),
        )

    threads = _threads_for(_PER_ELEMENT * logits.numel())
    _share([functools.partial(part, some) for some in _cuts(num_rows, 1, threads)])
    return Softmax(best, log_sum, dot, choice)


def _share_elements(part: Callable[[slice], None], length: int) -> None:
    threads = _threads_for(_PER_ELEMENT * length)
    _share([functools.partial(part, some) for some in _cuts(length, 1024, threads)])


# -------------------- attention


def does_attention(q: Tensor) -> bool:
    """Whether `attention` takes such queries: float32 in memory, heads of whole panels."""
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
        grads: of the context's keys and values, which are added to, and of the own ones, which are written.

    Returns:
        The gradient of `q`.
    """
    q, seen, grad = _dense(q), _dense_seen(seen), _dense(grad)
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
    room_size = library.peagle_attention_room(most_rows, most_keys, head_dim, is_backward)

    def part(own_heads: slice) -> None:
        room = q.new_empty(room_size)
        call = _Attention(
            *(_given(tensor) for tensor in given),
            log_sum.data_ptr(),
            laid,
            *(len(tiles), num_queries, heads // kv_heads, head_dim, own_heads.start, own_heads.stop),
            head_dim**-0.5,
            room.data_ptr(),
        )
        library.peagle_attention(call, most_rows, most_keys, is_backward)

    _share([functools.partial(part, some) for some in _cuts(kv_heads, 1, torch.get_num_threads())])


def _given(x: Tensor | None) -> _Tensor:
    return _Tensor(None, 0, 0) if x is None else _Tensor(x.data_ptr(), x.stride(0), x.stride(1))


def _dense(x: Tensor) -> Tensor:
    """With the numbers of a head next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense_seen(seen: Seen) -> Seen:
    own = (None if x is None else _dense(x) for x in (seen.own_k, seen.own_v))
    return Seen(_dense(seen.k), _dense(seen.v), *own)


# -------------------- threads


def _threads_for(multiply_adds: int) -> int:
    return torch.get_num_threads() if multiply_adds >= _WORTH_SHARING else 1


def _cuts(length: int, unit: int, most: int) -> list[slice]:
    """At most so many ranges of whole units, covering `length`."""
    units = -(-length // unit)
    count = max(1, min(most, units))
    ends = [min(length, -(-units * (place + 1) // count) * unit) for place in range(count)]
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends)]


def _share(parts: list[Callable[[], None]]) -> None:
    """Run all, the first in this thread."""
    waiting = [_pool().submit(one) for one in parts[1:]]
    try:
        parts[0]()
    finally:  # what they write to must outlive them
        for one in waiting:
            one.exception()
    for one in waiting:
        one.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1), thread_name_prefix="peagle-native")


# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
