"""Drafter checkpoints of other projects into ours, and back where their layout has a place for everything.

In: a checkpoint of SafeAILab/EAGLE, SpecForge, NVIDIA, AWS or Speculators. Out: ours, or theirs. Always: there and back
gives the same tensors and the same config; what a layout has no place for is refused by name.
Public: `convert.convert`, `config.ConvertConfig`.
"""
