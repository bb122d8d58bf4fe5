"""Float32 matrix products on one CPU thread, by the faster of the two BLAS libraries that are installed anyway.

PyTorch's (MKL) keeps its AVX-512 kernels for Intel's processors; NumPy's (OpenBLAS) has them for all. On an AMD core
with AVX-512 NumPy's take 0.75 to 0.98 of the time. With more threads PyTorch's are taken: each library has its own pool
of threads, which spin while they wait, and the two in turns take twice the time of one.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CPU_INFO = Path("/proc/cpuinfo")
# What OpenBLAS reads when NumPy is loaded, the first that is set.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b without a graph, [rows, inner] times [inner, columns]; into `out` if given, which is what is returned."""
    if not uses_numpy(a):
        return torch.mm(a, b, out=out)
    if out is None:
        return torch.from_numpy(np.matmul(_array(a), _array(b)))
    np.matmul(_array(a), _array(b), out=_array(out))
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.t() + bias, as `torch.nn.functional.linear`: [..., in_size] -> [..., out_size]."""
    if bias is not None or x.dim() != 2 or not uses_numpy(x):
        return F.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight)
    return found


def uses_numpy(x: Tensor) -> bool:
    """Whether products of tensors such as this one are NumPy's."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and torch.get_num_threads() == 1 and _is_numpy_faster()


@functools.cache
def _is_numpy_faster() -> bool:
    """Whether NumPy has kernels for this processor that PyTorch keeps from it, and one thread to run them."""
    threads = next((os.environ[name] for name in THREAD_VARIABLES if os.environ.get(name)), None)
    if threads != "1" or not torch.backends.mkl.is_available():
        return False
    return _has_openblas() and "AVX512" in torch.backends.cpu.get_cpu_capability() and not _is_intel()


def _has_openblas() -> bool:
    config: Any = np.show_config(mode="dicts")
    return "openblas" in config.get("Build Dependencies", {}).get("blas", {}).get("name", "").lower()


def _is_intel() -> bool:
    return not CPU_INFO.exists() or "GenuineIntel" in CPU_INFO.read_text()


def _array(x: Tensor) -> np.ndarray[Any, Any]:
    """The same numbers, not a copy."""
    return x.detach().numpy()


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
