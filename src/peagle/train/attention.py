"""Attention of the two passes, by name: `reference` writes the definition out, `sdpa` is PyTorch's fused one.

Every implementation sees the same two problems: pair slots among themselves (causal, document by document), and a
block of mask slots against the pair slots up to their anchors and their own chains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.layout.visibility import visible

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


def rollout_mask(anchor_pos: Tensor, depth: Tensor, first: int, last: int, document_ids: Tensor) -> Tensor:
    """What a block's mask slots see: pair slots `first` .. `last`-1, then the block's own slots.

    Args:
        anchor_pos, depth: the block's slots, int64, [num_slots].
        first, last: range of pair slots offered as keys.
        document_ids: int64, [num_pairs].

    Returns:
        bool, [num_slots, last - first + num_slots].
    """
    pairs = torch.arange(first, last, device=anchor_pos.device)
    return visible(
        anchor_pos,
        depth,
        torch.cat([pairs, anchor_pos]),
        torch.cat([torch.zeros_like(pairs), depth]),
        document_ids,
    )
