"""The drafter's layers laid out for decoding: `Drafter.carried_pass` with fewer, larger operations.

At five slots a pass, what a step costs is the number of operations and not their size: queries, keys and values come
from one product, gate and up from one, additions ride on the products, rotary tables are computed once. Equal to the
network within rounding (`tests/engine/test_fused.py`); training never uses it. Its weights are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafter import Drafter
from peagle.drafter.network import Layer
from peagle.engine.span import Span

# attend(layer, q [num_rows, num_heads, num_tokens, head_dim], k and v [num_rows, num_kv_heads, num_tokens, head_dim])
#   -> like q; q and k arrive rotated.
AttendHeads = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
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
    """A drafter's layers for inference.

    Args:
        drafter: the network; later changes of its weights are not seen.
    """

    def __init__(self, drafter: Drafter) -> None:
        config = drafter.config
        self._hidden, self._eps = (config.hidden_size,), config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim, self._is_residual_normed = config.head_dim, config.norm_before_residual
        self._layers = [_fuse(cast(Layer, layer), self._heads, self._kv_heads) for layer in drafter.layers]
        self._norm, self._head = drafter.norm.weight.detach(), drafter.lm_head.weight.detach()
        self._drafter = drafter
        self._cos = self._sin = drafter.fc.weight.new_empty(0)

    def reserve(self, capacity: int) -> None:
        """Compute rotary tables for so many positions, unless they are there."""
        if len(self._cos) >= capacity:
            return
        weight, half = self._drafter.fc.weight, self._head_dim // 2
        self._cos, sin = self._drafter.rotary(torch.arange(capacity, device=weight.device), weight.dtype)
        # rotate(x) = x * cos + [-x_2, x_1] * sin = x * cos + roll(x) * [-sin_1, sin_2]
        self._sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)

    def logits(self, carried: Tensor) -> Tensor:
        """The final norm and the head: [..., hidden_size] -> [..., draft_vocab_size]."""
        return F.linear(F.rms_norm(carried, self._hidden, self._norm, self._eps), self._head)

    def run(self, embeds: Tensor, hidden: Tensor, span: Span, attend: AttendHeads) -> Tensor:
        """All layers without the final norm.

        Args:
            embeds, hidden: as for `Drafter.enter`, [num_rows, num_tokens, hidden_size].
            span: positions of the slots, within what was reserved.
            attend: attention of one layer.

        Returns:
            [num_rows, num_tokens, hidden_size]
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
