import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from peagle.engine.acceptance import probabilities


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
