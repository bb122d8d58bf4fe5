"""A key/value cache and an attention for batched decoding: nothing is copied that need not be.

Transformers' dynamic cache copies all keys and values at each token, and its attention repeats them for grouped queries
whenever there is a mask. With small models both cost more than the model itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from peagle.verifier.local import TransformersVerifier, refuse_damaged_logits
from peagle.verifier.source import Generation, GenerationSettings

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


# ---- Batched greedy or sampled decoding: one verifier pass per token for all unfinished rows of a batch.


_LEAVE_AT = 0.125  # share of finished rows at which the batch is rebuilt without them: rebuilding copies the cache


def generate(
    verifier: TransformersVerifier,
    prompts: Sequence[list[int]],
    settings: GenerationSettings,
    seeds: Sequence[int],
    batch_size: int,
) -> Iterator[tuple[int, Generation]]:
    """Answer prompts, batched, with a key/value cache.

    Args:
        verifier: the model.
        prompts: token ids, none empty and each shorter than the verifier's limit.
        settings: lengths, eos, temperature, top-p, tail.
        seeds: one per prompt: at temperature > 0 a row's answer depends on its seed, not on its batch.
        batch_size: prompts that run together.

    Yields:
        (index of the prompt, its answer), as answers end.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        group = order[start : start + batch_size]
        done = generate_batch(verifier, [prompts[i] for i in group], settings, [seeds[i] for i in group])
        for place, generation in done:
            yield group[place], generation


