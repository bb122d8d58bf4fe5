"""Where the tokens of one pass lie: rows of a batch, positions in each row; and the causal masks that follow from it.

In both caches a token's slot is its position, so a row's rollback is nothing but a smaller length: what lies beyond is
never seen (keys after a query's position are masked) and is overwritten by the next pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """`num_tokens` consecutive positions in each of `num_rows` neighbouring rows."""

    first_row: int
    num_rows: int
    num_tokens: int
    start: int | None
    """First position, where it is the same in all rows: slices then do, and no index tensors are needed."""
    positions: Tensor
    """int64, [num_rows, num_tokens]"""
    end: int
    """One past the largest position."""


class Ruler:
    """Makes spans and masks from tensors laid out once: per pass, a view is cut and nothing is built.

    Args:
        capacity: positions per row.
        longest: most tokens of a pass that does not start at position 0.
        dtype, device: of the masks.
    """

    def __init__(self, capacity: int, longest: int, dtype: torch.dtype, device: torch.device) -> None:
        self._capacity, self._longest, self._dtype = capacity, longest, dtype
        self._positions = torch.arange(capacity + longest, device=device)
        # Column c of line j is open iff c <= j + capacity; the window from column capacity - start on is the causal
        # mask of a pass that starts at `start`.
        columns = torch.arange(capacity + longest, device=device)
        shut = columns > torch.arange(longest, device=device)[:, None] + capacity
        self._causal = torch.zeros(longest, capacity + longest, dtype=dtype, device=device)
        self._causal.masked_fill_(shut, float("-inf"))

    def span(self, first_row: int, starts: list[int], num_tokens: int) -> Span:
        """The span of a pass over rows `first_row`, `first_row + 1`, .. that begin at `starts`."""
        first, last = min(starts), max(starts)
        if first == last:
            positions = self._positions[first : first + num_tokens].expand(len(starts), num_tokens)
            return Span(first_row, len(starts), num_tokens, first, positions, first + num_tokens)
        offsets = torch.tensor(starts, device=self._positions.device)
        positions = offsets[:, None] + self._positions[:num_tokens]
        return Span(first_row, len(starts), num_tokens, None, positions, last + num_tokens)

    def causal(self, span: Span) -> Tensor | None:
        """The additive mask of a pass: 0 where seen, -inf elsewhere, [num_rows or 1, 1, num_tokens, span.end].

        None where plain (square) causal attention, or no mask at all, gives the same.
        """
        if span.start is None:
            return self._additive(self._positions[: span.end] > span.positions[:, None, :, None])
        if span.start == 0 or span.num_tokens == 1:
            return None
        begin = self._capacity - span.start
        return self._causal[: span.num_tokens, begin : begin + span.end][None, None]

    def limited(self, span: Span, window: int, is_chunked: bool) -> Tensor | None:
        """The same for layers that see only the last `window` positions, or their own chunk of as many."""
        if span.end <= window:
            return self.causal(span)
        keys, queries = self._positions[: span.end], span.positions[:, None, :, None]
        far = keys // window != queries // window if is_chunked else keys <= queries - window
        return self._additive(far | (keys > queries))

    def square(self, span: Span) -> Tensor:
        """The mask of a pass from position 0, spelled out for attention that takes None as "all is seen"."""
        keys = self._positions[: span.end]
        return self._additive(keys > keys[: span.num_tokens, None])[None, None]

    def _additive(self, shut: Tensor) -> Tensor:
        return torch.zeros(shut.shape, dtype=self._dtype, device=shut.device).masked_fill_(shut, float("-inf"))
