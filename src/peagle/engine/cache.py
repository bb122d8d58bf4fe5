"""Keys and values of several rows, where the tokens of one pass lie in them, and the masks that follow from it.

In the caches of verifier and drafter a token's slot is its position, so a row's rollback is nothing but a smaller
length: what lies beyond is never seen (keys after a query's position are masked) and is overwritten by the next pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
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
    """Makes spans and masks from tensors that are built once: a pass takes views of them.

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
        start, last = min(starts), max(starts)
        if start == last:
            positions = self._positions[start : start + num_tokens].expand(len(starts), num_tokens)
        else:
            offsets = torch.tensor(starts, device=self._positions.device)
            positions = offsets[:, None] + self._positions[:num_tokens]
        return Span(
            first_row=first_row,
            num_rows=len(starts),
            num_tokens=num_tokens,
            start=start if start == last else None,
            positions=positions,
            end=last + num_tokens,
        )

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


class KeyValues:
    """One cache of `num_rows` rows of `capacity` positions.

    A layer's memory is taken at its first write, so that each may have its own heads and widths.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self._num_rows, self._capacity = num_rows, capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Put a pass's keys and values, [num_rows, num_kv_heads, num_tokens, head_dim], at the span's positions.

        Returns:
            All keys and values of the span's rows up to its end, views, [num_rows, num_kv_heads, span.end, head_dim].
        """
        if layer not in self._layers:
            # Zeros, not empty: a masked key that is NaN would still poison the softmax.
            size = (self._num_rows, keys.shape[1], self._capacity)
            self._layers[layer] = (keys.new_zeros(*size, keys.shape[3]), values.new_zeros(*size, values.shape[3]))
        all_keys, all_values = self._layers[layer]
        if self._num_rows != 1:
            all_keys = all_keys.narrow(0, span.first_row, span.num_rows)
            all_values = all_values.narrow(0, span.first_row, span.num_rows)
        if span.start is not None:
            all_keys.narrow(2, span.start, span.num_tokens).copy_(keys)
            all_values.narrow(2, span.start, span.num_tokens).copy_(values)
        else:
            slots = span.positions[:, None, :, None]
            all_keys.scatter_(2, slots.expand_as(keys), keys)
            all_values.scatter_(2, slots.expand_as(values), values)
        return all_keys.narrow(2, 0, span.end), all_values.narrow(2, 0, span.end)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `target`."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]
