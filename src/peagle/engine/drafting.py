"""Two ways to draft with one network: P-EAGLE, all K tokens in one pass; EAGLE-3, one token after another.

A round hands over the newly verified pairs of each row (token x_{i+1} with state g_i at position i). The drafter's
cache keeps real pairs only: what a draft adds beyond them (mask slots, own tokens) is overwritten by the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import Sampling
from peagle.drafter.network import Drafter, Layer
from peagle.engine.acceptance import pick, probabilities
from peagle.engine.cache import KeyValues, Ruler, Span

# attend(layer, q [num_rows, num_heads, num_tokens, head_dim], k and v [num_rows, num_kv_heads, num_tokens, head_dim])
#   -> like q; q and k arrive rotated.
AttendHeads = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Proposal:
    """What is proposed for each row."""

    ids: Tensor
    """Verifier ids, int64, [num_rows, num_speculative_tokens]."""
    probs: Tensor | None
    """What they were drawn from, over the verifier's vocabulary, [num_rows, num_speculative_tokens, vocab_size]; None
    in greedy decoding."""


class Drafting:
    """Drafts for rows of a batch, holding the drafter's cache.

    Args:
        layers: the drafter for inference, P-EAGLE or EAGLE-3; its config says which.
        sampling: greedy takes the drafter's most likely tokens; else tokens are drawn from its distributions, under the
            same temperature and top-p as the verifier's.
        vocab_size: of the verifier's logits.
    """

    def __init__(
        self,
        layers: FusedDrafter,
        num_speculative_tokens: int,
        sampling: Sampling,
        vocab_size: int,
        num_rows: int,
        capacity: int,
    ) -> None:
        self._layers, self._drafter, self._depth = layers, layers.drafter, num_speculative_tokens
        self._sampling, self._vocab_size = sampling, vocab_size
        weight = self._drafter.fc.weight
        self._device = weight.device
        layers.reserve(capacity + 2 * num_speculative_tokens)
        self._cache = KeyValues(num_rows, capacity)
        self._ruler = Ruler(capacity, 2 * num_speculative_tokens + 1, weight.dtype, weight.device)
        self._is_parallel = self._drafter.config.speculators_model_type == "peagle"
        if self._is_parallel:
            self._masks = self._drafter.embed_masks(num_speculative_tokens - 1)

    def propose(
        self,
        first_row: int,
        pair_ids: Tensor,
        aux_states: Tensor,
        starts: list[int],
        counts: list[int],
        uniforms: Tensor | None,
    ) -> Proposal:
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
        # EAGLE-3: the state at each row's last new pair, then one slot per token drafted
        drawn = []
        carried = self._pass(first_row, embeds, hidden, starts)  # [rows, max(counts), hidden]
        if min(counts) < carried.shape[1]:
            carried = self._from_each(carried, torch.tensor(counts, device=self._device)[:, None] - 1)
        carried = carried[:, -1:]  # [rows, 1, hidden]
        for k in range(self._depth):
            drawn.append(self._draw(carried, None if uniforms is None else uniforms[:, k : k + 1]))
            if k + 1 < self._depth:
                embeds = self._drafter.embed_tokens(drawn[-1].ids)
                if self._drafter.config.norm_output:
                    carried = self._drafter.norm(carried)
                after = [start + count + k for start, count in zip(starts, counts)]
                carried = self._pass(first_row, embeds, carried, after)
        probs = None if uniforms is None else torch.cat([draft.probs for draft in drawn if draft.probs is not None], 1)
        return Proposal(torch.cat([draft.ids for draft in drawn], 1), probs)

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
        num_pairs = torch.tensor(counts, device=self._device)[:, None]
        past = slots - num_pairs
        source = torch.where(past < 0, slots, longest + past.clamp(max=extra - 1) if extra else slots)
        embeds, hidden = self._from_each(embeds, source), self._from_each(hidden, source)
        states = self._pass(first_row, embeds, hidden, starts)
        return self._from_each(states, num_pairs - 1 + slots[: self._depth])

    @staticmethod
    def _from_each(states: Tensor, at: Tensor) -> Tensor:
        """Slots of each row: [rows, slots, hidden] at [rows, count] -> [rows, count, hidden]."""
        return states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))

    def _pass(self, first_row: int, embeds: Tensor, hidden: Tensor, starts: list[int]) -> Tensor:
        span = self._ruler.span(first_row, starts, embeds.shape[1])
        mask = self._ruler.causal(span)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.write(layer, k, v, span)
            is_square = mask is None and span.num_tokens > 1
            return F.scaled_dot_product_attention(
                q, keys, values, mask, is_causal=is_square, enable_gqa=q.shape[1] != k.shape[1]
            )

        return self._layers.run(embeds, hidden, span, attend)

    def _draw(self, carried: Tensor, uniforms: Tensor | None) -> Proposal:
        """Tokens from states before the final norm, [rows, num_drawn, hidden]."""
        logits = self._layers.logits(carried)
        if uniforms is None:
            return Proposal(self._drafter.to_verifier_ids(logits.argmax(-1)), None)
        probs = probabilities(logits, self._sampling.temperature, self._sampling.top_p)
        ids = self._drafter.to_verifier_ids(pick(probs, uniforms))
        if probs.shape[-1] != self._vocab_size:
            wide = probs.new_zeros(*probs.shape[:-1], self._vocab_size)
            probs = wide.index_copy_(-1, self._drafter.draft_ids, probs)
        return Proposal(ids, probs)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    input_norm: Tensor
    hidden_norm: Tensor | None
    """The first layer's norm of the state; the others have none."""
    qkv: Tensor
    """[(num_heads + 2 * num_kv_heads) * head_dim, input_size]"""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """Weights of the norms of queries and keys, one line per head, [num_heads + num_kv_heads, head_dim]."""
    out: Tensor
    """Transposed for `addmm`, [num_heads * head_dim, hidden_size]."""
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    """Transposed, [intermediate_size, hidden_size]."""


