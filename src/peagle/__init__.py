"""Train, measure and serve P-EAGLE drafters for speculative decoding.

From Python: `load` a checkpoint with its verifier, `read` rows with their hidden states (see `peagle.api`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peagle._version import __version__

if TYPE_CHECKING:
    from peagle.api import SpeculativeModel as SpeculativeModel
    from peagle.api import Written as Written
    from peagle.api import load as load
    from peagle.api import read as read

__all__ = ["SpeculativeModel", "Written", "__version__", "load", "read"]


def __getattr__(name: str) -> Any:
    """Load the Python interface when it is first asked for: `peagle --help` must not wait for torch."""
    if name in __all__:
        from peagle import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
