"""Other projects' checkpoints, made small in their true layouts, and a forward of our own over their own tensors.

Nothing here uses `peagle`: it is the witness that a converted checkpoint drafts what its source did.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN, HEADS, KV, DIM, INTER, VOCAB, PRUNED = 64, 4, 2, 16, 48, 272, 90


def base_tensors(num_layers: int, *, pruned: bool, parallel: bool, bias: bool, qk_norm: bool, norm_before_fc: bool,
                 seed: int) -> dict[str, Tensor]:  # fmt: skip
    """Plain names, vLLM's: `layers.i.*`, `fc.weight`, `norm.weight` ..., float32."""
    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g) * columns**-0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=g)

    made = {"embed_tokens.weight": matrix(VOCAB, HIDDEN) * 4, "fc.weight": matrix(HIDDEN, 3 * HIDDEN)}
    made |= {"norm.weight": norm(HIDDEN), "lm_head.weight": 3 * matrix(PRUNED if pruned else VOCAB, HIDDEN)}
    if norm_before_fc:
        made["input_norm.weight"] = norm(3 * HIDDEN)
    for i in range(num_layers):
        width = 2 * HIDDEN if i == 0 else HIDDEN
        layer = {
            "input_layernorm.weight": norm(HIDDEN),
            "post_attention_layernorm.weight": norm(HIDDEN),
            "self_attn.q_proj.weight": matrix(HEADS * DIM, width),
            "self_attn.k_proj.weight": matrix(KV * DIM, width),
            "self_attn.v_proj.weight": matrix(KV * DIM, width),
            "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
            "mlp.gate_proj.weight": matrix(INTER, HIDDEN),
            "mlp.up_proj.weight": matrix(INTER, HIDDEN),
            "mlp.down_proj.weight": matrix(HIDDEN, INTER),
        }
        if i == 0:
            layer["hidden_norm.weight"] = norm(HIDDEN)
        if bias:
            sizes = {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM, "o": HIDDEN}
            layer |= {f"self_attn.{p}_proj.bias": torch.randn(n, generator=g) * 0.3 for p, n in sizes.items()}
        if qk_norm:
            layer |= {"self_attn.q_norm.weight": norm(DIM), "self_attn.k_norm.weight": norm(DIM)}
        made |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    if parallel:
        made["mask_hidden"] = torch.randn(1, 1, 3 * HIDDEN, generator=g)
    if pruned:
        ids = torch.randperm(VOCAB, generator=g)[:PRUNED].sort().values
        made["d2t"] = ids - torch.arange(PRUNED)
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        made["t2d"][ids] = True
    return made


def flat_config(num_layers: int, *, pruned: bool, **extra: Any) -> dict[str, Any]:
    """A flat config as those projects write it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTER,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.46.2",
        "use_cache": True,
        "vocab_size": VOCAB,
        "draft_vocab_size": PRUNED if pruned else VOCAB,
        **extra,
    }


class Witness:
    """Greedy drafts from plain-named tensors, token by token over the whole prefix, no cache."""

    def __init__(self, tensors: dict[str, Tensor], *, norm_before_residual: bool = False, norm_output: bool = False,
                 theta: float = 5000.0, eps: float = 1e-5, mask_token: int | None = None) -> None:  # fmt: skip
        self.t, self.before, self.norm_output = tensors, norm_before_residual, norm_output
        self.theta, self.eps, self.mask_token = theta, eps, mask_token
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))

    def draft(self, pair_ids: list[int], aux: Tensor, depth: int) -> list[int]:
        """`depth` verifier ids after pairs (x_{i+1}, g_i), i = 0 .. n-1."""
        embeds, hidden = self.embed(pair_ids), self.fc(aux)
        if self.mask_token is not None:
            masks = depth - 1
            embeds = torch.cat([embeds, self.embed([self.mask_token] * masks)])
            hidden = torch.cat([hidden, self.fc(self.t["mask_hidden"].reshape(1, -1)).expand(masks, -1)])
            return [self.choice(state) for state in self.layers(embeds, hidden)[len(pair_ids) - 1 :]]
        drafted: list[int] = []
        for _ in range(depth):
            state = self.layers(embeds, hidden)[-1:]
            drafted.append(self.choice(state[0]))
            fed = self.rms(state, self.t["norm.weight"]) if self.norm_output else state
            embeds, hidden = torch.cat([embeds, self.embed(drafted[-1:])]), torch.cat([hidden, fed])
        return drafted

    def embed(self, ids: list[int]) -> Tensor:
        return self.t["embed_tokens.weight"][torch.tensor(ids, dtype=torch.int64)]

    def fc(self, aux: Tensor) -> Tensor:
        if "input_norm.weight" in self.t:
            aux = self.rms(aux, self.t["input_norm.weight"])
        return aux @ self.t["fc.weight"].T

    def choice(self, state: Tensor) -> int:
        best = int((self.t["lm_head.weight"] @ self.rms(state, self.t["norm.weight"])).argmax())
        return best + int(self.t["d2t"][best]) if "d2t" in self.t else best

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def layers(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        for i in range(self.num_layers):
            layer = {n.removeprefix(f"layers.{i}."): x for n, x in self.t.items() if n.startswith(f"layers.{i}.")}
            residual = hidden
            if i == 0:
                normed = self.rms(hidden, layer["hidden_norm.weight"])
                residual = normed if self.before else hidden
                read = torch.cat([self.rms(embeds, layer["input_layernorm.weight"]), normed], -1)
            else:
                read = self.rms(hidden, layer["input_layernorm.weight"])
            hidden = residual + self.attention(read, layer)
            inner = self.rms(hidden, layer["post_attention_layernorm.weight"])
            gate, up = inner @ layer["mlp.gate_proj.weight"].T, inner @ layer["mlp.up_proj.weight"].T
            hidden = hidden + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        return hidden

    def attention(self, read: Tensor, layer: dict[str, Tensor]) -> Tensor:
        def project(p: str) -> Tensor:
            x = read @ layer[f"self_attn.{p}_proj.weight"].T
            if f"self_attn.{p}_proj.bias" in layer:
                x = x + layer[f"self_attn.{p}_proj.bias"]
            return x.view(len(read), -1, DIM)

        q, k, v = project("q"), project("k"), project("v")
        if "self_attn.q_norm.weight" in layer:
            q, k = self.rms(q, layer["self_attn.q_norm.weight"]), self.rms(k, layer["self_attn.k_norm.weight"])
        q, k = self.rope(q), self.rope(k)
        k, v = k.repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        scores = scores.masked_fill(~torch.ones(len(read), len(read)).tril().bool(), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ layer["self_attn.o_proj.weight"].T
        return out + layer["self_attn.o_proj.bias"] if "self_attn.o_proj.bias" in layer else out

    def rope(self, x: Tensor) -> Tensor:
        half = DIM // 2
        angles = torch.arange(len(x))[:, None] * self.theta ** -(torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
