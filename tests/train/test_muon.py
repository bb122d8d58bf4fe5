"""Claims about Muon."""

from __future__ import annotations

import pytest
import torch

from peagle.train.optimizer import Muon, orthogonalize
from tests.train.problem import ALONE


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (16, 16)])
def test_the_update_is_that_of_torch_s_muon(shape):
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
    # Theirs iterates in bfloat16 everywhere; ours too where the CPU multiplies it, else in float32.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


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
