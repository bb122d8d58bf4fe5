"""Attention of the two passes, by name.

`reference` writes the definition out, `sdpa` is PyTorch's fused one (on a CPU our own: `tiles`), `flex` its compiled
one for GPUs.

Every implementation solves the same two problems: pair slots among themselves (causal, document by document), and a
part of a block's mask slots against the pair slots up to their anchors and their own chains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from peagle.kernels import tiles
from peagle.kernels.native import Tile
from peagle.layout.visibility import visible
from peagle.train import flex

AttentionName = Literal["reference", "sdpa", "flex"]
# heads(q [num_queries, heads, dim], k, v [num_keys, kv_heads, dim], mask [num_queries, num_keys] or None for causal)
Heads = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's fused attention; `mask` None is causal over equally many queries and keys.

    Returns:
        [num_queries, heads * dim]
    """
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1).flatten(1)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of masked scores, written out. Same arguments as `sdpa`."""
    if mask is None:
        mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).tril()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v).flatten(1)


HEADS: dict[str, Heads] = {"reference": reference, "sdpa": sdpa}


@dataclass(frozen=True)
class Seen:
    """Mask slots and what they may see: pair slots `first` .. `last`-1 and their own chains. One for all layers."""

    anchor: Tensor
    """int64, [num_slots], ascending."""
    depth: Tensor
    """>= 1, ascending within an anchor, int64, [num_slots]."""
    first: int
    last: int
    document_ids: Tensor
    """int64, [num_pairs]."""
    doc_start: Tensor
    """First pair slot of each slot's document, int64, [num_slots]."""

    @cached_property
    def dense(self) -> Tensor:
        """bool, [num_slots, last - first + num_slots]."""
        return self._dense(0, self.first)

    @cached_property
    def tile_mask(self) -> Tensor:
        """0 where seen and -inf where not, over the pair slots after the first anchor and the slots themselves.

        Up to the first anchor all slots of one document see alike. [num_slots, num_after + num_slots]
        """
        seen = self._dense(0, int(self.anchor[0]) + 1)
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))

    @cached_property
    def padded(self) -> Tensor:
        """The same over keys as flex lays them out: pair slots padded to whole blocks."""
        return self._dense(-(self.last - self.first) % flex.BLOCK, self.first)

    @cached_property
    def blocks(self) -> BlockMask:
        """The same for flex, in closed form."""
        return flex.block_mask(self.anchor, self.depth, self.doc_start, self.first, self.last - self.first)

    def _dense(self, padding: int, begin: int) -> Tensor:
        pairs = torch.arange(begin, self.last, device=self.anchor.device)
        zero, own = (
            torch.zeros_like(pairs),
            visible(self.anchor, self.depth, self.anchor, self.depth, self.document_ids),
        )
        context = visible(self.anchor, self.depth, pairs, zero, self.document_ids)
        return torch.cat([F.pad(context, (0, padding)), own], 1)


def base_attention(name: AttentionName, bounds: list[tuple[int, int]]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of pair slots, document by document.

    Args:
        name: the implementation.
        bounds: range of pair slots of each document, covering all of them.

    Returns:
        attend(q, k, v), each [num_pairs, heads, head_dim] -> [num_pairs, heads * head_dim].
    """
    if name != "flex":
        heads = HEADS[name]

        cut: list[Tile] = []

        def by_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if name == "sdpa" and tiles.fits(q):
                cut.extend([] if cut else tiles.causal_tiles(bounds, q))
                return tiles.attend(q, (k, v), None, cut, None)
            parts = [heads(q[a:b], k[a:b], v[a:b], None) for a, b in bounds]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return by_document

    made: list[tuple[BlockMask, Tensor | None]] = []

    def at_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_pairs = q.shape[0]
        padding = -num_pairs % flex.BLOCK
        if not made:
            position = torch.arange(num_pairs, device=q.device)
            lengths = torch.tensor([b - a for a, b in bounds], device=q.device)
            start = torch.tensor([a for a, _ in bounds], device=q.device).repeat_interleave(lengths)
            dense = None
            if not q.is_cuda:
                dense = (position[None] <= position[:, None]) & (position[None] >= start[:, None])
                dense = F.pad(dense, (0, padding))
            made.append((flex.block_mask(position, None, start, 0, num_pairs), dense))
        return flex.attend(q, _pad(k, padding), _pad(v, padding), *made[0])

    return at_once


def rollout_attention(
    name: AttentionName, q: Tensor, base_k: Tensor, base_v: Tensor, own_k: Tensor, own_v: Tensor, seen: Seen
) -> Tensor:
    """Attention of mask slots.

    Args:
        name: the implementation.
        q, own_k, own_v: of the slots, [num_slots, heads, head_dim].
        base_k, base_v: of pair slots `seen.first` .. `seen.last`-1, [last - first, kv_heads, head_dim].
        seen: who sees whom.

    Returns:
        [num_slots, heads * head_dim].
    """
    if name != "flex":
        return HEADS[name](q, torch.cat([base_k, own_k]), torch.cat([base_v, own_v]), seen.dense)
    padding = -base_k.shape[0] % flex.BLOCK
    k, v = torch.cat([_pad(base_k, padding), own_k]), torch.cat([_pad(base_v, padding), own_v])
    return flex.attend(q, k, v, seen.blocks, None if q.is_cuda else seen.padded)


def _pad(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, rows)) if rows else x
