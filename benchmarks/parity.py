"""Our step against recorded steps of Speculators 0.9.0: the same loss, and the same gradient for every tensor.

    python benchmarks/parity.py FILE... [--attention sdpa] [--block 7] [--checkpoint] [--json]

A file holds the peer's weights, one batch, its layout, the loss and every gradient (design note: docs/design/step.md).
Exit status 1 when a loss differs by more than 1e-5 (relative) or a gradient by more than 1e-4 (relative 2-norm).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import Batch
from peagle.layout.cod import CodLayout
from peagle.train.blocks import StepSettings
from peagle.train.step import train_step
from peagle.verifier.weights import VerifierHead

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
WHOLE = 1 << 30


def read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """A fixture's sizes and tensors."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["config"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def drafter_of(config: dict, tensors: dict[str, torch.Tensor], num_pairs: int) -> Drafter:
    """Our network with the fixture's weights; the head is frozen."""
    num_aux = tensors["weight.fc.weight"].shape[1] // config["hidden_size"]
    shape = DrafterConfig.build(
        {
            "speculators_model_type": "peagle",
            "layer_type": config["arch"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "num_layers": config["num_layers"],
            "num_attention_heads": config["num_attention_heads"],
            "num_key_value_heads": config["num_key_value_heads"],
            "head_dim": config["head_dim"],
            "rms_norm_eps": config["rms_norm_eps"],
            "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
            "max_position_embeddings": num_pairs + config["num_depths"],
            "attention_bias": "weight.layers.0.self_attn.q_proj.bias" in tensors,
            "vocab_size": config["vocab_size"],
            "draft_vocab_size": config["draft_vocab_size"],
            "norm_before_residual": config["norm_before_residual"],
            "norm_before_fc": config["norm_before_fc"],
            "aux_layer_ids": tuple(range(1, num_aux + 1)),
            "mask_token_id": config["mask_token_id"],
            "num_speculative_tokens": config["num_depths"],
            "verifier": "fixture",
            "verifier_architectures": (),
        }
    )
    drafter = Drafter(shape)
    own = {key.removeprefix("weight."): value for key, value in tensors.items() if key.startswith("weight.")}
    drafter.load_state_dict({key: value for key, value in own.items() if not key.startswith("verifier_")})
    drafter.lm_head.weight.requires_grad_(False)
    return drafter


def batch_of(tensors: dict[str, torch.Tensor], num_depths: int) -> tuple[Batch, CodLayout]:
    """The fixture's batch and layout as ours. The file's pairs are shifted already; padding stays out of both."""
    documents = tensors["in.document_ids"]
    num_pairs = documents.numel()
    index = torch.arange(num_pairs)
    starts = torch.zeros_like(index)
    changes = torch.ones(num_pairs, dtype=torch.bool)
    changes[1:] = documents[1:] != documents[:-1]
    starts = torch.where(changes, index, 0).cummax(0).values
    anchor, depth, mask = tensors["in.anchor"], tensors["in.depth"], tensors["in.loss_mask"] > 0
    order = torch.argsort(anchor * (num_depths + 1) + depth)
    anchor, depth = anchor[order], depth[order]
    # Depth 0 is sampled by the peer too (all of it); a pair slot that it left out must not count.
    at_zero = torch.zeros(num_pairs, dtype=torch.bool)
    at_zero[anchor[depth == 0]] = True
    deep = depth > 0
    anchor, depth = anchor[deep], depth[deep]
    batch = Batch(
        pair_ids=tensors["in.input_ids"],
        aux_states=tensors["in.aux_hidden_states"],
        rope_pos=index - starts,
        document_ids=documents,
        label_of_pair=torch.where(mask & at_zero, index, -1),
        last_states=tensors["in.verifier_last_hidden_states"],
        row_ids=tuple(str(i) for i in documents.unique().tolist()),
    )
    return batch, CodLayout(anchor, depth, mask[anchor + depth], num_depths)


def compare(path: Path, attention: str, block: int, chunk: int, checkpoint: bool) -> dict:
    """Run one fixture: the worst relative error of loss and gradients, and which tensor it was."""
    config, tensors = read(path)
    drafter = drafter_of(config, tensors, tensors["in.input_ids"].numel())
    batch, layout = batch_of(tensors, config["num_depths"])
    head = VerifierHead(
        norm_weight=tensors["weight.verifier_norm.weight"],
        norm_eps=config["rms_norm_eps"],
        weight=tensors["weight.verifier_lm_head.weight"],
        logit_scale=1.0,
        logit_softcap=None,
    )
    counted = int((batch.label_of_pair >= 0).sum()) + int(layout.is_supervised.sum())
    settings = StepSettings(
        loss=config["loss"],
        depth_weights=(1.0,) * config["num_depths"],
        attention=attention,
        block_slots=block,
        chunk_rows=chunk,
        checkpoint_base=checkpoint,
    )
    result = train_step(drafter, head, batch, layout, counted, settings)
    loss = result.loss_sum.sum().item() / counted
    expected = tensors["out.loss"].item()
    errors = {}
    for name, parameter in drafter.named_parameters():
        if f"grad.{name}" in tensors:
            assert parameter.grad is not None, f"{name} got no gradient"
            wanted = tensors[f"grad.{name}"]
            errors[name] = ((parameter.grad - wanted).norm() / wanted.norm()).item()
    worst = max(errors, key=errors.__getitem__)
    depths = range(config["num_depths"])
    return {
        "file": path.name,
        "loss_error": abs(loss - expected) / abs(expected),
        "gradient_error": errors[worst],
        "worst_tensor": worst,
        "tensors": len(errors),
        "counts_equal": all(
            result.correct[d].item() == tensors[f"out.correct_{d}"].item()
            and abs(result.total[d].item() - tensors[f"out.total_{d}"].item()) < 0.5
            for d in depths
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="fixtures; none: those in tests/fixtures")
    parser.add_argument("--attention", default="sdpa", choices=("reference", "sdpa", "native", "flex"))
    parser.add_argument("--block", default="whole", help="slots of a block: a number, or `whole`")
    parser.add_argument("--chunk", type=int, default=64, help="rows of the head at a time")
    parser.add_argument("--checkpoint", action="store_true", help="recompute the base pass")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    files = args.files or sorted((Path(__file__).parents[1] / "tests" / "fixtures").glob("peagle_*.safetensors"))
    block = WHOLE if args.block == "whole" else int(args.block)
    found = [compare(path, args.attention, block, args.chunk, args.checkpoint) for path in files]
    worst_loss = max(row["loss_error"] for row in found)
    worst_gradient = max(row["gradient_error"] for row in found)
    if args.json:
        print(json.dumps({"loss_error": worst_loss, "gradient_error": worst_gradient, "files": found}))
    else:
        for row in found:
            print(
                f"{row['file']:45} loss {row['loss_error']:.1e}  gradient {row['gradient_error']:.1e} "
                f"({row['worst_tensor']}, {row['tensors']} tensors)  counts equal {row['counts_equal']}"
            )
    return int(worst_loss > LOSS_TOLERANCE or worst_gradient > GRADIENT_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
