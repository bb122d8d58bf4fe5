"""The acceptance rule of speculative sampling, proved by enumeration in its test, and the distribution sampled from.

Why it is lossless. Let q be the distribution a drafted token was drawn from and p the verifier's at that place. Token x
leaves as itself with probability q(x) min(1, p(x) / q(x)) = min(p(x), q(x)), and otherwise a token is drawn from
max(p - q, 0), normalised; that adds exactly p(x) - min(p(x), q(x)). The sum is p(x), whatever q is. After K accepted
tokens the last one comes from p itself. Greedy decoding is the case of one-hot p and q.

Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def accept(draft_ids: Tensor, draft_probs: Tensor, verifier_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Decide how many drafted tokens stay, and which token follows them.

    Args:
        draft_ids: tokens drawn from `draft_probs`, int64, [batch_size, num_speculative_tokens].
        draft_probs: what they were drawn from, [batch_size, num_speculative_tokens, vocab_size].
        verifier_probs: the verifier's distributions at the same places and one past them,
            [batch_size, num_speculative_tokens + 1, vocab_size].
        uniforms: independent draws from [0, 1): one per drafted token, one for the token that follows,
            [batch_size, num_speculative_tokens + 1].

    Returns:
        (num_accepted, next_ids), int64, [batch_size] each: length of the accepted prefix, and the verifier's own token
        after it.
    """
    depth = draft_ids.shape[1]
    drawn = draft_ids[..., None]
    drafted = draft_probs.gather(2, drawn)[..., 0]
    verified = verifier_probs[:, :depth].gather(2, drawn)[..., 0]
    # u < p / q, without the division: a drafted token has q > 0, and where p = 0 nothing is accepted.
    stays = uniforms[:, :depth] * drafted < verified
    num_accepted = stays.long().cumprod(1).sum(1)
    rows = torch.arange(len(draft_ids), device=draft_ids.device)
    at = verifier_probs[rows, num_accepted]
    rejected_at = num_accepted.clamp(max=depth - 1)
    rest = (at - draft_probs[rows, rejected_at]).clamp(min=0)
    # All zero only by rounding, where p equals q: nothing could have been rejected but for the last bit.
    is_rest = (num_accepted < depth)[:, None] & (rest.sum(-1, keepdim=True) > 0)
    following = torch.where(is_rest, rest, at)
    return num_accepted, pick(following, uniforms[:, depth])


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Its length: in greedy decoding, of a draft and the verifier's own tokens, the number of accepted ones."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from unnormalised distributions by inverting their cumulative sums.

    Args:
        weights: not negative, not all zero in a row, [..., vocab_size].
        uniforms: draws from [0, 1), [...].

    Returns:
        Ids of positive weight, int64, [...].
    """
    cumulative = weights.double().cumsum(-1)
    threshold = uniforms.double()[..., None] * cumulative[..., -1:]
    ids = torch.searchsorted(cumulative, threshold, right=True)[..., 0]
    # Rounding can lift the threshold to the whole sum; the most likely id is then as good as the last one.
    return torch.where(ids < weights.shape[-1], ids, weights.argmax(-1))


def probabilities(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """The distribution that is sampled from: temperature, then top-p, as Transformers and vLLM define them.

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
