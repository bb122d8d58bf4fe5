"""What is counted, whoever counts it: the engine, the replay, or vLLM's counters.

Convention, the same as vLLM's: a pass is one run of the verifier over a draft (the prefill is none); a drafted token
counts as accepted as soon as the verifier accepts it, before an end-of-sequence token or a length limit cuts the
answer; acceptance length = 1 + accepted / passes, so the verifier's own token is included. Figures of a data set pool
all passes of all its answers; no figure here is a mean of per-answer means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CONVENTION = (
    "Pooled over all verifier passes; the prefill is no pass. Position k: share of passes in which the k-th drafted "
    "token was accepted. Acceptance length = 1 + accepted / passes: the verifier's own (bonus) token is included."
)
SMALLEST_CONTEXT_BUCKET = 128


@dataclass(frozen=True)
class Counts:
    """Sums over verifier passes. Expected counts (replay at temperature > 0) are not whole numbers."""

    num_drafts: float
    """Verifier passes that checked a draft."""
    accepted_per_position: tuple[float, ...]
    """Passes in which the k-th drafted token was accepted (so all before it were too), [num_speculative_tokens]."""
    num_generated_tokens: int
    """Tokens of the answers as the user got them, after any cut, first tokens (from the prefill) included."""

    @property
    def num_speculative_tokens(self) -> int:
        """K: tokens drafted per pass."""
        return len(self.accepted_per_position)

    @property
    def num_draft_tokens(self) -> float:
        """Tokens drafted."""
        return self.num_drafts * self.num_speculative_tokens

    @property
    def num_accepted(self) -> float:
        """Drafted tokens that were accepted."""
        return sum(self.accepted_per_position)

    @property
    def accepted_per_pass(self) -> float | None:
        """Mean of accepted drafted tokens per pass, bonus token not included; None where nothing was drafted."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / passes; None where nothing was drafted."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...] | None:
        """Share of passes in which position k was accepted: unconditional, [num_speculative_tokens]."""
        if not self.num_drafts:
            return None
        return tuple(accepted / self.num_drafts for accepted in self.accepted_per_position)

    @property
    def conditional_per_position(self) -> tuple[float | None, ...] | None:
        """Share of the passes that accepted all positions before k in which k was accepted too; None: no such pass."""
        if not self.num_drafts:
            return None
        reached = (self.num_drafts, *self.accepted_per_position[:-1])
        return tuple(a / r if r else None for a, r in zip(self.accepted_per_position, reached))

    @property
    def histogram(self) -> tuple[float, ...]:
        """Passes that accepted exactly 0, 1, .. K drafted tokens, [num_speculative_tokens + 1]."""
        at_least = (self.num_drafts, *self.accepted_per_position)
        return tuple(a - b for a, b in zip(at_least, (*self.accepted_per_position, 0)))

    @staticmethod
    def of_passes(rounds: Iterable[Iterable[int]], num_speculative_tokens: int, num_generated_tokens: int) -> Counts:
        """Count accepted tokens, pass by pass.

        Args:
            rounds: for each answer, the number of accepted drafted tokens of each of its passes.
            num_speculative_tokens: K; no pass accepts more.
            num_generated_tokens: see the field.

        Example:
            [[4, 1], [1]] with K = 4: 3 passes, accepted (3, 1, 1, 1), 2.0 per pass, acceptance length 3.0.
        """
        num_drafts = 0
        per_position = [0] * num_speculative_tokens
        for passes in rounds:
            for accepted in passes:
                num_drafts += 1
                for k in range(accepted):
                    per_position[k] += 1
        return Counts(num_drafts, tuple(per_position), num_generated_tokens)


def pool(parts: Iterable[Counts], num_speculative_tokens: int) -> Counts:
    """Add counts up; the sum of nothing has all zeros."""
    num_drafts: float = 0
    generated = 0
    per_position: list[float] = [0] * num_speculative_tokens
    for part in parts:
        if part.num_speculative_tokens != num_speculative_tokens:
            raise ValueError(f"{part.num_speculative_tokens} drafted per pass pooled with {num_speculative_tokens}")
        num_drafts += part.num_drafts
        generated += part.num_generated_tokens
        per_position = [a + b for a, b in zip(per_position, part.accepted_per_position)]
    return Counts(num_drafts, tuple(per_position), generated)


@dataclass(frozen=True)
class DatasetCounts:
    """The counts of one data set, whole and by context length."""

    total: Counts
    by_context: Mapping[str, Counts]
    """Context bucket (see `context_bucket`) -> counts of the passes that started in it; empty where not known."""


def context_bucket(num_known_tokens: int) -> str:
    """Name the bucket of a pass by the tokens known before it: "1-128", "129-256", "257-512" and so on, doubling."""
    low, high = 1, SMALLEST_CONTEXT_BUCKET
    while num_known_tokens > high:
        low, high = high + 1, high * 2
    return f"{low}-{high}"


def pool_contexts(datasets: Sequence[DatasetCounts], num_speculative_tokens: int) -> dict[str, Counts]:
    """Pool the context buckets of several data sets, shortest contexts first."""
    names = {name for dataset in datasets for name in dataset.by_context}
    return {
        name: pool([d.by_context[name] for d in datasets if name in d.by_context], num_speculative_tokens)
        for name in sorted(names, key=lambda name: int(name.split("-")[0]))
    }
