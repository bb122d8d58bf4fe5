"""A pretended CUDA device: tensors that say they are on one, live on the CPU, and count what they would cost there.

`pretend()` makes `torch.device("cuda")` usable without a GPU or a CUDA build. Code under it takes the branches that it
takes on a GPU, and the device

- refuses an operation that mixes devices, as CUDA does;
- counts kernels, copies, waits of the host (synchronisations), multiply-adds and bytes, by operation and by place;
- follows the live memory, tensor by tensor, and who holds it at its highest.

With `ghost=True` numbers exist as shapes only (on `meta`), integers and booleans for real: a step of an 8B model's size
runs in seconds, and whatever depends on indices is exact. What depends on values is not: a comparison of two floats is
False, a float that is read back is `PLACEHOLDER`.

Counted: operations as PyTorch dispatches them, sizes, storages. From tables: kernels of an operation (`_KERNELS`; one
where nothing is said), whether it reads its target (`_bytes_of`), and the fused operations that a GPU has and a CPU has
not: RMS norm, attention, FlexAttention, the loss kernel, multi-tensor optimizers. Not modelled: the allocator's
fragmentation, workspaces of cuBLAS and of sorts, several GPUs.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
PLACEHOLDER = 2.0
"""What a float of `meta` reads as: a gradient norm of 2 is clipped, as large ones are."""

# Launches of one call. A sort of CUDA's is a handful of radix passes, nonzero a count, a scan and a scatter.
_KERNELS = {
    "sort": 5, "argsort": 5, "nonzero": 3, "unique_consecutive": 6, "_unique2": 8, "bincount": 4, "topk": 3,
    "embedding_dense_backward": 6, "cumsum": 2, "cumprod": 2, "constant_pad_nd": 2, "masked_select": 4,
}  # fmt: skip
_NO_KERNEL = {
    "alias", "detach", "empty", "empty_like", "empty_strided", "equal", "lift_fresh", "new_empty", "new_empty_strided",
    "record_stream", "resize_", "set_", "view", "_local_scalar_dense", "_unsafe_view", "_reshape_alias", "is_same_size",
}  # fmt: skip
# A multi-tensor launch takes at most 320 chunks of 65,536 numbers, of at most 30 tensors (ATen's MultiTensorApply).
_CHUNK, _CHUNKS, _TENSORS = 65_536, 320, 30
_WAITS = {
    "_local_scalar_dense": "item", "nonzero": "nonzero", "_unique2": "unique", "unique_consecutive": "unique",
    "bincount": "bincount", "masked_select": "masked_select", "equal": "equal", "is_nonzero": "item",
}  # fmt: skip
_GATHERS = {"index", "_unsafe_index", "index_select", "gather", "embedding"}
_INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}


@dataclass
class Counts:
    """What happened on the device since `start`."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Launches by operation, copies between host and device included."""
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Times the host waited for the device, by (why, where)."""
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes read and written by everything but matrix products, by (operation, where)."""
    product_bytes: int = 0
    flops: Counter[str] = field(default_factory=Counter)
    """Two per multiply-add, by "product" and "attention"."""
    product_flops: Counter[str] = field(default_factory=Counter)
    """Those of products by place."""
    uploads: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes from host to device, by ("pinned" or "pageable", where)."""
    peak: int = 0
    """Most bytes alive at once."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """Bytes alive then, by where they were allocated; filled if asked for."""

    @property
    def num_kernels(self) -> int:
        return sum(self.kernels.values())

    @property
    def num_waits(self) -> int:
        return sum(self.waits.values())


class Device:
    """The one device: its counts, its storages, and how it was set up."""

    def __init__(self, ghost: bool, total_bytes: int, capability: tuple[int, int], roots: tuple[str, ...]) -> None:
        self.ghost, self.total_bytes, self.capability, self.roots = ghost, total_bytes, capability, roots
        self.counts = Counts()
        self.is_on = threading.local()
        self.live = 0
        self.phase = ""
        """Put before each place: lets a caller tell one part of a step from another."""
        self.keep_places = False
        """Whether each allocation's place is kept, for `Counts.at_peak`."""
        self._bytes: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._noted = 0

    # ---- counting

    @property
    def counting(self) -> bool:
        return getattr(self.is_on, "value", True)

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Inside, operations of this thread are parts of a fused one, counted already."""
        before = self.counting
        self.is_on.value = False
        try:
            yield
        finally:
            self.is_on.value = before

    def start(self) -> None:
        """Count anew; what is alive stays alive."""
        self.counts, self._noted = Counts(peak=self.live), 0

    def where(self, depth: int = 1) -> str:
        """The innermost lines of the project that run."""
        frame, found = sys._getframe(1), []
        while frame is not None and len(found) < depth:
            name = frame.f_code.co_filename
            if any(root in name for root in self.roots):
                found.append(f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        return self.phase + (" < ".join(found) or "autograd")

    def launch(self, name: str, kernels: int, moved: float) -> None:
        """A kernel (or several) of one operation, and the bytes that it reads and writes."""
        if self.counting:
            self.counts.kernels[name] += kernels
            self.counts.moved[name, self.where()] += int(moved)

    def wait(self, why: str) -> None:
        if self.counting:
            self.counts.waits[why, self.where()] += 1

    def upload(self, source: Tensor, is_async: bool) -> None:
        """A copy to the device. Only one out of pinned memory that may run on does not hold the host."""
        if not self.counting:
            return
        pinned = _storage(source) in self.pinned
        self.counts.kernels["copy to device"] += 1
        self.counts.uploads["pinned" if pinned else "pageable", self.where()] += _nbytes(source)
        if not (pinned and is_async):
            self.wait("copy to device")

    # ---- memory

    def hold(self, tensor: Tensor) -> None:
        """Note a tensor's storage, in the allocator's units of 512 bytes, until it is gone."""
        storage = _storage(tensor)
        with self._lock:
            if storage in self._bytes:
                return
            size = -(-storage.nbytes() // 512) * 512
            self._bytes[storage] = size, self.where(3) if self.keep_places else ""
            self.live += size
            weakref.finalize(storage, self._free, size)
            if self.counting and self.live > self.counts.peak:  # a fused kernel has no intermediates
                self.counts.peak = self.live
                if self.keep_places and self.live > 1.002 * self._noted:
                    self._noted = self.live
                    self.counts.at_peak = dict(self._by_place())

    def _free(self, size: int) -> None:
        self.live -= size

    def _by_place(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for size, place in list(self._bytes.values()):
            found[place] += size
        return found


_device: Device | None = None


def device() -> Device:
    """The device in use."""
    assert _device is not None, "only under pretend()"
    return _device


def _storage(tensor: Tensor) -> Any:
    return (tensor.inner if isinstance(tensor, Pretended) else tensor).untyped_storage()


def _nbytes(tensor: Tensor) -> int:
    """Bytes that reading a tensor takes: an expanded one is read once."""
    return min(tensor.numel() * tensor.element_size(), _storage(tensor).nbytes())


def _is_cuda(where: Any) -> bool:
    return where is not None and not isinstance(where, int) and torch.device(where).type == "cuda"


class Pretended(torch.Tensor):
    """A tensor on the device. `inner` holds its numbers, or only their shape.

    PyTorch's C++ side takes it for one of the CPU, so that autograd needs no queue for another device.
    """

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="cpu",
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Pretended) -> None:
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.inner = new.inner

    @property
    def is_cpu(self) -> bool:
        return False

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        wanted = [x for x in (*args, kwargs.get("device")) if isinstance(x, str | torch.device)]
        wanted += [x.device for x in args if isinstance(x, torch.Tensor)]
        if not wanted or _is_cuda(wanted[0]):  # at home: another type, if any
            dtypes = [x for x in (*args, kwargs.get("dtype")) if isinstance(x, torch.dtype)]
            dtypes += [x.dtype for x in args if isinstance(x, torch.Tensor)]
            return super().to(dtypes[0]) if dtypes else super().to(self.dtype, copy=kwargs.get("copy", False))
        dtype = next((x for x in (*args, kwargs.get("dtype")) if isinstance(x, torch.dtype)), self.dtype)
        is_async = bool(kwargs.get("non_blocking") or any(x is True for x in args))
        return torch.ops.aten._to_copy(self, device=torch.device(wanted[0]), non_blocking=is_async, dtype=dtype)

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.to("cpu")

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy")

    def tolist(self) -> Any:
        device().wait("tolist")
        if self.inner.device.type == "meta":
            return torch.full(self.shape, PLACEHOLDER).tolist()
        return self.inner.tolist()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **options})

    def record_stream(self, _stream: Any) -> None:
        pass

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("cannot pin a tensor of the device")

    def is_pinned(self, *_: Any) -> bool:
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Catches factory functions and copies, which have no tensor of the device among their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def on_device(tensor: Tensor) -> Tensor:
    """Make a plain tensor one of the device, without a copy that is counted."""
    return _wrap(tensor.to("meta") if device().ghost and tensor.dtype.is_floating_point else tensor)


def on_host(tensor: Tensor) -> Tensor:
    """A device tensor's numbers, without a copy that is counted."""
    return tensor.inner if isinstance(tensor, Pretended) else tensor


