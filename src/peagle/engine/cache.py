"""Keys and values of several rows, preallocated, a token's slot being its position."""

from __future__ import annotations

from torch import Tensor

from peagle.engine.span import Span


class KeyValues:
    """One cache. Layers are laid out at their first write, so that each may have its own heads and widths.

    Args:
        num_rows: rows decoded side by side.
        capacity: positions per row.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self._num_rows, self._capacity = num_rows, capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Put a pass's keys and values at their positions.

        Args:
            layer: which layer.
            keys, values: [num_rows, num_kv_heads, num_tokens, head_dim].
            span: where they belong.

        Returns:
            All keys and values of the span's rows up to its end, views, [num_rows, num_kv_heads, span.end, head_dim].
        """
        if layer not in self._layers:
            self._layers[layer] = (self._room(keys), self._room(values))
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

    def _room(self, like: Tensor) -> Tensor:
        # Zeros, not empty: a masked key that is NaN would still poison the softmax.
        return like.new_zeros(self._num_rows, like.shape[1], self._capacity, like.shape[3])
