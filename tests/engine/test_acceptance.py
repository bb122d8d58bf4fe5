"""The proof by enumeration: every draft, every uniform, five tokens; what leaves is distributed as the verifier."""

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from peagle.engine.acceptance import accept, pick, probabilities

VOCAB = 5


def table(rng: random.Random, denominator: int) -> list[int]:
    """Five weights that sum to `denominator`, zeros included."""
    cuts = sorted(rng.randint(0, denominator) for _ in range(VOCAB - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, denominator])]


def leaving(depth: int, denominator: int, rng: random.Random) -> tuple[dict, dict]:
    """Masses of all (prefix) tuples that leave one call, and the verifier's tables by prefix.

    All thresholds are multiples of 1 / lcm(1 .. denominator): a uniform draw is one of that many equal cells, and the
    middle of each cell stands for it. Summing over the middles is therefore exact, not an approximation.
    """
    verifier = {
        prefix: table(rng, denominator)
        for length in range(depth + 1)
        for prefix in itertools.product(range(VOCAB), repeat=length)
    }
    drafter = [table(rng, denominator) for _ in range(depth)]  # as P-EAGLE drafts: no depth sees the other's token
    cells = math.lcm(*range(1, denominator + 1))
    middles = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    uniforms = torch.cartesian_prod(*[middles] * (depth + 1)).reshape(-1, depth + 1)
    masses: dict[tuple[int, ...], Fraction] = {}
    for draft in itertools.product(range(VOCAB), repeat=depth):
        weight = Fraction(1)
        for k, token in enumerate(draft):
            weight *= Fraction(drafter[k][token], denominator)
        if not weight:
            continue
        count = len(uniforms)
        num_accepted, following = accept(
            torch.tensor(draft).expand(count, depth),
            (torch.tensor(drafter, dtype=torch.float64) / denominator).expand(count, depth, VOCAB),
            torch.tensor([verifier[draft[:k]] for k in range(depth + 1)], dtype=torch.float64)
            .div(denominator)
            .expand(count, depth + 1, VOCAB),
            uniforms,
        )
        outcomes = torch.stack([num_accepted, following], 1)
        for (accepted, token), times in zip(*[part.tolist() for part in outcomes.unique(dim=0, return_counts=True)]):
            left = (*draft[:accepted], token)
            masses[left] = masses.get(left, Fraction(0)) + weight * Fraction(times, count)
    return masses, verifier


@pytest.mark.parametrize(
    ("depth", "denominator", "seed"), [*((1, 6, s) for s in range(6)), *((2, 4, s) for s in range(4)), (3, 3, 0)]
)
def test_what_leaves_is_exactly_distributed_as_the_verifier(depth: int, denominator: int, seed: int):
    masses, verifier = leaving(depth, denominator, random.Random(seed))
    assert sum(masses.values()) == 1
    for sequence in itertools.product(range(VOCAB), repeat=depth + 1):
        # a shorter prefix is carried on by the verifier itself
        total = Fraction(0)
        for length in range(1, depth + 2):
            mass = masses.get(sequence[:length], Fraction(0))
            for k in range(length, depth + 1):
                mass *= Fraction(verifier[sequence[:k]][sequence[k]], denominator)
            total += mass
        own = Fraction(1)
        for k in range(depth + 1):
            own *= Fraction(verifier[sequence[:k]][sequence[k]], denominator)
        assert total == own


def test_one_hot_distributions_accept_the_common_prefix_and_go_on_with_the_verifiers_token():
    one_hot = torch.eye(VOCAB)
    draft = torch.tensor([[1, 2, 3], [1, 2, 3], [4, 2, 3]])
    choice = torch.tensor([[1, 2, 0, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    uniforms = torch.tensor([[0.0, 0.5, 0.999999, 0.999999]]).expand(3, 4)
    num_accepted, following = accept(draft, one_hot[draft], one_hot[choice], uniforms)
    assert num_accepted.tolist() == [2, 3, 0]
    assert following.tolist() == [0, 4, 1]


def test_a_token_the_verifier_rules_out_is_never_accepted_nor_drawn():
    draft_probs = torch.tensor([[[0.5, 0.5, 0.0, 0.0, 0.0]]])
    verifier_probs = torch.tensor([[0.0, 0.2, 0.8, 0.0, 0.0]]).expand(1, 2, 5)
    for u in (0.0, 0.3, 1 - 2**-24):
        num_accepted, following = accept(torch.tensor([[0]]), draft_probs, verifier_probs, torch.full((1, 2), u))
        assert num_accepted.item() == 0
        assert following.item() == 2


def test_equal_distributions_accept_everything():
    probs = torch.tensor([[[0.1, 0.2, 0.3, 0.15, 0.25]]])
    num_accepted, _ = accept(torch.tensor([[1]]), probs, probs.expand(1, 2, 5), torch.full((1, 2), 1 - 2**-24))
    assert num_accepted.item() == 1


@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 1 - 2**-24])
def test_pick_returns_only_ids_of_positive_weight(u: float):
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1e-30]])
    ids = pick(weights, torch.full((2,), u))
    assert ids.tolist() == [1 if u < 0.25 else 3, 4]


def test_the_distribution_equals_transformers_own():
    generator = torch.Generator().manual_seed(0)
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (0.3, 0.01)):
        logits = 3 * torch.randn(20, 50, generator=generator)
        scores = TemperatureLogitsWarper(temperature)(None, logits.clone()) if temperature != 1 else logits.clone()
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)
        assert torch.allclose(probabilities(logits, temperature, top_p), scores.softmax(-1), atol=1e-6)


def test_top_p_keeps_at_least_one_token_of_a_flat_distribution():
    probs = probabilities(torch.zeros(3, 10), 1.0, 1e-6)
    assert (probs > 0).sum(-1).tolist() == [1, 1, 1]
    assert torch.allclose(probs.sum(-1), torch.ones(3))
