"""A key/value cache and an attention for batched decoding: nothing is copied that need not be.

Transformers' dynamic cache copies all keys and values at each token, and its attention repeats them for grouped queries
whenever there is a mask. With small models both cost more than the model itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "peagle_grouped_sdpa"


class GrowingLayer(CacheLayerMixin):
    """One layer's keys and values in a buffer with room to spare; new ones are written in place."""

    is_sliding = False  # windows are the mask's business: every key stays

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: Tensor) -> Tensor:
        batch, heads, _, width = like.shape
        return like.new_empty(batch, heads, self.capacity, width)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, rows: Tensor, first_column: int) -> None:
        """Keep these rows of the batch, without their first columns (padding that no kept row needs)."""
        self.capacity -= first_column
        kept = self.length - first_column
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(len(rows), old.shape[1], self.capacity, old.shape[3])
            new[:, :, :kept] = old[rows, :, first_column : self.length]
            setattr(self, name, new)
        self.length = kept

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        asked = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + asked, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class GrowingCache(Cache):
    """A cache of `GrowingLayer`s for a batch whose longest row will have `capacity` tokens, left padding included."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.own_layers = [GrowingLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.own_layers))

    def keep(self, rows: Tensor, first_column: int) -> None:
        """See `GrowingLayer.keep`."""
        for layer in self.own_layers:
            layer.keep(rows, first_column)


def _grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Transformers' sdpa; for one query token, the query heads that share a key head become that head's query rows."""
    batch, heads, num_queries, width = query.shape
    if num_queries != 1 or heads == key.shape[1] or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return out.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(_NAME, _grouped_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@contextlib.contextmanager
def grouped_attention(decoder: Any) -> Iterator[None]:
    """Let a decoder that uses Transformers' sdpa use the attention above; one with its own attention keeps it."""
    config = decoder.config
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
