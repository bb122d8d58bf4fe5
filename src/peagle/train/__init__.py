"""From batches to checkpoints: targets, loss, the two-pass step, optimizer, loop, resume, ranks.

In: prepared rows, their states, the verifier's head and embedding. Out: checkpoint folders that vLLM serves as they
are, `metrics.jsonl`, `run.yaml`, `manifest.json`. Always: the loss divides by the one count of supervised slots of the
whole optimizer step, over packs and ranks; N ranks give what one gives; a resumed run equals an uninterrupted one.
Public: `train`, `fit`, `FitConfig`, `TrainConfig`, `MemoryRows`, `World` (loaded when first asked for).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.train.config import FitConfig as FitConfig
    from peagle.train.config import TrainConfig as TrainConfig
    from peagle.train.distributed import World as World
    from peagle.train.loop import FitResult as FitResult
    from peagle.train.loop import fit as fit
    from peagle.train.rows import MemoryRows as MemoryRows
    from peagle.train.run import train as train

_HOMES = {
    "train": "run",
    "fit": "loop",
    "FitResult": "loop",
    "FitConfig": "config",
    "TrainConfig": "config",
    "MemoryRows": "rows",
    "World": "distributed",
}
__all__ = ["FitConfig", "FitResult", "MemoryRows", "TrainConfig", "World", "fit", "train"]


def __getattr__(name: str) -> Any:
    """Load a public name from its file: `peagle train --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"peagle.train.{_HOMES[name]}"), name)
