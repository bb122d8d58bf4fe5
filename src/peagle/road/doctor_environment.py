"""What the machine and the installed packages can do."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from peagle.files import free_bytes
from peagle.road.doctor import Finding
from peagle.verifier.vllm_support import MIN_VERSION, engine_here

_NEEDED = {"torch": (2, 9), "transformers": (5, 4), "datasets": (4, 0), "safetensors": (0, 5)}
_LITTLE_DISK, _LITTLE_MEMORY = 5e9, 4e9


def environment(output: Path) -> Iterator[Finding]:
    """Python, packages, devices, memory, disk."""
    python = platform.python_version()
    yield Finding("python", "ok" if sys.version_info >= (3, 10) else "fail", f"{python} on {platform.platform()}")
    for name, least in _NEEDED.items():
        yield _package(name, least)
    yield _vllm()
    yield _device()
    yield _memory()
    free = free_bytes(output)
    yield Finding("disk", "warn" if free < _LITTLE_DISK else "ok", f"{free / 1e9:.1f} GB free at {output}/")


def _package(name: str, least: tuple[int, int]) -> Finding:
    wanted = ".".join(map(str, least))
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "fail", f"not installed; `pip install '{name}>={wanted}'`")
    parts = version.split(".")
    release = (int(parts[0]), int(parts[1]))
    if release < least:
        return Finding(name, "fail", f"{version} is older than {wanted}; `pip install -U {name}`")
    return Finding(name, "ok", version)


def _vllm() -> Finding:
    engine = engine_here()
    if engine is None:
        return Finding("vllm", "warn", 'not installed beside peagle (needed to serve): `pip install "peagle[vllm]"`')
    if engine.release < MIN_VERSION:
        least = ".".join(map(str, MIN_VERSION))
        return Finding("vllm", "fail", f"{engine.version} cannot serve P-EAGLE drafters; {least} is the first that can")
    return Finding("vllm", "ok", engine.version)


def _device() -> Finding:
    import torch

    from peagle import native

    if torch.cuda.is_available():
        names = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            names.append(f"{torch.cuda.get_device_name(index)} ({free / 1e9:.0f} of {total / 1e9:.0f} GB free)")
        return Finding("device", "ok", ", ".join(names))
    threads = torch.get_num_threads()
    told = "1 thread" if threads == 1 else f"{threads} threads"
    if not native.is_available():
        told += ", PyTorch's products (no AVX-512, or no C compiler was there)"
    else:
        alone = " on one thread (no OpenMP in this PyTorch)" if native.num_threads() < threads else ""
        told += f", our own kernels{alone}"
    return Finding("device", "ok", f"CPU, {told}; fine for small verifiers, an 8B one wants a GPU")


def _memory() -> Finding:
    free = available_memory()
    if free is None:
        return Finding("memory", "ok", "unknown")
    return Finding("memory", "warn" if free < _LITTLE_MEMORY else "ok", f"{free / 1e9:.1f} GB available")


def available_memory() -> float | None:
    """Bytes of host memory that can be had now: of the machine or, if less, of the control group; None if unknown."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")))
    except (OSError, StopIteration, ValueError):
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            found.append(float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(float(limit) - float(used))
    except (OSError, ValueError):
        pass
    return min(found) if found else None
