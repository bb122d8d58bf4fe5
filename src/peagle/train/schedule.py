"""The learning rate as a pure function of the number of optimizer steps: there is no scheduler state to lose.

Steps are optimizer steps, never batches: accumulation and ranks do not stretch the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then a fall to zero at `total_steps`."""

    kind: str
    """"linear", "cosine" or "none" (constant after warm-up)."""
    warmup_steps: int
    total_steps: int

    def factor(self, step: int) -> float:
        """The share of the peak learning rate for the optimizer step after `step` completed ones.

        Step 0 already learns: a warm-up of w steps gives 1/w, 2/w .. 1. `factor(total_steps)` is 0, the floor.

        Example:
            linear, 2 of 6 steps of warm-up: 0.5, 1, 1, 0.75, 0.5, 0.25, and 0 where the run ends.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "none":
            return 1.0
        share = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 1.0 - share if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def make(kind: str, warmup_ratio: float, warmup_steps: int | None, total_steps: int) -> Schedule:
    """The schedule of a run: `warmup_steps` wins over `warmup_ratio`, and warm-up never exceeds the run."""
    steps = round(warmup_ratio * total_steps) if warmup_steps is None else warmup_steps
    return Schedule(kind, min(steps, total_steps), total_steps)
