"""`peagle convert`."""

from __future__ import annotations

from peagle.drafter.convert_settings import ConvertConfig

CONFIG = ConvertConfig


def run(config: ConvertConfig) -> None:
    """Convert a drafter checkpoint of SafeAILab/EAGLE, SpecForge, NVIDIA, AWS or Speculators to ours, or back.

    The source's layout is recognized by itself. There and back gives the same tensors and the same config; what a
    layout has no place for is named, and nothing is written.
    """
    from peagle.drafter.convert import convert

    convert(config)
