"""What the drafter would draft at every position of a known text, from one pass over it: no engine, no cache, no loop.

Written beside the engine on purpose: attention is spelled out, and nothing is shared with `engine/` but the network.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafter import Drafter

_MOST_SCORES = 1 << 24
"""Attention scores, or logits, held at once: bounds memory whatever the row's length."""


def chain_logits(
    drafter: Drafter, pair_ids: Tensor, aux_states: Tensor, anchors: Tensor, depth: int, said_ids: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The drafter's logits at every depth of every anchor.

    Args:
        drafter: P-EAGLE (all depths at once) or EAGLE-3 (each chain goes on from the tokens before it).
        pair_ids: x_{i+1}, int64, [num_pairs].
        aux_states: g_i, [num_pairs, aux_size].
        anchors: positions in [0, num_pairs), ascending, int64, [num_anchors].
        depth: tokens per chain.
        said_ids: for EAGLE-3, the token that the chain of anchor a goes on from after depth d at [a + d], int64; None:
            its own greedy ones.

    Yields:
        Blocks of (anchors, logits [num_anchors_of_block, depth, draft_vocab_size]).
    """
    config = drafter.config
    embeds, hidden = drafter.embed_pairs(pair_ids, aux_states)
    cos, sin = drafter.rotary(torch.arange(len(pair_ids), device=pair_ids.device), hidden.dtype)
    is_shared = config.num_attention_heads != config.num_key_value_heads

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_shared)
        return attended[0].transpose(0, 1).flatten(1)

    carried, keys, values = drafter.base_pass(embeds, hidden, cos, sin, causal, False)
    per_anchor = depth * max(config.num_attention_heads * (len(pair_ids) + depth), config.vocab_size)
    block = max(1, _MOST_SCORES // per_anchor)
    for some in anchors.split(block):
        chain = _Chain(drafter, keys, values, some)
        if config.speculators_model_type == "peagle":
            states = carried[some][:, None]
            if depth > 1:
                states = torch.cat([states, chain.masks(depth - 1)], 1)
            yield some, drafter.logits(drafter.norm(states))
        else:
            yield some, chain.sequential(carried[some][:, None], depth, said_ids)


class _Chain:
    """The slots past the anchors of one block: each sees the pairs up to its anchor, and its own chain."""

    def __init__(self, drafter: Drafter, base_keys: list[Tensor], base_values: list[Tensor], anchors: Tensor) -> None:
        self._drafter, self._anchors = drafter, anchors
        last = int(anchors.max()) + 1
        self._base = [(k[:last], v[:last]) for k, v in zip(base_keys, base_values)]
        self._unseen = torch.arange(last, device=anchors.device) > anchors[:, None]
        self._own: dict[int, tuple[Tensor, Tensor]] = {}

    def masks(self, count: int) -> Tensor:
        """Carried states of the mask slots at depths 1 .. count, [num_anchors, count, hidden_size]."""
        entered = self._drafter.enter(*self._drafter.embed_masks(1))
        return self._drafter.carried_pass(entered, self._positions(1, count), self._attend)

    def sequential(self, carried: Tensor, depth: int, said_ids: Tensor | None) -> Tensor:
        """Logits of EAGLE-3's steps, [num_anchors, depth, draft_vocab_size]."""
        logits = []
        for k in range(depth):
            normed = self._drafter.norm(carried)
            logits.append(self._drafter.logits(normed))
            if k + 1 < depth:
                if said_ids is None:
                    ids = self._drafter.to_verifier_ids(logits[-1].argmax(-1))
                else:
                    ids = said_ids[(self._anchors + k).clamp(max=len(said_ids) - 1)][:, None]
                entered = self._drafter.enter(self._drafter.embed_tokens(ids), self._drafter.fed_back(carried, normed))
                carried = self._drafter.carried_pass(entered, self._positions(k + 1, 1), self._attend)
        return torch.cat(logits, 1)

    def _positions(self, first: int, count: int) -> Tensor:
        return self._anchors[:, None] + torch.arange(first, first + count, device=self._anchors.device)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`: a leading dimension of anchors, then the slots of each."""
        if layer in self._own:
            k, v = torch.cat([self._own[layer][0], k], 1), torch.cat([self._own[layer][1], v], 1)
        self._own[layer] = (k, v)
        base_k, base_v = self._base[layer]
        q = q.unflatten(2, (k.shape[2], -1)) / q.shape[-1] ** 0.5
        to_base = torch.einsum("anghd,tgd->anght", q, base_k)
        to_base = to_base.masked_fill(self._unseen[:, None, None, None], float("-inf"))
        to_own = torch.einsum("anghd,acgd->anghc", q, k)
        later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
        to_own = to_own.masked_fill(later[:, None, None], float("-inf"))
        weights = torch.cat([to_base, to_own], -1).softmax(-1)
        mixed = torch.einsum("anght,tgd->anghd", weights[..., : len(base_k)], base_v)
        mixed = mixed + torch.einsum("anghc,acgd->anghd", weights[..., len(base_k) :], v)
        return mixed.flatten(2)