def _wrap(inner: Tensor) -> Pretended:
    device().hold(inner)
    return Pretended(inner)


def _tensors(nested: Any) -> list[Tensor]:
    """The tensors in arguments or results."""
    if isinstance(nested, torch.Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = nested.values()
    elif not isinstance(nested, list | tuple):
        return []
    return [found for one in nested for found in _tensors(one)]


def _each(change: Callable[[Tensor], Any], nested: Any) -> Any:
    """Arguments or results with every tensor changed."""
    if isinstance(nested, torch.Tensor):
        return change(nested)
    if isinstance(nested, dict):
        return {key: _each(change, one) for key, one in nested.items()}
    if isinstance(nested, list | tuple):
        return type(nested)([_each(change, one) for one in nested])
    return nested


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation: whose device, at what cost, with what result."""
    flat = _tensors((args, kwargs))
    ours = [x for x in flat if isinstance(x, Pretended)]
    plain = [x for x in flat if not isinstance(x, Pretended)]
    target = kwargs.get("device")
    name = func._schema.name.split("::")[1]
    if not ours and not _is_cuda(target):
        return _on_host(func, name, args, kwargs)
    dev = device()
    # 1. Copies between host and device.
    if name == "_to_copy" and target is not None and ours and not _is_cuda(target):
        return _download(func, ours[0], kwargs)
    if name == "_to_copy" and plain and _is_cuda(target):
        dev.upload(plain[0], bool(kwargs.get("non_blocking")))
        options = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")}
        inner = func(plain[0], **options) if options.get("dtype") else plain[0].clone()
        return on_device(inner)
    if [x for x in plain if x.dim() > 0]:
        _mixed(func, name, args, kwargs, flat)
        if name == "copy_" and not isinstance(args[0], Pretended):
            with dev.quietly():
                source = args[1].inner
                return args[0] if source.device.type == "meta" else args[0].copy_(source)
    # 2. Waits.
    if name in _WAITS or (func._overloadname == "Tensor" and name == "repeat_interleave"):
        dev.wait(_WAITS.get(name, name))
    if name in _INDEXED and any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        dev.wait("index by bool")
    # 3. The result, and its cost.
    out = _compute(func, name, args, kwargs)
    if dev.counting:
        _count(func, name, args, kwargs, out)
    return _returned(func, args, kwargs, out)


def _on_host(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation of the host alone: as it is, but for pinned memory, which only a CUDA build can allocate."""
    if name == "record_stream":
        return None
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    kwargs = {**kwargs, "pin_memory": False}
    dtype = kwargs.get("dtype") or (
        args[0].dtype if args and isinstance(args[0], Tensor) else torch.get_default_dtype()
    )
    if device().ghost and dtype.is_floating_point:
        kwargs["device"] = "meta"
    made = func(*args, **kwargs)
    device().pinned.add(made.untyped_storage())
    return made


def _pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    made = tensor.clone(memory_format=torch.contiguous_format)
    device().pinned.add(made.untyped_storage())
    return made


def _download(func: Any, source: Pretended, kwargs: dict[str, Any]) -> Tensor:
    dev = device()
    dev.wait("copy to host")
    if dev.counting:
        dev.counts.kernels["copy to host"] += 1
    options = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")}
    if source.inner.device.type == "meta":
        return torch.full(source.shape, PLACEHOLDER, dtype=options.get("dtype") or source.dtype)
    return func(source.inner, **options, device="cpu")


def _mixed(func: Any, name: str, args: Any, kwargs: dict[str, Any], flat: list[Tensor]) -> None:
    """What CUDA takes of the host's tensors: sources of `copy_`, and indices; else an error, as there."""
    dev = device()
    if name == "copy_":
        is_async = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if isinstance(args[0], Pretended):
            dev.upload(args[1], is_async)
        elif not (is_async and _storage(args[0]) in dev.pinned):
            dev.wait("copy to host")
    elif name in _INDEXED:
        values = args[2:3]
        if not isinstance(args[0], Pretended) or any(x.dim() and not isinstance(x, Pretended) for x in values):
            raise RuntimeError(f"device mismatch in {func} at {dev.where()}")
        for index in args[1]:
            if isinstance(index, torch.Tensor) and not isinstance(index, Pretended):
                dev.upload(index, False)
    else:
        shapes = [("cuda" if isinstance(x, Pretended) else "cpu", tuple(x.shape)) for x in flat]
        raise RuntimeError(f"device mismatch in {func} at {dev.where()}: {shapes}")


def _compute(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = _each(on_host, args), _each(on_host, kwargs)
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    kwargs.pop("non_blocking", None)
    kwargs.pop("pin_memory", None)
    inner = _tensors((args, kwargs))
    ghost = device().ghost
    if not inner and ghost:
        values = [x for x in args if not isinstance(x, list | tuple)]
        integers = bool(values) and all(isinstance(x, int) for x in values) and name in ("arange", "full")
        dtype = kwargs.get("dtype") or (torch.int64 if integers else torch.get_default_dtype())
        if dtype.is_floating_point:
            kwargs["device"] = "meta"
    if name in _PRODUCTS and "dtype" in func._overloadname:
        return _wide_product(name, args, kwargs)
    if all(x.device.type != "meta" for x in inner):
        return func(*args, **kwargs)
    if name == "_local_scalar_dense":
        return PLACEHOLDER
    if name == "equal":
        return True
    is_target_real = isinstance(args[0], torch.Tensor) and args[0].device.type != "meta"
    if func._schema.is_mutable and (is_target_real or not func._schema.returns):
        return args[0] if func._schema.returns else None  # floats that exist as shapes change no integer
    if name in _INDEXED:  # how many rows a mask takes is known where its booleans are real
        masks = [isinstance(i, torch.Tensor) and i.dtype == torch.bool and i.device.type != "meta" for i in args[1]]
        spread = [i.nonzero().unbind(1) if is_mask else (i,) for i, is_mask in zip(args[1], masks)]
        args = (args[0], [one for some in spread for one in some], *args[2:])
    args, kwargs = (_each(lambda x: x.to("meta"), some) for some in (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = "meta"
    return func(*args, **kwargs)


def _wide_product(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Products of half precision with a float32 result, which a CPU does not have."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    wide = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype))
    a, b = (x.to(wide) for x in tensors[-2:])
    made = a @ b
    if len(tensors) == 3:
        made = tensors[0].to(wide) * kwargs.get("beta", 1) + made * kwargs.get("alpha", 1)
    out = kwargs.get("out")
    return made if out is None else out.copy_(made)


def _returned(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """Results as tensors of the device; an operation in place gives back its target."""
    schema = func._schema
    if schema.is_mutable:
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                if not schema.returns:
                    return None
                return kwargs.get(argument.name) if argument.kwarg_only else args[index]
    is_view = any(r.alias_info is not None for r in schema.returns)

    def wrapped(x: Tensor) -> Tensor:
        if x.device.type == "meta" and not x.dtype.is_floating_point and not is_view:
            x = torch.zeros(x.shape, dtype=x.dtype)
        return _wrap(x)

    return _each(wrapped, out)


def _count(func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
    counts = device().counts
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    tensors = _tensors((args, kwargs))
    outs = _tensors(out)
    if is_view or name in _NO_KERNEL or not any(x.numel() for x in (*tensors, *outs)):
        return
    if name.startswith(("_foreach", "_fused")):
        listed = [x for x in args[0] if isinstance(x, torch.Tensor)]
        chunks = sum(-(-x.numel() // _CHUNK) for x in listed)
        counts.kernels[name] += max(math.ceil(chunks / _CHUNKS), math.ceil(len(listed) / _TENSORS))
    elif name in ("index_put_", "_index_put_impl_", "index_put") and len(args) > 3 and args[3]:
        counts.kernels[name] += 6  # duplicates are added up in order: by sorting
    else:
        counts.kernels[name] += _KERNELS.get(name, 1)
    if name in _PRODUCTS:
        factors = [x for x in tensors if x.dim() >= 2]
        if "out" in kwargs:
            factors = [x for x in factors if x is not kwargs["out"]]
        left, right = factors[-2:]
        flops = 2 * left.numel() * right.shape[-1]
        counts.flops["product"] += flops
        counts.product_flops[device().where()] += flops
        counts.product_bytes += sum(map(_nbytes, tensors)) + sum(map(_nbytes, outs))
    else:
        counts.moved[name, device().where()] += _bytes_of(func, name, args, tensors, outs)


def _bytes_of(func: Any, name: str, args: Any, tensors: list[Tensor], outs: list[Tensor]) -> int:
    """Bytes that an operation reads and writes."""
    written = sum(map(_nbytes, outs))
    if name in _GATHERS:
        return 2 * written + sum(_nbytes(x) for x in tensors if not x.dtype.is_floating_point)
    if name in ("index_put_", "_index_put_impl_"):
        values, target = args[2], args[0]
        indexed = [i for i in args[1] if isinstance(i, torch.Tensor)]
        rows = max(i.numel() for i in indexed) * math.prod(target.shape[len(indexed) :]) * target.element_size()
        return _nbytes(values) + rows + sum(map(_nbytes, indexed))
    if name in ("index_add_", "scatter_add_", "scatter_"):
        return 3 * _nbytes(args[3]) if isinstance(args[3], torch.Tensor) else 3 * _nbytes(args[2])
    if name.startswith(("_foreach", "_fused")):
        if not func._schema.is_mutable:
            return sum(map(_nbytes, tensors)) + written
        is_adam = name.startswith("_fused_adam")  # reads weights, gradients and two moments, writes all but gradients
        return sum(map(_nbytes, tensors)) + sum(_nbytes(x) for x in args[0]) * (3 if is_adam else 1)
    if func._schema.is_mutable:
        target = args[0] if isinstance(args[0], torch.Tensor) and args[0].dtype else tensors[0]
        if name in _OVERWRITES:
            return sum(map(_nbytes, tensors[1:])) + _nbytes(target)
        return sum(map(_nbytes, tensors)) + _nbytes(target)
    if name == "constant_pad_nd":
        return sum(map(_nbytes, tensors)) + written + _nbytes(tensors[0])
    return sum(map(_nbytes, tensors)) + written


# -------------------- what a GPU has fused


class _RmsNorm(torch.autograd.Function):
    """One kernel forward; one for the input's gradient and one for the weight's, backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dev = device()
        dev.launch("rms_norm", 1, 2 * _nbytes(x))
        with dev.quietly():
            wide = torch.promote_types(x.dtype, torch.float32)
            scale = torch.rsqrt(x.to(wide).pow(2).mean(-1, keepdim=True) + eps)
            out = (x.to(wide) * scale * weight.to(wide)).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        dev = device()
        dev.launch("rms_norm backward", 2, 5 * _nbytes(x))
        with dev.quietly():
            grad, wide, size = grads[0].to(scale.dtype), x.to(scale.dtype), x.shape[-1]
            weight_grad = (grad * wide * scale).reshape(-1, size).sum(0).to(weight.dtype)
            pull = grad * weight.to(scale.dtype)
            x_grad = (pull * scale - wide * scale.pow(3) * (pull * wide).mean(-1, keepdim=True)).to(x.dtype)
        return x_grad, weight_grad, None


def _dense(mask: Any, num_queries: int, num_keys: int, by_query: bool) -> Tensor:
    """A BlockMask as the kernels read it: listed blocks only, full ones unmasked; forward from the lists of keys,
    backward from those of queries."""
    size = mask.BLOCK_SIZE[0]
    side, full = ("q", "full_q") if by_query else ("kv", "full_kv")
    rows, columns = -(-num_queries // size), -(-num_keys // size)
    partial, whole = (torch.zeros(rows, columns, dtype=torch.bool) for _ in range(2))
    for table, kind in ((partial, side), (whole, full)):
        counts, lists = (getattr(mask, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        if counts is None:
            continue
        counts, lists = on_host(counts)[0, 0], on_host(lists)[0, 0]
        for index in range(counts.numel()):
            for other in lists[index, : int(counts[index])].tolist():
                table[(other, index) if by_query else (index, other)] = True
    assert not (partial & whole).any(), "a block is listed twice"
    zero = on_device(torch.zeros((), dtype=torch.int64))
    query, key = (on_device(torch.arange(n)) for n in (num_queries, num_keys))
    with device().quietly():
        allowed = on_host(mask.mask_mod(zero, zero, query[:, None], key[None])).expand(num_queries, num_keys)
    spread = lambda t: t.repeat_interleave(size, 0)[:num_queries].repeat_interleave(size, 1)[:, :num_keys]  # noqa: E731
    return (allowed & spread(partial)) | spread(whole)


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v.repeat_interleave(group, 1)


class _Attention(torch.autograd.Function):
    """A fused attention: queries, keys and values are read, the output written; backward in three kernels."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, name: str, pairs: int, masks: Any, mask_bytes: int
    ) -> Tensor:
        dev = device()
        heads, num_queries, size = q.shape[1:]
        dev.launch(name, 1, 2 * _nbytes(q) + _nbytes(k) + _nbytes(v) + mask_bytes)
        if dev.counting:
            dev.counts.flops["attention"] += 4 * pairs * heads * size
        ctx.name, ctx.pairs, ctx.masks, ctx.mask_bytes = name, pairs, masks, mask_bytes
        with dev.quietly():
            out = torch.empty_like(q)
            log_sum = torch.empty(heads, num_queries, dtype=torch.float32, device=CUDA)
            if not dev.ghost:
                out.inner.copy_(_written_out(*(on_host(x) for x in (q, k, v)), masks(False)))
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, _out, _log_sum = ctx.saved_tensors
        dev = device()
        dev.launch(f"{ctx.name} backward", 3, 5 * _nbytes(q) + 2 * (_nbytes(k) + _nbytes(v)) + ctx.mask_bytes)
        if dev.counting:
            dev.counts.flops["attention"] += 10 * ctx.pairs * q.shape[1] * q.shape[-1]
        with dev.quietly():
            found = [torch.empty_like(x) for x in (q, k, v)]
            if not dev.ghost:
                forward, backward = ctx.masks(False), ctx.masks(True)
                assert forward is None or torch.equal(forward, backward), "the mask differs from side to side"
                inner = [on_host(x).detach().requires_grad_() for x in (q, k, v)]
                with torch.enable_grad():
                    out = _written_out(*inner, backward)
                for made, grad in zip(found, torch.autograd.grad(out, inner, on_host(grads[0]))):
                    made.inner.copy_(grad)
        return (*found, None, None, None, None)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, enable_gqa: bool = False, **_: Any) -> Tensor:
    """FlexAttention, compiled: one call whose work is that of the blocks listed."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    counts = [block_mask.kv_num_blocks, block_mask.full_kv_num_blocks]
    listed = sum(int(on_host(count).sum()) for count in counts if count is not None)
    pairs = listed * block_mask.BLOCK_SIZE[0] * block_mask.BLOCK_SIZE[1]
    assert enable_gqa == (q.shape[1] != k.shape[1])
    masks = lambda by_query: _dense(block_mask, num_queries, num_keys, by_query)  # noqa: E731
    return _Attention.apply(q, k, v, "flex", pairs, masks, 0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """PyTorch's attention as one kernel. With a mask and grouped heads that takes cuDNN's."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    triangle = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
    mask = triangle if is_causal else None if attn_mask is None else on_host(attn_mask)
    pairs = num_queries * num_keys // (2 if is_causal else 1)
    return _Attention.apply(q, k, v, "sdpa", pairs, lambda _: mask, 0 if attn_mask is None else _nbytes(attn_mask))


def fused(name: str, definition: Callable[..., Any], kernels: int, moved: Callable[..., float]) -> Callable[..., Any]:
    """A function of the project that runs as `kernels` launches on a GPU; its definition gives the numbers."""

    def call(*args: Any, **kwargs: Any) -> Any:
        device().launch(name, kernels, moved(*args, **kwargs))
        with device().quietly():
            return definition(*args, **kwargs)

    return call


# -------------------- setting it up


def _tensor(data: Any, *args: Any, **options: Any) -> Tensor:
    where = options.pop("device", None)
    made = _REAL["tensor"](data, *args, **options)
    return made.to(where) if where is not None else made


class _Stream:
    """A stream or an event: waiting of one for another costs the host nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name == "synchronize":
            return lambda: device().wait("stream or event")
        return lambda *_, **__: True if name == "query" else self


_REAL = {"tensor": torch.tensor}


@contextlib.contextmanager
def pretend(
    ghost: bool,
    roots: tuple[str, ...] = ("/src/peagle/",),
    total_bytes: int = 84_937_000_000,
    capability: tuple[int, int] = (9, 0),
) -> Iterator[Device]:
    """Inside, `cuda` is the pretended device, an H100 with 80 GiB unless told otherwise. One at a time.

    Args:
        ghost: numbers exist as shapes only.
        roots: parts of file names that count as places.
        total_bytes, capability: of the card.
    """
    global _device
    assert _device is None, "one device at a time"
    torch.utils._device._device_constructors()  # remembers functions for good: the real ones
    properties = SimpleNamespace(
        name="pretended", total_memory=total_bytes, multi_processor_count=132, major=capability[0],
        minor=capability[1], shared_memory_per_block_optin=232_448,
    )  # fmt: skip
    functional = torch.nn.functional
    real_sdpa, real_norm, submit = (
        functional.scaled_dot_product_attention,
        functional.rms_norm,
        ThreadPoolExecutor.submit,
    )
    is_compatible = torch._has_compatible_shallow_copy_type

    def sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, **more: Any) -> Tensor:
        if isinstance(q, Pretended):
            return _sdpa(q, k, v, attn_mask, is_causal)
        return real_sdpa(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **more)

    def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Tensor:
        return _RmsNorm.apply(x, weight, eps) if isinstance(x, Pretended) else real_norm(x, shape, weight, eps)

    def same_device(a: Tensor, b: Tensor) -> bool:
        return isinstance(a, Pretended) == isinstance(b, Pretended) and is_compatible(a, b)

    def submit_inside(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def inside() -> Any:  # modes are a thread's own
            if _device is None:
                return call(*args, **kwargs)
            with _Mode():
                return call(*args, **kwargs)

        return submit(pool, inside)

    replaced: list[tuple[Any, str, Any]] = [
        (torch, "tensor", _tensor),
        (functional, "scaled_dot_product_attention", sdpa),
        (functional, "rms_norm", rms_norm),
        (torch, "_has_compatible_shallow_copy_type", same_device),
        (ThreadPoolExecutor, "submit", submit_inside),
        (torch.Tensor, "pin_memory", _pin_memory),
        (torch.Tensor, "is_pinned", lambda x, *_: x.untyped_storage() in device().pinned),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_capability", lambda *_: capability),
        (torch.cuda, "mem_get_info", lambda *_: (total_bytes - device().live, total_bytes)),
        (torch.cuda, "synchronize", lambda *_: device().wait("synchronize")),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "default_stream", _Stream),
        *_project(),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    _device = Device(ghost, total_bytes, capability, roots)
    try:
        for owner, name, new in replaced:
            setattr(owner, name, new)
        with _Mode():
            yield _device
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)
        _device = None


def _project() -> list[tuple[Any, str, Any]]:
    """Functions of the project that are one or a few kernels on a GPU, and answers that it keeps."""
    from peagle.train import flex

    for answer in vars(flex).values():
        if callable(getattr(answer, "cache_clear", None)):
            answer.cache_clear()
    found: list[tuple[Any, str, Any]] = [(flex, "compiled", lambda *_: flex_attention)]
    try:
        from peagle.kernels import gpu
        from peagle.train import loss
    except ImportError:
        return found
    found.append((gpu, "fused_loss_problem", lambda: None))
    found.append((gpu, "row_losses_", fused("row_losses_", loss._row_losses_, 1, _loss_bytes)))
    return found


def _loss_bytes(
    *, logits: Tensor, verifier_logits: Tensor, label_of_row: Tensor, loss: str, with_grad: bool, choices: Any
) -> float:
    """Of `kernels/triton_loss.py`: both rows are read for the statistics and again for the gradient, which is written;
    total variation reads both once more. Rows of one label run side by side, but each reads the verifier's row."""
    row = logits.shape[1] * logits.element_size()
    reads = 2 + (2 if loss == "tv" else 0) + (2 if with_grad else 0)
    if loss == "ce":
        reads = (1 if choices is not None else 2) + with_grad
    return logits.shape[0] * row * (reads + with_grad)
