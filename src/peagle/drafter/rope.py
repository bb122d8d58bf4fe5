"""Rotary positions. Frequencies come from Transformers, so that every type means what the verifier's config means."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.drafter.config import DrafterConfig
from peagle.errors import ConfigError


def inverse_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Inverse frequencies, float32, [head_dim / 2], and the factor that some types (yarn) put on cos and sin.

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
        found = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"rope_parameters {dict(config.rope_parameters)} cannot be used ({found})") from None
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
