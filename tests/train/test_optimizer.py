"""Claims about groups, masters and clipping, Muon, and the schedule."""

from __future__ import annotations

import math

import pytest
import torch

from peagle.errors import CheckpointError
from peagle.train.masters import EMBEDDING, HEAD, Masters, choose_trained
from peagle.train.optimizer import Muon, Optimizer, Schedule, groups, orthogonalize, schedule
from tests.fakes import drafter_config
from tests.train.problem import ALONE, drafter, plan


def masters(train_embeddings: str = "all", dtype: torch.dtype = torch.float32, head: bool = False) -> Masters:
    model = drafter()
    choose_trained(model, train_embeddings, head)
    row = drafter_config().mask_token_id if train_embeddings == "mask-token" else None
    return Masters(model, dtype, row, ALONE, False)


def give_gradients(made: Masters, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for tensor in made.tensors.values():
        tensor.grad = torch.randn(tensor.shape, generator=source).to(tensor.dtype)


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest():
    made = masters(head=True)
    found = {g.name: g for g in groups(plan(optimizer="muon", lr=1e-3), {n: t.shape for n, t in made.tensors.items()})}
    assert found["matrices"].is_muon
    assert "fc.weight" in found["matrices"].tensors
    assert "layers.1.mlp.up_proj.weight" in found["matrices"].tensors
    assert set(found["embeddings"].tensors) == {EMBEDDING, HEAD}
    assert {"norm.weight", "mask_hidden", "layers.0.hidden_norm.weight"} <= set(found["vectors"].tensors)
    assert found["matrices"].lr == pytest.approx(1e-2)
    assert found["vectors"].lr == found["embeddings"].lr == 1e-3
    assert found["vectors"].weight_decay == found["embeddings"].weight_decay == 0


def test_rates_of_groups_are_their_own():
    made = masters()
    found = {
        g.name: g.lr
        for g in groups(
            plan(optimizer="muon", lr=1e-3, muon_lr=5e-3, embedding_lr=2e-4),
            {n: t.shape for n, t in made.tensors.items()},
        )
    }
    assert found == {"matrices": 5e-3, "embeddings": 2e-4, "vectors": 1e-3}
    alone = groups(plan(optimizer="adamw", lr=1e-3), {n: t.shape for n, t in made.tensors.items()})
    assert {g.lr for g in alone} == {1e-3}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_only_the_mask_token_s_row_moves_when_only_it_is_trained(kind):
    made = masters("mask-token")
    before = made.drafter.embed_tokens.weight.detach().clone()
    optimizer = Optimizer(plan(optimizer=kind), made)
    for seed in range(3):
        give_gradients(made, seed)
        optimizer.step(1.0)
        made.publish()
    moved = (made.drafter.embed_tokens.weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == [drafter_config().mask_token_id]
    assert made.tensors[EMBEDDING].shape[0] == 1


def test_a_frozen_embedding_and_a_frozen_head_have_no_master():
    assert EMBEDDING not in masters("none").tensors
    assert HEAD not in masters("all").tensors
    assert HEAD in masters("all", head=True).tensors


def test_bfloat16_computes_on_copies_of_float32_masters():
    made = masters("all", torch.bfloat16)
    weight = made.drafter.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16
    assert made.drafter.lm_head.weight.dtype == torch.bfloat16
    assert made.tensors["layers.0.mlp.up_proj.weight"].dtype == torch.float32
    optimizer = Optimizer(plan(optimizer="adamw", lr=1e-5), made)
    start = made.tensors["layers.0.mlp.up_proj.weight"].clone()
    for seed in range(20):  # each step is far below bfloat16's resolution
        give_gradients(made, seed)
        optimizer.step(1.0)
        made.publish()
    master = made.tensors["layers.0.mlp.up_proj.weight"]
    assert not torch.equal(master, start)
    torch.testing.assert_close(weight.float(), master, rtol=1e-2, atol=1e-6)


def test_bfloat16_gradients_are_added_up_in_float32():
    made = masters("all", torch.bfloat16)
    weight = made.drafter.get_parameter("norm.weight")
    with made.step():
        for _ in range(1000):
            (weight * 0.001).sum().backward()
    # 1,000 times 0.001 in bfloat16 alone stalls far below 1.
    torch.testing.assert_close(made.tensors["norm.weight"].grad, torch.full((16,), 1.0), rtol=5e-3, atol=0)
    assert made.tensors["fc.weight"].grad.abs().sum() == 0


def test_the_norm_is_that_of_all_gradients_together():
    made = masters()
    give_gradients(made, 3)
    whole = torch.cat([tensor.grad.flatten() for tensor in made.tensors.values()])
    assert made.norm().item() == pytest.approx(whole.norm().item(), rel=1e-6)
    made.scale(0.5)
    assert made.norm().item() == pytest.approx(whole.norm().item() / 2, rel=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_that_was_saved_and_loaded_gives_the_same_next_step(kind):
    first, second = masters(), masters()
    optimizer = Optimizer(plan(optimizer=kind), first)
    for seed in range(2):
        give_gradients(first, seed)
        optimizer.step(0.7)
    other = Optimizer(plan(optimizer=kind), second)
    for name, tensor in first.tensors.items():
        second.load(name, second.tensors[name], tensor.detach().clone())
    tensors, steps = optimizer.state()
    other.load({name: tensor.clone() for name, tensor in tensors.items()}, steps, "here")
    for made, stepper in ((first, optimizer), (second, other)):
        give_gradients(made, 7)
        stepper.step(0.3)
    for name in first.tensors:
        assert torch.equal(first.tensors[name], second.tensors[name]), name


def test_state_of_another_optimizer_is_refused():
    made = masters()
    optimizer = Optimizer(plan(optimizer="adamw"), made)
    give_gradients(made, 0)
    optimizer.step(1.0)
    tensors, steps = optimizer.state()
    with pytest.raises(CheckpointError, match="another --optimizer"):
        Optimizer(plan(optimizer="muon"), masters()).load(tensors, steps, "here")


def by_both_muons(shape):
    """A matrix after four steps of our Muon and of PyTorch's, and what the steps changed beside the decay."""
    made = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=made)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    our_optimizer = Muon([ours], 0.02, 0.95, 0.1, ALONE)
    their_optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        grad = torch.randn(shape, generator=made)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        our_optimizer.step()
        their_optimizer.step()
    return ours.detach(), theirs.detach(), (theirs - start * (1 - 0.02 * 0.1) ** 4).detach()


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (16, 16)])
def test_the_update_is_that_of_torch_s_muon(shape, monkeypatch):
    # As it is, PyTorch iterates in bfloat16; we do where the hardware multiplies it, else in float32. Each of the five
    # iterations rounds three products to 8 bits, a relative 2^-9 each, and past the first ones does not enlarge errors.
    ours, theirs, moved = by_both_muons(shape)
    assert (ours - theirs).norm() <= 15 * 2**-9 * moved.norm()
    # Both in float32: the same operations, up to the order of sums.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    monkeypatch.setattr("peagle.train.optimizer._iteration_dtype", lambda matrix: torch.float32)
    ours, theirs, _ = by_both_muons(shape)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_singular_values_come_close_to_one():
    found = torch.linalg.svdvals(
        orthogonalize(torch.randn(12, 30, generator=torch.Generator().manual_seed(1)).double())
    )
    assert found.min() > 0.5
    assert found.max() < 1.3


