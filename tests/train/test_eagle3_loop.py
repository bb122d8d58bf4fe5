"""Claims about EAGLE-3 in the training loop: what its steps are divided by, and that it learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from peagle import layout
from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import pack
from peagle.train.batches import trim
from peagle.train.step import train_step
from tests.fakes import drafter_config
from tests.train.problem import config, row, rows, run, step_settings, verifier_head

STEPS = 3


def chain_drafter(seed: int = 0, norm_output: bool = False) -> Drafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Drafter(drafter_config(speculators_model_type="eagle3", norm_output=norm_output))
    with torch.no_grad():
        made.lm_head.weight.copy_(verifier_head().weight)
    return made


def settings(**values):
    plain = {"num_depths": STEPS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0, "train_embeddings": "none"}
    return config(**{**plain, **values})


@pytest.mark.parametrize("norm_output", [False, True])
def test_training_learns(norm_output):
    model, result = run(settings(epochs=6, batch_size=2), rows(30), rows(5, seed=1), chain_drafter(0, norm_output))
    assert result.steps[-1].loss < 0.4 * result.steps[0].loss
    assert result.validations[-1].acceptance_length > result.validations[0].acceptance_length > 1
    assert torch.equal(model.embed_tokens.weight, chain_drafter().embed_tokens.weight.double())


def test_each_step_is_divided_by_its_own_count_over_the_whole_optimizer_step():
    """Rows of other lengths have other counts at each step: in one pack or in four the result is the same."""
    made = [row(f"r{i}", n, 2, i) for i, n in enumerate((6, 9, 14, 31))]
    shapes = [{"total_seq_len": 80, "batch_size": 1}, {"total_seq_len": 32, "batch_size": 4}]
    shapes.append({"total_seq_len": 32, "batch_size": 2, "gradient_accumulation_steps": 2})
    ends = [run(settings(max_steps=2, depth_loss_decay=0.8, **one), made, model=chain_drafter())[0] for one in shapes]
    for other in ends[1:]:
        for (name, mine), theirs in zip(ends[0].state_dict().items(), other.state_dict().values()):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11, msg=name)


def test_the_gradient_norm_is_that_of_the_weighed_sum_of_the_steps_means():
    made = [row(f"r{i}", n, 2, i) for i, n in enumerate((6, 9, 14))]
    _, result = run(
        settings(max_steps=1, total_seq_len=48, depth_loss_decay=0.5, batch_size=1), made, model=chain_drafter()
    )
    model = chain_drafter().double()
    model.embed_tokens.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(False)
    batch = pack([trim(one) for one in made], None).to(torch.device("cpu"), torch.float64)
    chains = layout.full(batch.is_supervised, batch.document_ids, STEPS)
    counts = [int(batch.is_supervised.sum()), *(int((chains.depth == d).sum()) for d in range(1, STEPS))]
    weights = tuple(0.5**d / n for d, n in enumerate(counts))
    head = dataclasses.replace(verifier_head(torch.float64), norm_weight=torch.ones(16, dtype=torch.float64))
    train_step(model, head, batch, chains, 1.0, step_settings(depth_weights=weights, attention="reference"))
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    assert result.steps[0].grad_norm == pytest.approx(norm, rel=1e-9)
    assert result.steps[0].num_supervised == sum(counts)
