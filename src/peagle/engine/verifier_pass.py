"""One forward of a Transformers model over a span, with its own preallocated cache and the states the drafter reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from peagle.engine.cache import KeyValues, Ruler, Span
from peagle.errors import VerifierError

_ATTENTION = "peagle_engine"
LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


class VerifierCache(Cache):
    """`KeyValues` behind the interface that Transformers' attention layers call. Set `span` before each forward."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.kept = KeyValues(num_rows, capacity)
        self.span: Span | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: keep the new keys and values, give all of the rows."""
        assert self.span is not None
        return self.kept.write(layer_idx, key_states, value_states, self.span)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the pass."""
        return 0 if self.span is None else self.span.end - self.span.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of the keys."""
        return (query_length if self.span is None else self.span.end), 0


class VerifierPass:
    """Runs the verifier, inside its `session`; one at a time per model.

    Args:
        model: a causal language model of Transformers, in eval mode, with sdpa or eager attention.
        aux_layer_ids: layers whose inputs are wanted, ascending (id L: the output of the last one); None: no states.
        num_rows, capacity: size of the cache.
        longest: most tokens of a pass that does not start at position 0.

    Raises:
        VerifierError: an attention implementation or a kind of layer whose cache cannot be rolled back.
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
        self._kinds, self._window = _attention_kinds(self.model.config)
        self._is_eager = self.model.config.get_text_config()._attn_implementation == "eager"
        self.cache = VerifierCache(num_rows, capacity)
        self.ruler = Ruler(capacity, longest, self.model.dtype, self.model.device)
        self._taken: dict[int, Tensor] = {}

    @contextmanager
    def session(self) -> Iterator[None]:
        """Take the auxiliary states (none where none are wanted) and use our attention, until left."""
        layers = self.model.get_decoder().layers
        config = self.model.config.get_text_config()
        implementation = config._attn_implementation
        if implementation == "sdpa":
            config._attn_implementation = _ATTENTION
        wrapped: list[tuple[nn.Module, Any]] = []
        for layer_id in self.aux_layer_ids or ():
            layer = layers[min(layer_id, len(layers) - 1)]
            wrapped.append((layer, layer.__dict__.get("forward")))
            layer.forward = self._taking(layer.forward, layer_id, layer_id < len(layers))
        try:
            yield
        finally:
            config._attn_implementation = implementation
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
        output = self.model(
            input_ids=token_ids,
            attention_mask=self._masks(span),
            position_ids=span.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        if self.aux_layer_ids is None:
            return output.logits, None
        states = [self._taken[layer_id] for layer_id in self.aux_layer_ids]
        self._taken.clear()
        return output.logits, torch.cat(states, -1)

    def _masks(self, span: Span) -> Any:
        """One mask where all layers attend alike, else one per kind: Transformers takes both, ready-made."""
        masks = {}
        for kind in self._kinds:
            if kind == "full_attention":
                mask = self.ruler.causal(span)
            else:
                mask = self.ruler.limited(span, self._window, kind == "chunked_attention")
            if mask is None and self._is_eager and span.num_tokens > 1:
                mask = self.ruler.square(span)
            masks[kind] = mask
        return masks if len(masks) > 1 else masks[self._kinds[0]]

    def _taking(self, forward: Callable[..., Any], layer_id: int, is_input: bool) -> Callable[..., Any]:
        """A layer's forward that leaves its input, or its output, in `_taken`. A hook would do, but sends every call of
        the layer through the slow path of nn.Module: 0.2 ms of a 6 ms pass."""

        def taking(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            output = forward(hidden_states, *args, **kwargs)
            if is_input:
                self._taken[layer_id] = hidden_states
            else:
                self._taken[layer_id] = output[0] if isinstance(output, tuple) else output
            return output

        return taking


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Transformers' sdpa, but for grouped queries beside a mask it does not repeat keys and values.

    Not registered with a mask function, so that Transformers takes our masks as they are and makes none of its own.
    """
    if kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attention)


def _attention_kinds(config: Any) -> tuple[tuple[str, ...], int]:
    """The kinds of attention layers of a model, and the window of those that are limited (0 if none)."""
    config = config.get_text_config()
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager", _ATTENTION):
        raise VerifierError(f"attention {implementation!r}: the engine needs attn_implementation sdpa or eager")
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "chunked_attention" if chunk else "full_attention"]
    unknown = sorted(set(kinds) - set(LAYER_KINDS))
    if unknown or getattr(config, "num_kv_shared_layers", None):
        what = ", ".join(unknown) or "layers that share keys and values"
        raise VerifierError(
            f"{config.model_type}: {what}: the engine cannot roll back such a cache; evaluate with vLLM"
        )
    if "sliding_attention" in kinds and "chunked_attention" in kinds:
        raise VerifierError(f"{config.model_type}: sliding and chunked attention in one model are not supported")
    limit = chunk if "chunked_attention" in kinds else window if "sliding_attention" in kinds else 0
    return tuple(dict.fromkeys(kinds)), limit or 0