def test_a_step_has_the_size_of_an_adamw_step():
    weight = torch.nn.Parameter(torch.zeros(64, 48))
    weight.grad = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    Muon([weight], 0.01, 0.95, 0.0, ALONE).step()
    assert weight.square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.2)


def test_only_matrices_are_taken():
    with pytest.raises(AssertionError):
        Muon([torch.nn.Parameter(torch.zeros(3))], 0.1, 0.9, 0.0, ALONE)


def test_the_worked_example_of_the_linear_schedule():
    made = Schedule("linear", 2, 6)
    assert [made.factor(step) for step in range(7)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]


def test_cosine_is_at_half_in_the_middle_and_at_zero_at_the_end():
    made = Schedule("cosine", 0, 100)
    assert made.factor(0) == 1
    assert made.factor(50) == pytest.approx(0.5)
    assert made.factor(100) == pytest.approx(0)
    assert made.factor(25) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_none_stays_at_its_peak_after_warm_up():
    made = schedule(plan(scheduler_type="none", scheduler_warmup_ratio=0.1), 40)
    assert [made.factor(step) for step in (0, 3, 4, 39)] == [0.25, 1, 1, 1]


@pytest.mark.parametrize(
    ("ratio", "steps", "expected"), [(0.01, None, 10), (0.01, 7, 7), (0.0, None, 0), (1.0, None, 1000)]
)
def test_R16_warm_up_is_a_share_of_the_steps_or_a_number_of_them(ratio, steps, expected):
    assert schedule(plan(scheduler_warmup_ratio=ratio, scheduler_warmup_steps=steps), 1000).warmup_steps == expected


def test_warm_up_never_exceeds_the_run():
    assert schedule(plan(scheduler_warmup_steps=50), 10).warmup_steps == 10


def test_past_its_end_the_schedule_stays_at_the_floor():
    assert Schedule("linear", 0, 10).factor(25) == 0
