"""The counts that decoding would give, from recorded answers and their states: one drafter pass, then pass by pass.

No engine, no cache: the drafter drafts at every position of the known text at once. Greedy answers decide everything:
from a pass that knows x_0 .. x_{a+1}, decoding accepts as many drafted tokens as agree with what the answer says next,
adds one token of the verifier's, and the next pass begins there.

At temperature > 0 all is chance. Given the answer's tokens, the drafted token of depth d was accepted
with chance w_d = min(1, q(x) / p(x)) at the answer's own token x (q the drafter's distribution, p the verifier's: of
the token's mass p, min(p, q) came by acceptance). So passes begin at each place with a chance, followed from left to
right, and position k is accepted, whatever its token, with w_0 .. w_{k-1} times the sum of min(p, q) at depth k.
These sums are the expected counts of sampled decoding, without its noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafter.network import Drafter
from peagle.engine import Sampling, common_prefix, probabilities
from peagle.evaluate.counts import PassCounts, context_bucket, count_by_context
from peagle.verifier.weights import VerifierHead

Blocks = Iterator[tuple[Tensor, Tensor]]
_MOST_SCORES = 1 << 24
"""Attention scores, or logits, held at once: bounds memory whatever the row's length."""
_NUM_BEST = 5
"""Choices kept at each depth. In float32 the second explains a tie; in half precision several are level."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One answer with its states."""

    row_id: str
    source: str
    ids: list[int]
    """Prompt, answer, tail: x_0 .. x_{T-1}."""
    start: int
    """Position of the answer's first token, at least 1."""
    end: int
    """One past the answer's last token; what follows is tail."""
    aux_states: Tensor
    """g_i, [at least end - 1, aux_size]"""
    choice_ids: Tensor | None
    """The verifier's choice of x_{p+1} at each position p, -1 where not known, int64, [num_tokens]; None: the answer is
    known to be its own, so the tokens themselves are the choices."""
    last_states: Tensor | None
    """y_p before the final norm, [num_tokens, hidden_size]; needed at temperature > 0 only, for p from `start` on."""


@dataclass(frozen=True)
class ReplayedPass:
    """One verifier pass that decoding would have run."""

    num_known: int
    num_accepted: int
    best_ids: Sequence[Sequence[int]]
    """The drafter's choices at each depth, best first, and their logits."""
    best_logits: Sequence[Sequence[float]]

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """The drafted tokens."""
        return tuple(ids[0] for ids in self.best_ids)


@dataclass(frozen=True)
class Replayed:
    """What came of one answer."""

    passes: list[ReplayedPass]
    """Empty at temperature > 0."""
    num_unjudged: int
    """Passes left out because their draft runs past what is known: the answer has no tail."""
    by_context: dict[str, PassCounts]
    """Counts of the judged passes, by context bucket."""


def replay(drafter: Drafter, head: VerifierHead | None, recorded: Recorded, depth: int, sampling: Sampling) -> Replayed:
    """Replay one answer.

    Args:
        drafter, depth: the drafter, and how many tokens it drafts per pass.
        head: the verifier's, on the drafter's device; needed at temperature > 0 only.
        recorded: the answer.
        sampling: greedy, or the temperature and top-p under which the answer was sampled.
    """
    if recorded.end - recorded.start < 2:  # the prefill gave the whole answer
        return Replayed([], 0, {})
    device = drafter.fc.weight.device
    ids = torch.tensor(recorded.ids, device=device)
    anchors = torch.arange(recorded.start - 1, recorded.end - 2, device=device)
    # the last anchor is end - 3: its pair's token x_{end-2} is the last but one of the answer
    num_pairs = recorded.end - 2
    with torch.inference_mode():
        aux = recorded.aux_states[:num_pairs].to(device, drafter.fc.weight.dtype)
        blocks = chain_logits(
            drafter=drafter,
            pair_ids=ids[1 : num_pairs + 1],
            aux_states=aux,
            anchors=anchors,
            depth=depth,
            own_ids=None if sampling.is_greedy else ids[2:],
        )
        if sampling.is_greedy:
            return _greedy(drafter, recorded, blocks, depth)
        assert head is not None
        return _expect(drafter=drafter, head=head, recorded=recorded, blocks=blocks, depth=depth, sampling=sampling)


