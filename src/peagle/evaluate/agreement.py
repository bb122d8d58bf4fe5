"""Do replay and decoding count alike? Pass by pass, a difference being excused only by a logit gap that is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peagle.engine import Answer
from peagle.evaluate.contest import TIE_GAP, within_rounding
from peagle.evaluate.replay import Recorded, Replayed


@dataclass(frozen=True)
class Disagreement:
    """One answer that the two count differently, at the first pass that differs."""

    row_id: str
    num_known: int
    """Tokens known before that pass."""
    decoded_ids: tuple[int, ...]
    """What the engine drafted there, empty if it had no such pass."""
    replayed_ids: tuple[int, ...]
    gap: float | None
    """How far the drafter's logit of the engine's token lay behind replay's; None: it was none of the next choices."""
    largest: float
    """The drafter's largest logit there; 0 where no logit decided."""
    dtype: torch.dtype
    """In which the drafter computes."""

    @property
    def is_tie(self) -> bool:
        """Whether the two choices are level: the one excuse that counts."""
        return self.gap is not None and self.gap < TIE_GAP

    @property
    def is_within_rounding(self) -> bool:
        """Whether a half-precision drafter cannot tell the two choices apart. Never so in float32."""
        return self.is_tie or (self.gap is not None and within_rounding(self.gap, self.largest, self.dtype))


def disagreement(recorded: Recorded, replayed: Replayed, answer: Answer, dtype: torch.dtype) -> Disagreement | None:
    """Compare the passes of one answer, drafted in `dtype`; None where all are equal.

    A replay without a tail cannot judge the last passes; those it left out are not compared.
    """
    decoded = answer.passes[: len(answer.passes) - replayed.num_unjudged]
    for ours, theirs in zip(replayed.passes, decoded):
        if (ours.num_known, ours.num_accepted) == (theirs.num_known, theirs.num_accepted):
            continue
        place = next((k for k, (a, b) in enumerate(zip(ours.draft_ids, theirs.draft_ids)) if a != b), None)
        gap, largest = None, 0.0
        if place is not None:
            gap = dict(zip(ours.runner_up_ids[place], ours.runner_up_gaps[place])).get(theirs.draft_ids[place])
            largest = ours.best_logits[place]
        return Disagreement(recorded.row_id, ours.num_known, theirs.draft_ids, ours.draft_ids, gap, largest, dtype)
    if len(decoded) != len(replayed.passes):
        return Disagreement(recorded.row_id, recorded.end, (), (), None, 0.0, dtype)
    return None


def is_equal(found: Sequence[Disagreement], num_compared: int) -> bool | None:
    """Whether all compared answers are counted alike, ties excused; None where nothing was compared."""
    return all(one.is_tie for one in found) if num_compared else None
