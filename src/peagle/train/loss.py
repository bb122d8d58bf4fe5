"""From states to loss without ever holding [num_rows, vocab_size]: rows go through the head a chunk at a time.

Rows come sorted by label, so that the verifier's distribution is computed once for all rows that share a label. The
backward is written by hand: while a chunk's logits are in the cache their gradient costs one more matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from peagle.verifier.weights import VerifierHead

LossName = Literal["kl_div", "ce", "tv"]


@dataclass(frozen=True)
class Targets:
    """What the loss compares with: one row per label, each row the verifier's state at one position."""

    normed: Tensor
    """norm(y), [num_labels, hidden_size]."""
    head: VerifierHead
    """The verifier's head, restricted to the draft vocabulary."""
    choices: Tensor | None
    """The verifier's choice per label as a draft id, -1 outside the draft vocabulary, int64, [num_labels]. None: the
    best token inside the draft vocabulary is taken for its choice, which is exact without a pruned vocabulary."""


@dataclass(frozen=True)
class RowLoss:
    """Per row: the loss, whether the drafter's choice is the verifier's, and the gradient of the weighted sum."""

    loss: Tensor
    """Not weighted, [num_rows]."""
    is_correct: Tensor
    """bool, [num_rows]."""
    grad: Tensor | None
    """d sum(weight * loss) / d states, [num_rows, hidden_size]; None without gradients."""


def chunks_by_label(label_rows: Tensor, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Cut sorted rows into ranges of at most `chunk_rows`, at label borders where a label's rows allow it."""
    num_rows = label_rows.numel()
    if num_rows == 0:
        return
    borders = torch.cat([torch.ones(1, dtype=torch.bool), (label_rows[1:] != label_rows[:-1]).cpu()]).nonzero()[:, 0]
    starts = [*borders.tolist(), num_rows]
    begin = 0
    for here, after in pairwise(starts):
        if after - begin > chunk_rows and here > begin:
            yield begin, here
            begin = here
        while after - begin > chunk_rows:
            yield begin, begin + chunk_rows
            begin += chunk_rows
    if begin < num_rows:
        yield begin, num_rows


def head_loss(
    states: Tensor,
    weight: Tensor,
    label_rows: Tensor,
    row_weight: Tensor,
    targets: Targets,
    loss: LossName,
    chunk_rows: int,
    with_grad: bool,
    weight_grad: Tensor | None,
) -> RowLoss:
    """Loss, correctness and gradient of rows against their labels.

    Args:
        states: what the drafter's head reads, [num_rows, hidden_size].
        weight: the drafter's head, [draft_vocab_size, hidden_size].
        label_rows: row of `targets.normed` for each row, ascending, int64, [num_rows].
        row_weight: weight of each row in the sum whose gradient is taken, [num_rows].
        targets: the verifier's side.
        loss: `kl_div` KL(verifier || drafter), `ce` the verifier's choice as a hard label, `tv` total variation.
        chunk_rows: rows whose logits are held at a time.
        with_grad: whether to compute `grad`.
        weight_grad: the head's gradient is added here, [draft_vocab_size, hidden_size]; None for a frozen head.
    """
    num_rows, vocab_size = states.shape[0], weight.shape[0]
    losses = states.new_empty(num_rows)
    is_correct = torch.empty(num_rows, dtype=torch.bool, device=states.device)
    grad = torch.empty_like(states) if with_grad else None
    size = min(chunk_rows, num_rows)
    logits_space, drafter_space, verifier_space = (states.new_empty(size, vocab_size) for _ in range(3))
    for begin, end in chunks_by_label(label_rows, chunk_rows):
        labels, label_of_row = torch.unique_consecutive(label_rows[begin:end], return_inverse=True)
        verifier_probs, entropy, choices = _verifier_side(targets, labels, loss)
        logits = torch.mm(states[begin:end], weight.t(), out=logits_space[: end - begin])
        best = logits.amax(-1)
        choice = choices[label_of_row]
        at_choice = logits.gather(1, choice.clamp(min=0)[:, None])[:, 0]
        is_correct[begin:end] = (at_choice >= best) & (choice >= 0)
        probs = torch.softmax(logits, -1, out=drafter_space[: end - begin])
        log_sum = best - probs.amax(-1).log()
        target_probs = None
        if verifier_probs is not None:
            target_probs = torch.index_select(verifier_probs, 0, label_of_row, out=verifier_space[: end - begin])
        if loss == "kl_div":
            assert target_probs is not None
            assert entropy is not None
            losses[begin:end] = entropy[label_of_row] + log_sum - torch.linalg.vecdot(target_probs, logits)
            logit_grad = probs.sub_(target_probs) if with_grad else probs
        elif loss == "ce":
            # A choice outside the draft vocabulary has no logit to raise: such a row teaches nothing.
            inside = (choice >= 0).to(states.dtype)
            losses[begin:end] = (log_sum - at_choice) * inside
            logit_grad = probs.scatter_add_(1, choice.clamp(min=0)[:, None], -inside[:, None])
            logit_grad.mul_(inside[:, None])
        else:
            assert target_probs is not None
            losses[begin:end] = 1 - torch.minimum(probs, target_probs).sum(-1)
            # d(1 - sum min(q, p)) / dz = -q * (1[q <= p] - sum of q where q <= p)
            below = (probs <= target_probs).to(probs.dtype)
            logit_grad = probs.mul_(torch.linalg.vecdot(probs, below)[:, None] - below)
        if with_grad:
            assert grad is not None
            scale = row_weight[begin:end, None]
            torch.mm(logit_grad, weight, out=grad[begin:end])
            grad[begin:end].mul_(scale)
            if weight_grad is not None:
                weight_grad.addmm_((logit_grad * scale).t(), states[begin:end])
    return RowLoss(losses, is_correct, grad)


def _verifier_side(targets: Targets, labels: Tensor, loss: LossName) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Of a few labels: the verifier's distribution [num, vocab], sum p log p [num], and its choices [num]."""
    logits = targets.head.logits(targets.normed[labels])
    if targets.choices is None:
        choices = logits.argmax(-1)
    else:
        choices = targets.choices[labels]
    if loss == "ce":
        return None, None, choices
    best = logits.amax(-1)
    probs = torch.softmax(logits, -1)
    entropy = torch.linalg.vecdot(probs, logits) - (best - probs.amax(-1).log())
    return probs, entropy, choices


def verifier_choices(full_head: VerifierHead, normed: Tensor, draft_ids: Tensor | None, chunk_rows: int) -> Tensor:
    """The verifier's choice over its WHOLE vocabulary, as draft ids, so that a token nobody can draft counts as missed.

    Args:
        full_head: the verifier's head, not restricted.
        normed: norm(y), [num_labels, hidden_size].
        draft_ids: verifier ids of the draft vocabulary, ascending, int64, [draft_vocab_size]; None if not pruned.
        chunk_rows: labels whose logits are held at a time.

    Returns:
        int64, [num_labels]; -1 where the choice lies outside the draft vocabulary.
    """
    found = torch.empty(normed.shape[0], dtype=torch.int64, device=normed.device)
    for begin in range(0, normed.shape[0], chunk_rows):
        found[begin : begin + chunk_rows] = full_head.logits(normed[begin : begin + chunk_rows]).argmax(-1)
    if draft_ids is None:
        return found
    place = torch.searchsorted(draft_ids, found).clamp(max=draft_ids.numel() - 1)
    return torch.where(draft_ids[place] == found, place, -1)