def _greedy(drafter: Drafter, recorded: Recorded, blocks: Blocks, depth: int) -> Replayed:
    """Go from pass to pass, as decoding would."""
    # per anchor: the best verifier ids and logits at each depth, lists of [depth][_NUM_BEST]
    best: list[tuple[list[list[int]], list[list[float]]]] = []
    for _, logits in blocks:
        top = logits.float().topk(min(_NUM_BEST, logits.shape[-1]), -1)
        best += zip(drafter.to_verifier_ids(top.indices).tolist(), top.values.tolist())
    # the verifier's choice of x_{p+1}, for each p
    choices = recorded.ids[1:] if recorded.choice_ids is None else recorded.choice_ids.tolist()
    passes, unjudged = [], 0
    known = recorded.start + 1  # the prompt, and the token that its prefill gave
    while known < recorded.end:
        top_ids, top_logits = best[known - 1 - recorded.start]
        wanted = choices[known - 1 : known - 1 + depth]
        accepted = common_prefix([ids[0] for ids in top_ids], wanted)
        if len(wanted) < depth or -1 in wanted:
            unjudged += 1
        else:
            passes.append(ReplayedPass(known, accepted, top_ids, top_logits))
        known += accepted + 1
    return Replayed(passes, unjudged, count_by_context([(one.num_known, one.num_accepted) for one in passes], depth))


def _expect(
    drafter: Drafter, head: VerifierHead, recorded: Recorded, blocks: Blocks, depth: int, sampling: Sampling
) -> Replayed:
    assert recorded.last_states is not None
    # 1. at each anchor and depth: the chance of the answer's own token, and of any token, to be accepted
    device = drafter.fc.weight.device
    ids = torch.tensor(recorded.ids, device=device)
    draft_ids = drafter.draft_ids
    place_of = torch.full((drafter.config.vocab_size,), -1, device=device)
    place_of[draft_ids] = torch.arange(len(draft_ids), device=device)
    own_chances, any_chances = [], []
    for anchors, logits in blocks:
        q = probabilities(logits, sampling.temperature, sampling.top_p)
        at = anchors[:, None] + 1 + torch.arange(depth, device=device)
        is_known = at + 1 < len(ids)
        at = at.clamp(max=len(ids) - 2)
        p_logits = head.logits(head.normed(recorded.last_states[at.cpu()].to(device)))
        p = probabilities(p_logits, sampling.temperature, sampling.top_p)
        tokens = ids[at + 1]
        places = place_of[tokens]
        q_of_token = q.gather(2, places.clamp(min=0)[..., None])[..., 0] * (places >= 0)
        p_of_token = p.gather(2, tokens[..., None])[..., 0]
        weight = torch.where(p_of_token > 0, q_of_token / p_of_token, (q_of_token > 0).float()).clamp(max=1)
        overlap = torch.minimum(q, p[..., draft_ids]).sum(-1)
        own_chances += torch.where(is_known, weight, torch.nan).tolist()
        any_chances += torch.where(is_known, overlap, torch.nan).tolist()
    # 2. from left to right: the chance that a pass begins at each place, and what it then accepts
    chance = [0.0] * (len(own_chances) + depth + 1)
    chance[0] = 1.0
    sums: dict[str, list[float]] = {}
    unjudged = 0
    for place, (weights, overlaps) in enumerate(zip(own_chances, any_chances)):
        here = chance[place]
        if any(value != value for value in weights):
            unjudged += 1
            continue
        tally = sums.setdefault(context_bucket(recorded.start + 1 + place), [0.0] * (depth + 1))
        tally[0] += here
        reached = here
        for k in range(depth):
            tally[k + 1] += reached * overlaps[k]
            chance[place + k + 1] += reached * (1 - weights[k])
            reached *= weights[k]
        chance[place + depth + 1] += reached
    return Replayed([], unjudged, {name: PassCounts(s[0], tuple(s[1:]), 0) for name, s in sums.items()})