def has_plain_cache(verifier: TransformersVerifier) -> bool:
    """Whether every layer is attention, so that keys and values are all that a pass leaves behind."""
    kinds = getattr(verifier.decoder.config, "layer_types", None) or ["full_attention"]
    return set(kinds) <= {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def new_cache(verifier: TransformersVerifier, capacity: int) -> Any:
    """An empty key/value cache for rows of at most `capacity` tokens."""
    if has_plain_cache(verifier):
        return GrowingCache(verifier.verifier_config.num_layers, capacity)
    return DynamicCache(config=verifier.decoder.config)


def own_logits(verifier: TransformersVerifier, normed: Tensor) -> Tensor:
    """The verifier's own logits, scaled and soft-capped, float32, from states after the final norm."""
    logits: Tensor = verifier.lm_head(normed).float() * verifier.verifier_config.logit_scale
    cap = verifier.verifier_config.logit_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def generate_batch(
    verifier: TransformersVerifier, prompts: Sequence[list[int]], settings: GenerationSettings, seeds: Sequence[int]
) -> Iterator[tuple[int, Generation]]:
    """Answer the prompts together.

    Args:
        verifier: the model.
        prompts: token ids; each shorter than the verifier's limit.
        settings: lengths, eos, temperature, top-p, tail.
        seeds: one per prompt.

    Yields:
        (index in `prompts`, its answer), as answers end.
    """
    verifier_config = verifier.verifier_config
    rows = [_Row(i, len(p), settings, verifier_config.max_position_embeddings) for i, p in enumerate(prompts)]
    if not has_plain_cache(verifier):  # recurrent layers read padding: only rows of one length may share a batch
        lengths = {len(prompt) for prompt in prompts}
        if len(lengths) > 1:
            for length in sorted(lengths):
                group = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
                part = generate_batch(verifier, [prompts[i] for i in group], settings, [seeds[i] for i in group])
                for place, generation in part:
                    yield group[place], generation
            return
    width = max(len(prompt) for prompt in prompts)
    longest = max(row.room for row in rows)
    uniforms = _uniforms(seeds, longest) if settings.temperature > 0 else None
    with torch.no_grad(), grouped_attention(verifier.decoder):
        batch = _Batch(verifier, prompts, width + longest)
        hidden = batch.prefill(prompts)
        active = rows
        for step in range(longest):
            logits = own_logits(verifier, hidden)
            if step == 0:
                refuse_damaged_logits(logits, verifier.model)
            if uniforms is None:
                chosen = logits.argmax(-1)
            else:
                numbers = uniforms[[row.index for row in active], step].to(logits.device)
                chosen = sample(logits, settings.temperature, settings.top_p, numbers)
            ended = 0
            for row, token in zip(active, chosen.tolist()):
                if not row.is_done and row.take(token):
                    yield row.index, row.generation()
                ended += row.is_done
            if ended == len(active):
                return
            if ended >= max(1, _LEAVE_AT * len(active)):
                kept = [place for place, row in enumerate(active) if not row.is_done]
                active = [active[place] for place in kept]
                index = torch.tensor(kept, device=verifier.device)
                batch.keep(index)
                chosen = chosen[index]
            hidden = batch.step(chosen)


def sample(logits: Tensor, temperature: float, top_p: float, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the distribution function at a given number.

    Args:
        logits: [batch_size, vocab_size].
        temperature: above 0.
        top_p: in (0, 1]: the smallest set of most probable tokens that reaches it is kept and renormalised.
        uniforms: one number in [0, 1) per row, [batch_size]: the only source of chance.

    Returns:
        Token ids, int64, [batch_size].
    """
    probabilities, ids = torch.softmax(logits.float() / temperature, -1).sort(-1, descending=True)
    mass = probabilities.cumsum(-1, dtype=torch.float64)
    if top_p < 1.0:
        is_kept = mass - probabilities < top_p
        mass = mass.clamp(max=mass.masked_fill(~is_kept, 0.0).amax(-1, keepdim=True))
    place = torch.searchsorted(mass, (uniforms.double() * mass[:, -1])[:, None], right=True)
    return ids.gather(-1, place.clamp(max=ids.shape[1] - 1))[:, 0]


def _uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """[num_rows, count]: each row's numbers come from its own generator."""
    return torch.stack([torch.rand(count, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


class _Row:
    """What one row has said so far."""

    def __init__(self, index: int, prompt_tokens: int, settings: GenerationSettings, max_positions: int) -> None:
        self.index, self.settings = index, settings
        left = max_positions - prompt_tokens
        self.limit = min(settings.max_new_tokens, left)
        self.room = min(self.limit + settings.tail_tokens, left)
        self.ids: list[int] = []
        self.end: int | None = None
        self.has_stopped = False
        self.is_done = False

    def take(self, token: int) -> bool:
        """Add a token; true when nothing more is wanted."""
        self.ids.append(token)
        if self.end is None:
            self.has_stopped = token in self.settings.eos_ids
            if self.has_stopped or len(self.ids) == self.limit:
                self.end = len(self.ids)
        self.is_done = self.end is not None and len(self.ids) >= min(self.end + self.settings.tail_tokens, self.room)
        return self.is_done

    def generation(self) -> Generation:
        reason: Literal["stop", "length"] = "stop" if self.has_stopped else "length"
        return Generation(self.ids[: self.end], reason, self.ids[self.end :])


class _Batch:
    """The tensors of the rows that are still in the batch."""

    def __init__(self, verifier: TransformersVerifier, prompts: Sequence[list[int]], capacity: int) -> None:
        self.verifier = verifier
        self.width = max(len(prompt) for prompt in prompts)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.mask = torch.ones(len(prompts), capacity, dtype=torch.int64)
        for r, prompt in enumerate(prompts):
            self.mask[r, : self.width - len(prompt)] = 0
        self.mask, self.lengths = self.mask.to(verifier.device), self.lengths.to(verifier.device)
        self.cache = new_cache(verifier, capacity)

    def prefill(self, prompts: Sequence[list[int]]) -> Tensor:
        """Run the prompts; the last position's normed state, [batch_size, hidden_size]."""
        ids = torch.zeros(len(prompts), self.width, dtype=torch.int64)
        for r, prompt in enumerate(prompts):
            ids[r, self.width - len(prompt) :] = torch.tensor(prompt)
        positions = (self.mask[:, : self.width].cumsum(-1) - 1).clamp(min=0)
        return self._run(ids.to(self.mask.device), positions)

    def step(self, tokens: Tensor) -> Tensor:
        """Run one more token of each row."""
        positions = self.lengths[:, None]
        self.lengths = self.lengths + 1
        self.width += 1
        return self._run(tokens[:, None], positions)

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows, and the columns in which every kept row is padding."""
        mask = self.mask[rows]
        first = int(mask[:, : self.width].argmax(-1).min()) if isinstance(self.cache, GrowingCache) else 0
        self.mask, self.lengths = mask[:, first:].contiguous(), self.lengths[rows]
        self.width -= first
        if isinstance(self.cache, GrowingCache):
            self.cache.keep(rows, first)
        else:
            self.cache.batch_select_indices(rows)

    def _run(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self.verifier.decoder(
            input_ids=ids,
            attention_mask=self.mask[:, : self.width],
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]
