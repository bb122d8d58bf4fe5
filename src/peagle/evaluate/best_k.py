"""Which number of drafted tokens pays: measured acceptance weighed against measured drafting and verifying cost.

A pass that drafts k tokens yields 1 + p_1 + .. + p_k tokens, where p_j is the share of passes in which position j was
accepted. (One-pass drafting makes position j the same draft whatever k is, so one measurement at a large k tells about
all smaller ones.) It costs one draft and one verifier pass over k + 1 tokens. Plain decoding costs one verifier pass
over one token for one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PassCost:
    """Milliseconds, measured on one machine at one batch size."""

    plain_ms: float
    """One token of plain decoding."""
    draft_ms: float
    """Drafting `num_speculative_tokens` tokens."""
    verify_ms: float
    """One verifier pass over that draft, acceptance and cache work included."""
    num_speculative_tokens: int
    """At which the two were measured."""

    def verify_at(self, k: int) -> float:
        """A verifier pass over k + 1 tokens: between plain decoding (k = 0) and the measured pass, linear in k."""
        return self.plain_ms + (self.verify_ms - self.plain_ms) * k / self.num_speculative_tokens


@dataclass(frozen=True)
class Expected:
    """What drafting `k` tokens is expected to give."""

    k: int
    acceptance_length: float
    speedup: float
    """Tokens per second over plain decoding."""


def expected_speedups(acceptance_per_position: Sequence[float], cost: PassCost, is_sequential: bool) -> list[Expected]:
    """Expected speed-up for each k from 1 to the number of measured positions.

    Args:
        acceptance_per_position: unconditional, 0..1, [num_speculative_tokens].
        cost: measured costs.
        is_sequential: EAGLE-3 drafts token by token, so its drafting cost grows with k; P-EAGLE's is one pass.

    Example:
        acceptance (0.8, 0.5), plain 10 ms, draft 2 ms, verify 11 ms at k = 2: k = 1 gives 1.8 tokens in 12.5 ms, a
        speed-up of 1.44; k = 2 gives 2.3 tokens in 13 ms, 1.77.
    """
    found = []
    length = 1.0
    for k, share in enumerate(acceptance_per_position, start=1):
        length += share
        draft_ms = cost.draft_ms * k / cost.num_speculative_tokens if is_sequential else cost.draft_ms
        found.append(Expected(k, length, length * cost.plain_ms / (draft_ms + cost.verify_at(k))))
    return found


def best(expected: Sequence[Expected]) -> Expected | None:
    """The k with the highest expected speed-up, the smaller of two equals; None where nothing was measured."""
    return max(expected, key=lambda e: (e.speedup, -e.k), default=None)
