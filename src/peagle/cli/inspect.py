"""`peagle inspect`."""

from peagle.data.config import InspectConfig

CONFIG = InspectConfig


def run(config: InspectConfig) -> int:
    """Show prepared rows with the supervised tokens highlighted, and what was dropped."""
    from peagle.data.inspect import inspect

    return inspect(config)
