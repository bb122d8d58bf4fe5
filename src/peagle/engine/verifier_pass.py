"""One forward of a Transformers model over a span, with its own preallocated cache and the states the drafter reads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from peagle.engine.cache import KeyValues, Ruler, Span
from peagle.errors import VerifierError
from peagle.verifier.local import decoder_of

_ATTENTION = "peagle_engine"
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class VerifierCache(Cache):
    """`KeyValues` behind the interface that Transformers' attention layers call. Set `span` before each forward."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.key_values = KeyValues(num_rows, capacity)
        self.span: Span | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: keep the new keys and values, give all of the rows."""
        assert self.span is not None
        return self.key_values.write(layer_idx, key_states, value_states, self.span)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the pass."""
        return 0 if self.span is None else self.span.end - self.span.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of the keys."""
        return (query_length if self.span is None else self.span.end), 0


class VerifierPass:
    """Runs the verifier, inside its `session`; one at a time per model.

    A model whose cache cannot be rolled back (recurrent layers) decodes plainly all the same, a row at a time, with
    Transformers' own cache, masks and attention.

    Args:
        model: a causal language model of Transformers, in eval mode, with sdpa or eager attention.
        aux_layer_ids: layers whose inputs are wanted, ascending (id L: the output of the last one); None: no states.
        longest: most tokens of a pass that does not start at position 0.

    Raises:
        VerifierError: the cache cannot be rolled back, and more than one row or more than one token is asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        aux_layer_ids: tuple[int, ...] | None,
        num_rows: int,
        capacity: int,
        longest: int,
    ) -> None:
        self.model: Any = model
        self.aux_layer_ids = aux_layer_ids
        self._config = self.model.config.get_text_config()
        obstacle = cache_obstacle(self._config)
        if obstacle is not None and (num_rows > 1 or longest > 1):
            name = self._config.model_type
            raise VerifierError(f"{name}: {obstacle}: the engine cannot roll back such a cache; evaluate with vLLM")
        self._rolls_back = obstacle is None
        self._layer_types, self._window = _layer_types(self._config)
        self._is_eager = self._config._attn_implementation == "eager"
        self.cache = VerifierCache(num_rows, capacity)
        self._own_cache: DynamicCache | None = None
        self.ruler = Ruler(capacity, longest, self.model.dtype, self.model.device)
        self._taken: dict[int, Tensor] = {}

    @contextmanager
    def session(self) -> Iterator[None]:
        """Take the auxiliary states (none where none are wanted) and use our attention, until left."""
        layers = decoder_of(self.model)[1] if self.aux_layer_ids else ()
        implementation = self._config._attn_implementation
        if implementation == "sdpa" and self._rolls_back:
            self._config._attn_implementation = _ATTENTION
        wrapped: list[tuple[nn.Module, Any]] = []
        for layer_id in self.aux_layer_ids or ():
            layer = layers[min(layer_id, len(layers) - 1)]
            wrapped.append((layer, layer.__dict__.get("forward")))
            layer.forward = self._taking(layer.forward, layer_id, layer_id < len(layers))
        try:
            yield
        finally:
            self._config._attn_implementation = implementation
            for layer, before in reversed(wrapped):
                if before is None:
                    del layer.forward
                else:
                    layer.forward = before

    def run(self, token_ids: Tensor, span: Span, num_logits: int) -> tuple[Tensor, Tensor | None]:
        """Forward the tokens of a span.

        Args:
            token_ids: int64, [num_rows, num_tokens].
            span: where they lie; every row's earlier positions are in the cache.
            num_logits: how many of the last tokens need logits.

        Returns:
            (logits [num_rows, num_logits, vocab_size], aux_states [num_rows, num_tokens, num_aux_layers * hidden_size]
            or None).
        """
        self.cache.span = span
        if not self._rolls_back and span.start == 0:
            self._own_cache = DynamicCache(config=self._config)
        output = self.model(
            input_ids=token_ids,
            attention_mask=self._masks(span) if self._rolls_back else None,
            position_ids=span.positions,
            past_key_values=self.cache if self._rolls_back else self._own_cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        if self.aux_layer_ids is None:
            return output.logits, None
        states = [self._taken[layer_id] for layer_id in self.aux_layer_ids]
        self._taken.clear()
        return output.logits, torch.cat(states, -1)

    def _masks(self, span: Span) -> Any:
        """One mask where all layers attend alike, else one per layer type: Transformers takes both, ready-made."""
        masks = {}
        for name in self._layer_types:
            is_full, is_chunked = name == "full_attention", name == "chunked_attention"
            mask = self.ruler.causal(span) if is_full else self.ruler.limited(span, self._window, is_chunked)
            if mask is None and self._is_eager and span.num_tokens > 1:
                mask = self.ruler.square(span)
            masks[name] = mask
        return masks if len(masks) > 1 else masks[self._layer_types[0]]

    def _taking(self, forward: Callable[..., Any], layer_id: int, is_input: bool) -> Callable[..., Any]:
        """A layer's forward that leaves its input, or its output, in `_taken`. A hook would do, but sends every call of
        the layer through the slow path of nn.Module: 0.2 ms of a 6 ms pass."""

        def taking(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            output = forward(hidden_states, *args, **kwargs)
            after = output[0] if isinstance(output, tuple) else output
            self._taken[layer_id] = hidden_states if is_input else after
            return output

        return taking


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Transformers' sdpa, but for grouped queries beside a mask it does not repeat keys and values.

    With one token a row, the query heads that share a key head become that head's queries: the same sums without
    `enable_gqa`, which has no fast kernel beside a mask (in bfloat16 on a CPU it takes ten times as long).

    Not registered with a mask function, so that Transformers takes our masks as they are and makes none of its own.
    """
    if kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows, num_heads, num_tokens, head_dim = query.shape
    if num_tokens == 1:
        grouped = query.reshape(rows, key.shape[1], -1, head_dim)  # [rows, kv_heads, heads per kv_head, head_dim]
        attended = F.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=kwargs.get("scaling"))
        return attended.reshape(rows, 1, num_heads, value.shape[-1]), None
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=kwargs.get("scaling"),
        enable_gqa=num_heads != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attention)


def cache_obstacle(config: Any) -> str | None:
    """What keeps our cache, keys and values each at a place that we choose, from serving a model; None: nothing."""
    if config._attn_implementation not in ("sdpa", "eager", _ATTENTION):
        return f"attention {config._attn_implementation!r} (sdpa and eager do)"
    unknown = sorted(set(_layer_types(config)[0]) - set(_LAYER_TYPES))
    if unknown:
        return ", ".join(unknown)
    if getattr(config, "num_kv_shared_layers", None):
        return "layers that share keys and values"
    if {"sliding_attention", "chunked_attention"} <= set(_layer_types(config)[0]):
        return "sliding and chunked attention in one model"
    return None


def _layer_types(config: Any) -> tuple[tuple[str, ...], int]:
    """The types of a model's layers, and the window of those that are limited (0 if none)."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    names = getattr(config, "layer_types", None)
    if names is None:
        names = ["sliding_attention" if window else "chunked_attention" if chunk else "full_attention"]
    limit = chunk if "chunked_attention" in names else window if "sliding_attention" in names else 0
    return tuple(dict.fromkeys(names)), limit or 0
