"""Record training steps of Speculators 0.9.0's Eagle3DraftModel as fixtures for `tests/train/test_eagle3_parity.py`.

    PEER/bin/python benchmarks/make_fixtures.py [--output tests/fixtures]

PEER is an environment with `speculators==0.9.0` (needed only here: the fixtures are data). Each file holds the peer's
weights (`weight.*`), one batch (`in.*`: pairs already shifted), the loss and the counts of each step (`out.*`) and
every gradient (`grad.*`), in float32 on the CPU; the metadata key `config` has the sizes. In a file, slot (a, d) is
supervised iff `in.loss_mask[a + d]`, and chains run on past their document: our own layouts are stricter.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its forward is compiled only on GPUs

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

BASE = {
    "hidden_size": 32,
    "vocab_size": 96,
    "draft_vocab_size": 96,
    "num_layers": 1,
    "ttt_steps": 3,
    "ttt_step_loss_decay": 1.0,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "norm_output": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "loss": "kl_div",
}
# file -> (changes, lengths of the documents, padding)
FILES = {
    "eagle3_llama": ({"arch": "llama", "norm_before_residual": True}, [64], 0),
    "eagle3_qwen3_packed_4_steps": (
        {"arch": "qwen3", "num_layers": 2, "ttt_steps": 4, "ttt_step_loss_decay": 0.8},
        [30, 17, 12],
        5,
    ),
    "eagle3_llama_draftvocab_bias": (
        {"arch": "llama", "draft_vocab_size": 40, "norm_before_fc": True, "attention_bias": True, "loss": "ce"},
        [40, 16],
        0,
    ),
    "eagle3_qwen3_norm_output": ({"arch": "qwen3", "norm_output": True, "norm_before_fc": True}, [48], 0),
}


def build(config: dict) -> Eagle3DraftModel:
    """The peer's model with random weights, norms away from one."""
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[config["arch"]]
    layers = kind(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        attention_bias=config["attention_bias"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    layers._attn_implementation = "eager"
    method = GreedyTokenProposalConfig(speculative_tokens=config["ttt_steps"])
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=config["draft_vocab_size"],
            norm_before_residual=config["norm_before_residual"],
            norm_before_fc=config["norm_before_fc"],
            norm_output=config["norm_output"],
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[method],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
    )
    generator = torch.Generator().manual_seed(config["seed"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else noise * parameter.shape[-1] ** -0.5)
        if config["draft_vocab_size"] != config["vocab_size"]:
            kept = torch.randperm(config["vocab_size"], generator=generator)[: config["draft_vocab_size"]].sort().values
            t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
            t2d[kept] = True
            model.load_vocab_mappings(t2d, kept - torch.arange(kept.numel()))
        model.lm_head.weight.copy_(2 * model.lm_head.weight)
        model.verifier_lm_head.weight.copy_(2 * model.lm_head.weight)
    model.lm_head.weight.requires_grad_(False)
    model.verifier_lm_head.weight.requires_grad_(False)
    return model.float()


def record(name: str, changes: dict, lengths: list[int], padding: int, folder: Path) -> None:
    """Run one step and write its file."""
    config = {**BASE, **changes, "seed": sum(name.encode())}
    model = build(config)
    generator = torch.Generator().manual_seed(config["seed"] + 1)
    total, hidden = sum(lengths) + padding, config["hidden_size"]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    positions = torch.cat([1 + torch.arange(n) for n in [*lengths, padding]])
    mask = torch.ones(total)
    begin = 0
    for index, length in enumerate(lengths):
        mask[begin : begin + 3 + 2 * index] = 0
        mask[begin + length - 6 : begin + length - 5] = 0  # a gap that chains cross
        begin += length
    mask[documents < 0] = 0
    batch = {
        "input_ids": torch.randint(0, config["vocab_size"], (total,), generator=generator),
        "aux_hidden_states": torch.randn(total, 3 * hidden, generator=generator),
        "verifier_last_hidden_states": torch.randn(total, hidden, generator=generator),
        "document_ids": documents,
        "loss_mask": mask,
    }
    _, loss, metrics = model(
        hidden_states=batch["aux_hidden_states"][None],
        input_ids=batch["input_ids"][None],
        document_ids=documents[None],
        loss_mask=mask[None].bool(),
        position_ids=positions[None],
        verifier_last_hidden_states=batch["verifier_last_hidden_states"][None],
        ttt_steps=config["ttt_steps"],
        ttt_step_loss_decay=config["ttt_step_loss_decay"],
        loss_config=resolve_loss_config(config["loss"], "eager"),
    )
    loss.backward()
    tensors = {f"weight.{key}": value for key, value in model.state_dict().items()}
    tensors |= {f"in.{key}": value for key, value in batch.items()}
    tensors["out.loss"] = loss.detach().reshape(1)
    for step in range(config["ttt_steps"]):
        tensors[f"out.loss_{step}"] = metrics[f"loss_{step}_sum"].reshape(1)
        tensors[f"out.total_{step}"] = metrics[f"full_acc_{step}_total"].reshape(1)
    tensors |= {f"grad.{key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    config["producer"] = "speculators 0.9.0 Eagle3DraftModel, eager attention and loss, float32, CPU"
    path = folder / f"{name}.safetensors"
    tensors = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    save_file(tensors, path, metadata={"config": json.dumps(config)})
    print(f"{path}: loss {loss.item():.6f}, {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1] / "tests" / "fixtures")
    for name, (changes, lengths, padding) in FILES.items():
        record(name, changes, lengths, padding, parser.parse_args().output)


if __name__ == "__main__":
    main()
