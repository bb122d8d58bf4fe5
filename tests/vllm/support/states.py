"""Hidden states from vLLM against Transformers', in float32."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config, resolve_aux_layer_ids
from tests.vllm.support.engines import Engines

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text")
"""gemma3_text has no native support: it shows the detour through vLLM's Transformers backend."""
CHUNKED = ("--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--enable-prefix-caching")


def mixed_rows(count: int, vocab_size: int, longest: int, seed: int) -> list[list[int]]:
    """Random rows from one token to `longest`; every fourth repeats the start of an earlier one (prefix caching)."""
    rng = random.Random(seed)
    rows: list[list[int]] = []
    for i in range(count):
        length = rng.choice([1, 2, 15, 16, 17, 63, 64, 65, 100, 200, longest])
        row = [rng.randrange(3, vocab_size) for _ in range(length)]
        if i % 4 == 3:
            row = (rows[i - 2] + row)[:longest]
        rows.append(row)
    return rows


def worst_error(found: torch.Tensor, expected: torch.Tensor, hidden_size: int) -> float:
    """Worst relative L2 error of a token's state, layer by layer."""
    a, b = found.reshape(-1, hidden_size).double(), expected.reshape(-1, hidden_size).double()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-6)).max())


def states_error(engines: Engines, model: Path, rows: Sequence[list[int]], folder: Path) -> float:
    """Worst error of vLLM's states against Transformers', with chunked prefill and prefix caching.

    The whole list runs twice in one engine, so that the second half is served from the cache of the first.
    """
    verifier_config = load_verifier_config(str(model), False)
    aux = resolve_aux_layer_ids(verifier_config.num_layers, None)
    found = engines.states(model, [*rows, *rows], aux, folder, CHUNKED)["tensors"]
    worst = 0.0
    for i, (expected_aux, expected_last) in enumerate(
        TransformersVerifier(verifier_config, "float32", "cpu").states(rows, aux)
    ):
        for again in (i, i + len(rows)):
            worst = max(worst, worst_error(found[f"{again}.aux"], expected_aux, verifier_config.hidden_size))
            worst = max(worst, worst_error(found[f"{again}.last"], expected_last, verifier_config.hidden_size))
    return worst


def toy(family: str, folder: Path) -> Path:
    """A random verifier of a family, with heads of 32: vLLM's CPU kernels take no smaller ones.

    Its weights are tamer than those of `tests.fakes`: what is compared is two float32 implementations, and a network
    that multiplies rounding errors by ten at every layer measures itself.
    """
    from tests.fakes import byte_tokenizer, tiny_model

    model = tiny_model(family, 0, hidden_size=128, head_dim=32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name and "lm_head" not in name:
                parameter.div_(3.0)
    model.save_pretrained(folder / family)
    byte_tokenizer().save_pretrained(folder / family)
    return folder / family
