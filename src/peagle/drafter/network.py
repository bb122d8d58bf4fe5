"""The drafter: one small transformer that reads verifier states. Training, the engine and vLLM run the same pass.

A slot enters as (token embedding, verifier state through `fc`); layer 0 reads both halves, each under its own norm, and
carries the state as residual. Pair slots carry real tokens and states, mask slots `mask_token_id` and `mask_hidden`.
Who sees whom is the caller's: `base_pass` and `carried_pass` hand queries, keys and values to an `attend` function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.drafter.model_config import DrafterConfig
from peagle.errors import ConfigError, one_line
from peagle.kernels.cpu import linear, rms_norm, swiglu

# attend(layer, q [..., num_slots, num_heads, head_dim], k and v [..., num_slots, num_kv_heads, head_dim])
#   -> [..., num_slots, num_heads * head_dim]; q and k arrive rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Entered:
    """Slots as they stand before the attention of layer 0: projected, not rotated yet. `[1, ...]` stands for all slots.

    Mask slots differ only by position, so theirs is computed once for all of them.
    """

    q: Tensor
    """[..., num_slots or 1, num_heads, head_dim]"""
    k: Tensor
    """[..., num_slots or 1, num_kv_heads, head_dim]"""
    v: Tensor
    """[..., num_slots or 1, num_kv_heads, head_dim]"""
    residual: Tensor
    """[..., num_slots or 1, hidden_size]"""


class Norm(nn.Module):
    """RMS norm with a weight, no bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """The projections of one layer, and the norms of queries and keys that qwen3 has."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_size, heads * width, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=bias)
        self.head_dim = width
        if config.layer_type == "qwen3":
            self.q_norm: Norm | None = Norm(width, config.rms_norm_eps)
            self.k_norm: Norm | None = Norm(width, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = None

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., input_size] -> q [..., heads, head_dim], k and v [..., kv_heads, head_dim], not rotated yet."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (linear(x, one.weight, one.bias).unflatten(-1, (-1, self.head_dim)) for one in projections)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., hidden_size]"""
        return swiglu(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


class Layer(nn.Module):
    """A decoder layer. The first one reads [normed embedding, normed state], the others the residual alone."""

    def __init__(self, config: DrafterConfig, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.norm_before_residual = config.norm_before_residual
        if is_first:
            self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, (1 + is_first) * config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the projections read, and the residual: [..., input_size] and [..., hidden_size]."""
        if not self.is_first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        return torch.cat([self.input_layernorm(embeds), normed], -1), normed if self.norm_before_residual else hidden

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection, then the MLP, each added to the residual: [..., hidden_size]."""
        project = self.self_attn.o_proj
        hidden = residual + linear(attended, project.weight, project.bias)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafter(nn.Module):
    """The network whose state dict has exactly the checkpoint's tensor names.

    Weights start random (normal, 0.02); training overwrites embedding, head and norm with the verifier's.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.input_norm = Norm(config.aux_size, config.rms_norm_eps) if config.norm_before_fc else None
        self.fc = nn.Linear(config.aux_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(config, index == 0) for index in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.mask_hidden = (
            nn.Parameter(torch.zeros(1, 1, config.aux_size)) if config.speculators_model_type == "peagle" else None
        )
        if config.is_pruned:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.set_frequencies()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def set_frequencies(self) -> None:
        """Make the rotary table's frequencies; once more after a drafter was made on the `meta` device.

        They are no buffer: `to(dtype)` would round it, and at 2,048 positions a bfloat16 frequency is off by 2.4 rad.
        """
        self._inv_freq, self.rope_scale = inverse_frequencies(self.config)

    def project(self, aux_states: Tensor) -> Tensor:
        """Verifier states to the drafter's width: [..., aux_size] -> [..., hidden_size]."""
        return self.fc(aux_states if self.input_norm is None else self.input_norm(aux_states))

    def embed_pairs(self, pair_ids: Tensor, aux_states: Tensor) -> tuple[Tensor, Tensor]:
        """Real slots: token x_{i+1} with state g_i.

        Args:
            pair_ids: already shifted, int64, [..., num_slots].
            aux_states: [..., num_slots, aux_size].

        Returns:
            (embeds, hidden), both [..., num_slots, hidden_size].
        """
        return self.embed_tokens(pair_ids), self.project(aux_states)

    def embed_masks(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """Mask slots: all alike, so computed once and expanded; (embeds, hidden), both [num_slots, hidden_size]."""
        assert self.mask_hidden is not None, "EAGLE-3 drafters have no mask slots"
        ids = torch.full((1,), self.config.mask_token_id or 0, device=self.mask_hidden.device)
        embeds, hidden = self.embed_tokens(ids), self.project(self.mask_hidden[0])
        return embeds.expand(num_slots, -1), hidden.expand(num_slots, -1)

    def rotary(self, rope_pos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for `rotate`, each [..., num_slots, 1, head_dim]."""
        if self._inv_freq.device != rope_pos.device:
            self._inv_freq = self._inv_freq.to(rope_pos.device)
        return rotary_table(self._inv_freq, self.rope_scale, rope_pos, dtype)

    def decoder(self) -> list[Layer]:
        """The layers, as what they are."""
        return cast("list[Layer]", list(self.layers))

    def enter(self, embeds: Tensor, hidden: Tensor) -> Entered:
        """Layer 0's norms and projections of slots, each input [..., num_slots, hidden_size]."""
        first = self.decoder()[0]
        read, residual = first.enter(embeds, hidden)
        q, k, v = first.self_attn.qkv(read)
        return Entered(q, k, v, residual)

    def base_pass(
        self,
        embeds: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        checkpoint: bool,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """All pair slots, keeping each layer's keys and values as part of the graph.

        Args:
            embeds, hidden: from `embed_pairs`, [num_pairs, hidden_size].
            cos, sin: from `rotary`.
            attend: causal attention, document by document.
            checkpoint: recompute a layer's inside in the backward; its input, keys and values are kept.

        Returns:
            States BEFORE the final norm [num_pairs, hidden_size]; rotated keys and values of each layer,
            [num_pairs, num_kv_heads, head_dim].
        """
        keys, values = [], []

        def one(layer: Layer, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            read, residual = layer.enter(embeds, hidden)
            q, k, v = layer.self_attn.qkv(read)
            k = rotate(k, cos, sin)
            return layer.leave(residual, attend(rotate(q, cos, sin), k, v)), k, v

        for layer in self.decoder():
            if checkpoint:
                hidden, k, v = torch.utils.checkpoint.checkpoint(one, layer, embeds, hidden, use_reentrant=False)
            else:
                hidden, k, v = one(layer, embeds, hidden)
            keys.append(k)
            values.append(v)
        return hidden, keys, values

    def carried_pass(self, entered: Entered, rope_pos: Tensor, attend: Attend) -> Tensor:
        """All layers without the final norm, [..., hidden_size]. See `fed_back` for what EAGLE-3 carries on."""
        cos, sin = self.rotary(rope_pos, entered.residual.dtype)
        q, k, v, residual = entered.q, entered.k, entered.v, entered.residual
        v = v.expand(*rope_pos.shape, *v.shape[-2:])
        hidden = residual
        for index, layer in enumerate(self.decoder()):
            if index:
                read, residual = layer.enter(hidden, hidden)
                q, k, v = layer.self_attn.qkv(read)
            hidden = layer.leave(residual, attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v))
        return hidden

    def fed_back(self, carried: Tensor, normed: Tensor) -> Tensor:
        """What EAGLE-3 feeds to its next step: the state before the final norm, or after it with `norm_output`."""
        return normed if self.config.norm_output else carried

    def logits(self, states: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., draft_vocab_size]"""
        return self.lm_head(states)

    def to_verifier_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary ids to verifier ids: id + d2t[id]; the same ids without a pruned vocabulary."""
        return draft_ids + self.d2t[draft_ids] if self.config.is_pruned else draft_ids

    @property
    def draft_ids(self) -> Tensor:
        """Verifier ids of the whole draft vocabulary, ascending, int64, [draft_vocab_size]."""
        return self.to_verifier_ids(torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device))


def inverse_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Inverse frequencies, float32, [head_dim / 2], and the factor that some types (yarn) put on cos and sin.

    Transformers computes them, so that every type means what it means in the verifier's config.

    Raises:
        ConfigError: the rope parameters lack what their type needs, or hold what is no number.
    """
    try:
        table = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.num_attention_heads * config.head_dim,  # qwen3 layers may be of another width
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )
    except Exception as error:  # Transformers' checks of rope parameters raise classes of their own
        reason = one_line(error)
        raise ConfigError(f"rope_parameters {dict(config.rope_parameters)} cannot be used ({reason})") from None
    return table.inv_freq.detach().clone().float(), float(table.attention_scaling)


def rotary_table(inv_freq: Tensor, scale: float, rope_pos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of each slot, computed in float32, each [..., num_slots, 1, head_dim]."""
    angles = rope_pos.to(torch.float32)[..., None] * inv_freq
    angles = torch.cat([angles, angles], -1)[..., None, :]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads: [..., num_slots, num_heads, head_dim] by tables of [..., num_slots, 1, head_dim]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
