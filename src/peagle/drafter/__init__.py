"""The network, its config.json, and checkpoints in the format that vLLM loads.

In: verifier facts and states. Out: states that the head reads, and checkpoint folders. Always: the state dict's names
are the checkpoint's, loading is strict, and one pass serves training, the engine and (as an oracle) vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.drafter.checkpoint import find as find
    from peagle.drafter.checkpoint import load as load
    from peagle.drafter.checkpoint import load_weights as load_weights
    from peagle.drafter.checkpoint import save as save
    from peagle.drafter.config import DrafterConfig as DrafterConfig
    from peagle.drafter.config import config_for as config_for
    from peagle.drafter.network import Drafter as Drafter

_HOMES = {
    "Drafter": "network",
    "DrafterConfig": "config",
    "config_for": "config",
    "find": "checkpoint",
    "load": "checkpoint",
    "load_weights": "checkpoint",
    "save": "checkpoint",
}
__all__ = ["Drafter", "DrafterConfig", "config_for", "find", "load", "load_weights", "save"]


def __getattr__(name: str) -> Any:
    """Load a public name from its file: `peagle convert --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"peagle.drafter.{_HOMES[name]}"), name)
