"""Two ways to draft with one network: P-EAGLE, all K tokens in one pass; EAGLE-3, one token after another.

A round hands over the newly verified pairs of each row (token x_{i+1} with state g_i at position i). The drafter's
cache keeps real pairs only: what a draft adds beyond them (mask slots, own tokens) is overwritten by the next round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafter import Drafter
from peagle.engine.acceptance import pick
from peagle.engine.cache import KeyValues
from peagle.engine.fused import FusedDrafter
from peagle.engine.sampling import Sampling, probabilities
from peagle.engine.span import Ruler, Span


@dataclass(frozen=True)
class Draft:
    """What is proposed for each row."""

    ids: Tensor
    """Verifier ids, int64, [num_rows, num_speculative_tokens]."""
    probs: Tensor | None
    """What they were drawn from, over the verifier's vocabulary, [num_rows, num_speculative_tokens, vocab_size]; None
    in greedy decoding."""


class Drafting:
    """Drafts for rows of a batch, holding the drafter's cache.

    Args:
        drafter: P-EAGLE or EAGLE-3; its config says which.
        layers: the same drafter's layers for inference.
        num_speculative_tokens: K.
        sampling: greedy takes the drafter's most likely tokens; else tokens are drawn from its distributions, under the
            same temperature and top-p as the verifier's.
        vocab_size: of the verifier's logits.
        num_rows, capacity: size of the cache.
    """

    def __init__(
        self,
        drafter: Drafter,
        layers: FusedDrafter,
        num_speculative_tokens: int,
        sampling: Sampling,
        vocab_size: int,
        num_rows: int,
        capacity: int,
    ) -> None:
        self._drafter, self._depth, self._sampling, self._vocab_size = (
            drafter,
            num_speculative_tokens,
            sampling,
            vocab_size,
        )
        weight = drafter.fc.weight
        self._device = weight.device
        self._layers = layers
        layers.reserve(capacity + 2 * num_speculative_tokens)
        self._cache = KeyValues(num_rows, capacity)
        self._ruler = Ruler(capacity, 2 * num_speculative_tokens + 1, weight.dtype, weight.device)
        self._span: Span | None = None
        self._mask: Tensor | None = None
        self._is_parallel = drafter.config.speculators_model_type == "peagle"
        self._shares_heads = drafter.config.num_attention_heads != drafter.config.num_key_value_heads
        if self._is_parallel:
            self._masks = drafter.embed_masks(num_speculative_tokens - 1)
        self._verifier_ids = drafter.to_verifier_ids(torch.arange(drafter.config.draft_vocab_size, device=self._device))

    def propose(
        self,
        first_row: int,
        pair_ids: Tensor,
        aux_states: Tensor,
        starts: list[int],
        counts: list[int],
        uniforms: Tensor | None,
    ) -> Draft:
        """Take in new pairs, then draft.

        Args:
            first_row: the first of the neighbouring rows.
            pair_ids: x_{i+1}, int64, [num_rows, max(counts)]; a row's entries past its count are ignored.
            aux_states: g_i, [num_rows, max(counts), aux_size].
            starts: position i of each row's first new pair.
            counts: new pairs of each row, at least one.
            uniforms: draws from [0, 1), [num_rows, num_speculative_tokens]; None in greedy decoding.
        """
        embeds, hidden = self._drafter.embed_pairs(pair_ids, aux_states)
        if self._is_parallel:
            return self._draw(self._parallel(first_row, embeds, hidden, starts, counts), uniforms)
        drawn = []
        carried = self._last(self._pass(first_row, embeds, hidden, starts), counts)
        after = [start + count for start, count in zip(starts, counts)]
        for k in range(self._depth):
            drawn.append(self._draw(carried, None if uniforms is None else uniforms[:, k : k + 1]))
            if k + 1 < self._depth:
                embeds = self._drafter.embed_tokens(drawn[-1].ids)
                if self._drafter.config.norm_output:
                    carried = self._drafter.norm(carried)
                carried = self._pass(first_row, embeds, carried, [position + k for position in after])
        probs = None if uniforms is None else torch.cat([draft.probs for draft in drawn if draft.probs is not None], 1)
        return Draft(torch.cat([draft.ids for draft in drawn], 1), probs)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's cached pairs over another row."""
        self._cache.move(source, target, length)

    def _parallel(self, first_row: int, embeds: Tensor, hidden: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """One causal pass over [new pairs, K - 1 masks]: states of the last pair and the masks, [rows, K, hidden]."""
        rows, longest = embeds.shape[:2]
        extra = self._depth - 1
        mask_embeds, mask_hidden = (part.expand(rows, extra, -1) for part in self._masks)
        embeds, hidden = torch.cat([embeds, mask_embeds], 1), torch.cat([hidden, mask_hidden], 1)
        if min(counts) == longest:
            return self._pass(first_row, embeds, hidden, starts)[:, longest - 1 :]
        # Ragged: a row's mask slots follow its own last pair. Slots past them see garbage and are seen by nobody.
        slots = torch.arange(longest + extra, device=self._device)
        past = slots - torch.tensor(counts, device=self._device)[:, None]
        source = torch.where(past < 0, slots, longest + past.clamp(max=extra - 1) if extra else slots)
        take = source[..., None].expand(-1, -1, embeds.shape[-1])
        found = self._pass(first_row, embeds.gather(1, take), hidden.gather(1, take), starts)
        at = torch.tensor(counts, device=self._device)[:, None] - 1 + slots[: self._depth]
        return found.gather(1, at[..., None].expand(-1, -1, found.shape[-1]))

    def _last(self, states: Tensor, counts: list[int]) -> Tensor:
        """Each row's state at its last new pair, [rows, 1, hidden]."""
        if min(counts) == states.shape[1]:
            return states[:, -1:]
        at = torch.tensor(counts, device=self._device)[:, None, None] - 1
        return states.gather(1, at.expand(-1, -1, states.shape[-1]))

    def _pass(self, first_row: int, embeds: Tensor, hidden: Tensor, starts: list[int]) -> Tensor:
        self._span = self._ruler.span(first_row, starts, embeds.shape[1])
        self._mask = self._ruler.causal(self._span)
        return self._layers.run(embeds, hidden, self._span, self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._span is not None
        keys, values = self._cache.write(layer, k, v, self._span)
        is_square = self._mask is None and self._span.num_tokens > 1
        return F.scaled_dot_product_attention(
            q, keys, values, self._mask, is_causal=is_square, enable_gqa=self._shares_heads
        )

    def _draw(self, carried: Tensor, uniforms: Tensor | None) -> Draft:
        """Tokens from states before the final norm, [rows, num_drawn, hidden]."""
        logits = self._layers.logits(carried)
        if uniforms is None:
            return Draft(self._drafter.to_verifier_ids(logits.argmax(-1)), None)
        probs = probabilities(logits, self._sampling.temperature, self._sampling.top_p)
        ids = self._verifier_ids[pick(probs, uniforms)]
        if probs.shape[-1] != self._vocab_size:
            wide = probs.new_zeros(*probs.shape[:-1], self._vocab_size)
            probs = wide.index_copy_(-1, self._verifier_ids, probs)
        return Draft(ids, probs)
