"""From logits to the distribution that is sampled: temperature, then top-p, as Transformers and vLLM define them."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from peagle.config import StageConfig


class Sampling(StageConfig):
    """How tokens are chosen."""

    temperature: float = Field(default=0.0, ge=0)
    """0 decodes greedily."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the most likely tokens that together reach this probability."""
    seed: int = 0
    """Seed of the random draws; each prompt has its own stream, so that batching does not change an answer."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, always."""
        return self.temperature == 0


def probabilities(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """The distribution that is sampled from.

    Args:
        logits: [..., vocab_size].
        temperature: above 0.
        top_p: in (0, 1]; the smallest set of most likely tokens whose probabilities reach it is kept (at least one).

    Returns:
        float32, summing to 1, [..., vocab_size].
    """
    probs = (logits.float() / temperature).softmax(-1)
    if top_p >= 1:
        return probs
    ascending, order = probs.sort(-1)
    # As Transformers' TopPLogitsWarper: drop the tail whose cumulative probability stays within 1 - top_p.
    dropped = ascending.cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    kept = probs.masked_fill(dropped.scatter(-1, order, dropped), 0.0)
    return kept / kept.sum(-1, keepdim=True)
