"""One full optimizer step on one document of 131,072 tokens, and what it holds in memory.

    .venv/bin/python benchmarks/long_context.py [--tokens 131072] [--threads 2] [--checkpoint] [--json]

A drafter of 2 layers, hidden size 256, 2 heads of 64 (few, so that it ends in time) and vocabulary 32,000 at K 8 takes
one step of `peagle.train.fit` (sampling, both passes, clipping, AdamW) on random states of one document whose every
position but the first is supervised. Prints seconds and the peak of the resident memory: in all, and above what weights
and states took before the step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from train_step import rss_bytes

from peagle.data.records import TokenRow
from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import StoredRow
from peagle.train.config import FitConfig
from peagle.train.loop import fit
from peagle.train.parallel import World
from peagle.train.sources import MemoryRows
from peagle.verifier.weights import VerifierHead

HIDDEN, LAYERS, VOCAB = 256, 2, 32_000


def drafter(tokens: int, depths: int) -> Drafter:
    """Random weights."""
    return Drafter(
        DrafterConfig.build(
            {
                "speculators_model_type": "peagle",
                "layer_type": "llama",
                "hidden_size": HIDDEN,
                "intermediate_size": 4 * HIDDEN,
                "num_layers": LAYERS,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 64,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                "max_position_embeddings": tokens + depths,
                "attention_bias": False,
                "vocab_size": VOCAB,
                "draft_vocab_size": VOCAB,
                "norm_before_residual": False,
                "norm_before_fc": False,
                "aux_layer_ids": (2, 18, 33),
                "mask_token_id": 3,
                "num_speculative_tokens": depths,
                "verifier": "benchmark",
                "verifier_architectures": (),
            }
        )
    )


def document(tokens: int) -> StoredRow:
    """Random tokens and states; the assistant wrote all but the first token."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCAB, (tokens,), generator=generator)
    row = TokenRow(
        row_id="0",
        source="random",
        input_ids=ids.tolist(),
        loss_mask=[0] + [1] * (tokens - 1),
        next_is_supervised=False,
        tail_length=0,
    )
    labels = torch.tensor(row.label_positions())
    aux = torch.randn(tokens, 3 * HIDDEN, generator=generator)
    return StoredRow(row, aux, labels, torch.randn(labels.numel(), HIDDEN, generator=generator))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--depths", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint", action="store_true", help="--activation-checkpointing")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    network, row = drafter(options.tokens, options.depths), document(options.tokens)
    head = VerifierHead(
        norm_weight=torch.ones(HIDDEN),
        norm_eps=1e-6,
        weight=network.lm_head.weight.detach().clone(),
        logit_scale=1.0,
        logit_softcap=None,
    )
    network.lm_head.weight.requires_grad_(False)
    config = FitConfig.build(
        {
            "num_depths": options.depths,
            "total_seq_len": options.tokens,
            "epochs": 1,
            "activation_checkpointing": options.checkpoint,
            "scheduler_type": "none",
            "device": "cpu",
        }
    )
    before, began_s = rss_bytes("VmRSS"), time.perf_counter()
    world = World(0, 1, torch.device("cpu"))
    result = fit(network, head, MemoryRows([row]), MemoryRows([]), config, world, None, None, None)
    (step,) = result.steps
    report = {
        "tokens": options.tokens,
        "depths": options.depths,
        "seconds": round(time.perf_counter() - began_s, 1),
        "loss": step.loss,
        "peak_gb": round(rss_bytes("VmHWM") / 1e9, 3),
        "step_gb": round((rss_bytes("VmHWM") - before) / 1e9, 3),
        "threads": options.threads,
        "checkpoint": options.checkpoint,
    }
    if options.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:12} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