class FusedDrafter:
    """A drafter's layers, as they are now, for decoding: `Drafter.carried_pass` with fewer, larger operations."""

    def __init__(self, drafter: Drafter) -> None:
        config = drafter.config
        self._hidden, self._eps = (config.hidden_size,), config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim, self._is_residual_normed = config.head_dim, config.norm_before_residual
        self._layers = [_fuse(cast(Layer, layer), self._heads, self._kv_heads) for layer in drafter.layers]
        self._norm, self._head = drafter.norm.weight.detach(), drafter.lm_head.weight.detach()
        self.drafter = drafter
        self._cos = self._sin = drafter.fc.weight.new_empty(0)

    def reserve(self, capacity: int) -> None:
        """Compute rotary tables for so many positions, unless they are there."""
        if len(self._cos) >= capacity:
            return
        weight, half = self.drafter.fc.weight, self._head_dim // 2
        self._cos, sin = self.drafter.rotary(torch.arange(capacity, device=weight.device), weight.dtype)
        # rotate(x) = x * cos + [-x_2, x_1] * sin = x * cos + roll(x) * [-sin_1, sin_2]
        self._sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)

    def logits(self, carried: Tensor) -> Tensor:
        """The final norm and the head: [..., hidden_size] -> [..., draft_vocab_size]."""
        return F.linear(F.rms_norm(carried, self._hidden, self._norm, self._eps), self._head)

    def run(self, embeds: Tensor, hidden: Tensor, span: Span, attend: AttendHeads) -> Tensor:
        """All layers without the final norm: [num_rows, num_tokens, hidden_size].

        Args:
            embeds, hidden: as for `Drafter.enter`, of the same shape.
            span: positions of the slots, within what was reserved.
            attend: attention of one layer.
        """
        rows, tokens = span.num_rows, span.num_tokens
        heads, both, width = self._heads, self._heads + self._kv_heads, self._head_dim
        if span.start is not None:
            cos, sin = (table.narrow(0, span.start, tokens) for table in (self._cos, self._sin))
        else:
            cos, sin = self._cos[span.positions], self._sin[span.positions]
        flat = hidden.reshape(rows * tokens, -1)
        for index, layer in enumerate(self._layers):
            if layer.hidden_norm is None:
                read = F.rms_norm(flat, self._hidden, layer.input_norm, self._eps)
            else:
                normed = F.rms_norm(flat, self._hidden, layer.hidden_norm, self._eps)
                token = F.rms_norm(embeds.reshape(rows * tokens, -1), self._hidden, layer.input_norm, self._eps)
                read = torch.cat([token, normed], -1)
                flat = normed if self._is_residual_normed else flat
            qkv = F.linear(read, layer.qkv, layer.qkv_bias).view(rows, tokens, -1, width)
            qk = qkv.narrow(2, 0, both)
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (width,), None, self._eps) * layer.qk_norm
            qk = torch.addcmul(qk * cos, qk.roll(width // 2, -1), sin).transpose(1, 2)
            values = qkv.narrow(2, both, self._kv_heads).transpose(1, 2)
            mixed = attend(index, qk.narrow(1, 0, heads), qk.narrow(1, heads, self._kv_heads), values)
            mixed = mixed.transpose(1, 2).reshape(rows * tokens, heads * width)
            flat = torch.addmm(flat, mixed, layer.out)
            if layer.out_bias is not None:
                flat = flat + layer.out_bias
            gate, up = F.linear(F.rms_norm(flat, self._hidden, layer.post_norm, self._eps), layer.gate_up).chunk(2, -1)
            flat = torch.addmm(flat, F.silu(gate) * up, layer.down)
        return flat.view(rows, tokens, -1)


def _fuse(layer: Layer, num_heads: int, num_kv_heads: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [projection.bias for projection in projections if projection.bias is not None]
    qk_norm = None
    if attention.q_norm is not None and attention.k_norm is not None:
        per_head = [attention.q_norm.weight] * num_heads + [attention.k_norm.weight] * num_kv_heads
        qk_norm = torch.stack([weight.detach() for weight in per_head])
    return _Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        hidden_norm=layer.hidden_norm.weight.detach() if layer.is_first else None,
        qkv=torch.cat([projection.weight.detach() for projection in projections]),
        qkv_bias=torch.cat([bias.detach() for bias in biases]) if biases else None,
        qk_norm=qk_norm,
        out=attention.o_proj.weight.detach().t(),
        out_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        down=mlp.down_proj.weight.detach().t(),
    )
