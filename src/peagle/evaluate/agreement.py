"""Do replay and decoding count alike? Pass by pass, a difference being excused only by a logit gap that is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.engine import Answer
from peagle.evaluate.contest import TIE_GAP
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
    """How far the drafter's logit of the engine's token lay behind replay's; None: it was not the second choice."""

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.gap < TIE_GAP


def disagreement(recorded: Recorded, replayed: Replayed, answer: Answer) -> Disagreement | None:
    """Compare the passes of one answer; None where all are equal.

    A replay without a tail cannot judge the last passes; those it left out are not compared.
    """
    decoded = answer.passes[: len(answer.passes) - replayed.num_unjudged]
    for ours, theirs in zip(replayed.passes, decoded):
        if (ours.num_known, ours.num_accepted) == (theirs.num_known, theirs.num_accepted):
            continue
        place = next((k for k, (a, b) in enumerate(zip(ours.draft_ids, theirs.draft_ids)) if a != b), None)
        gap = None
        if place is not None and ours.runner_up_ids[place] == theirs.draft_ids[place]:
            gap = ours.runner_up_gaps[place]
        return Disagreement(recorded.row_id, ours.num_known, theirs.draft_ids, ours.draft_ids, gap)
    if len(decoded) != len(replayed.passes):
        return Disagreement(recorded.row_id, recorded.end, (), (), None)
    return None


def is_equal(found: Sequence[Disagreement], num_compared: int) -> bool | None:
    """Whether all compared answers are counted alike, ties excused; None where nothing was compared."""
    return all(one.is_tie for one in found) if num_compared else None