def chain_logits(
    drafter: Drafter, pair_ids: Tensor, aux_states: Tensor, anchors: Tensor, depth: int, own_ids: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The drafter's logits at every depth of every anchor.

    Args:
        drafter: P-EAGLE (all depths at once) or EAGLE-3 (each chain goes on from the tokens before it).
        pair_ids: x_{i+1}, int64, [num_pairs].
        aux_states: g_i, [num_pairs, aux_size].
        anchors: positions in [0, num_pairs), ascending, int64, [num_anchors].
        depth: tokens per chain.
        own_ids: for EAGLE-3, the token that the chain of anchor a goes on from after depth d at [a + d], int64; None:
            its own greedy ones.

    Yields:
        Blocks of (anchors, logits [num_anchors_of_block, depth, draft_vocab_size]).
    """
    config = drafter.config
    embeds, hidden = drafter.embed_pairs(pair_ids, aux_states)
    cos, sin = drafter.rotary(torch.arange(len(pair_ids), device=pair_ids.device), hidden.dtype)
    is_shared = config.num_attention_heads != config.num_key_value_heads

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_shared)
        return attended[0].transpose(0, 1).flatten(1)

    carried, keys, values = drafter.base_pass(
        embeds=embeds, hidden=hidden, cos=cos, sin=sin, attend=causal, checkpoint=False
    )
    per_anchor = depth * max(config.num_attention_heads * (len(pair_ids) + depth), config.vocab_size)
    block = max(1, _MOST_SCORES // per_anchor)
    for some in anchors.split(block):
        chain = _Chain(drafter, keys, values, some)
        if config.speculators_model_type == "peagle":
            states = carried[some][:, None]
            if depth > 1:
                states = torch.cat([states, chain.masks(depth - 1)], 1)
            yield some, drafter.logits(drafter.norm(states))
        else:
            yield some, chain.sequential(carried[some][:, None], depth, own_ids)


class _Chain:
    """The slots past the anchors of one block: each sees the pairs up to its anchor, and its own chain."""

    def __init__(self, drafter: Drafter, base_keys: list[Tensor], base_values: list[Tensor], anchors: Tensor) -> None:
        self._drafter, self._anchors = drafter, anchors
        last = int(anchors.max()) + 1
        self._base = [(k[:last], v[:last]) for k, v in zip(base_keys, base_values)]
        self._unseen = torch.arange(last, device=anchors.device) > anchors[:, None]
        self._own: dict[int, tuple[Tensor, Tensor]] = {}

    def masks(self, count: int) -> Tensor:
        """Carried states of the mask slots at depths 1 .. count, [num_anchors, count, hidden_size]."""
        entered = self._drafter.enter(*self._drafter.embed_masks(1))
        return self._drafter.carried_pass(entered, self._positions(1, count), self._attend)

    def sequential(self, carried: Tensor, depth: int, own_ids: Tensor | None) -> Tensor:
        """Logits of EAGLE-3's steps, [num_anchors, depth, draft_vocab_size]."""
        logits = []
        for k in range(depth):
            normed = self._drafter.norm(carried)
            logits.append(self._drafter.logits(normed))
            if k + 1 < depth:
                if own_ids is None:
                    ids = self._drafter.to_verifier_ids(logits[-1].argmax(-1))
                else:
                    ids = own_ids[(self._anchors + k).clamp(max=len(own_ids) - 1)][:, None]
                entered = self._drafter.enter(self._drafter.embed_tokens(ids), self._drafter.fed_back(carried, normed))
                carried = self._drafter.carried_pass(entered, self._positions(k + 1, 1), self._attend)
        return torch.cat(logits, 1)

    def _positions(self, first: int, count: int) -> Tensor:
        return self._anchors[:, None] + torch.arange(first, first + count, device=self._anchors.device)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`: a leading dimension of anchors, then the slots of each."""
        if layer in self._own:
            k, v = torch.cat([self._own[layer][0], k], 1), torch.cat([self._own[layer][1], v], 1)
        self._own[layer] = (k, v)
        base_k, base_v = self._base[layer]
        q = q.unflatten(2, (k.shape[2], -1)) / q.shape[-1] ** 0.5
        to_base = torch.einsum("anghd,tgd->anght", q, base_k)
        to_base = to_base.masked_fill(self._unseen[:, None, None, None], float("-inf"))
        to_own = torch.einsum("anghd,acgd->anghc", q, k)
        later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
        to_own = to_own.masked_fill(later[:, None, None], float("-inf"))
        weights = torch.cat([to_base, to_own], -1).softmax(-1)
        mixed = torch.einsum("anght,tgd->anghd", weights[..., : len(base_k)], base_v)
        mixed = mixed + torch.einsum("anghc,acgd->anghd", weights[..., len(base_k) :], v)
        return mixed.flatten(2)
