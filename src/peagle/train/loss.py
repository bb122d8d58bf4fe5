"""From states to loss without ever holding [num_rows, vocab_size]: rows go through the head a chunk at a time.

Rows come sorted by label, so that the verifier's distribution is computed once for all rows that share a label. The
backward is written by hand: a chunk's logits become their own gradient, which costs one more matrix product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from peagle.kernels import cpu as kernels
from peagle.verifier.weights import VerifierHead

LossName = Literal["kl_div", "ce", "tv"]

# Logits that the passes between the two matrix products of a chunk touch at a time: half a megabyte stays in a core's
# cache, where those passes cost a third of what they cost over a whole chunk. A GPU takes the chunk whole.
PIECE_ELEMENTS = 1 << 17


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
    *,
    states: Tensor,
    weight: Tensor,
    label_rows: Tensor,
    row_weight: Tensor,
    targets: Targets,
    loss: LossName,
    logits_buffer: Tensor,
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
        logits_buffer: holds the logits of a chunk, [chunk_rows, draft_vocab_size]. A step has one: fresh pages cost a
            third of the product that fills them.
        with_grad: whether to compute `grad`.
        weight_grad: the head's gradient is added here, [draft_vocab_size, hidden_size]; None for a frozen head.
    """
    num_rows, (chunk_rows, vocab_size) = states.shape[0], logits_buffer.shape
    losses = states.new_empty(num_rows)
    is_correct = torch.empty(num_rows, dtype=torch.bool, device=states.device)
    grad = torch.empty_like(states) if with_grad else None
    piece_elements = PIECE_ELEMENTS if states.device.type == "cpu" else logits_buffer.numel()
    for begin, end in chunks_by_label(label_rows, chunk_rows):
        labels, label_of_row, counts = torch.unique_consecutive(
            label_rows[begin:end], return_inverse=True, return_counts=True
        )
        verifier_logits = targets.head.logits(targets.normed[labels])
        known = None if targets.choices is None else targets.choices[labels]
        logits = torch.mm(states[begin:end], weight.t(), out=logits_buffer[: end - begin])
        for rows, own in _pieces(counts.tolist(), max(1, piece_elements // vocab_size)):
            choices = verifier_logits[own].argmax(-1) if known is None else known[own]
            within = label_of_row[rows] - own.start
            here = slice(begin + rows.start, begin + rows.stop)
            losses[here], is_correct[here] = _piece(
                logits=logits[rows],
                verifier_logits=verifier_logits[own],
                choices=choices,
                label_of_row=within,
                loss=loss,
                with_grad=with_grad,
            )
        if with_grad:
            assert grad is not None
            scale = row_weight[begin:end, None]
            torch.mm(logits, weight, out=grad[begin:end])
            grad[begin:end].mul_(scale)
            if weight_grad is not None:
                weight_grad.addmm_((logits * scale).t(), states[begin:end])
    return RowLoss(losses, is_correct, grad)


def _pieces(rows_per_label: list[int], piece_rows: int) -> Iterator[tuple[slice, slice]]:
    """Whole labels of a chunk, about `piece_rows` rows at a time: their rows, and their places among the labels."""
    row = label = rows = 0
    for place, count in enumerate(rows_per_label):
        if rows and rows + count > piece_rows:
            yield slice(row, row + rows), slice(label, place)
            row, label, rows = row + rows, place, 0
        rows += count
    yield slice(row, row + rows), slice(label, len(rows_per_label))


def _piece(
    *,
    logits: Tensor,
    verifier_logits: Tensor,
    choices: Tensor,
    label_of_row: Tensor,
    loss: LossName,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Losses and correctness of a few rows, [num_rows].

    `verifier_logits` may be overwritten; with gradients, `logits` becomes d loss / d logits.
    """
    # 1. The drafter is right where no logit exceeds that of the verifier's choice.
    choice = choices[label_of_row]
    at_choice = logits.gather(1, choice.clamp(min=0)[:, None])[:, 0]  # before the logits are overwritten
    # 2. KL divergence: cross entropy less the verifier's own entropy.
    if loss == "kl_div":
        target, entropy = kernels.softmax_with_entropy(verifier_logits)  # [num_labels, draft_vocab_size], [num_labels]
        cross_entropy, best = kernels.soft_cross_entropy_(logits, target, label_of_row, with_grad)
        return entropy[label_of_row] + cross_entropy, (at_choice >= best) & (choice >= 0)
    best, probs = logits.amax(-1), torch.softmax(logits, -1)  # [num_rows], [num_rows, draft_vocab_size]
    is_correct = (at_choice >= best) & (choice >= 0)
    # 3. Cross entropy with the choice. One outside the draft vocabulary has no logit to raise: its row teaches nothing.
    if loss == "ce":
        inside = (choice >= 0).to(logits.dtype)
        losses = (kernels.log_sum_exp(best, probs) - at_choice) * inside
        if with_grad:
            logit_grad = probs.scatter_add_(1, choice.clamp(min=0)[:, None], -inside[:, None])
            torch.mul(logit_grad, inside[:, None], out=logits)
        return losses, is_correct
    # 4. Total variation: d(1 - sum min(q, p)) / dz = -q * (1[q <= p] - sum of q where q <= p)
    target = torch.softmax(verifier_logits, -1)
    wanted = target if target.shape[0] == 1 else target[label_of_row]
    losses = 1 - torch.minimum(probs, wanted).sum(-1)
    if with_grad:
        below = (probs <= wanted).to(probs.dtype)
        torch.mul(probs, torch.linalg.vecdot(probs, below)[:, None] - below, out=logits)
    return losses, is_correct


def verifier_choices(full_head: VerifierHead, normed: Tensor, draft_ids: Tensor, chunk_rows: int) -> Tensor:
    """The verifier's choice over its WHOLE vocabulary, as draft ids, so that a token nobody can draft counts as missed.

    Args:
        full_head: the verifier's head, not restricted.
        normed: norm(y), [num_labels, hidden_size].
        draft_ids: verifier ids of the draft vocabulary, ascending, int64, [draft_vocab_size].
        chunk_rows: labels whose logits are held at a time.

    Returns:
        int64, [num_labels]; -1 where the choice lies outside the draft vocabulary.
    """
    chunks = normed.split(chunk_rows)
    choices = torch.cat([full_head.logits(chunk).argmax(-1) for chunk in chunks])  # [num_labels]
    place = torch.searchsorted(draft_ids, choices).clamp(max=draft_ids.numel() - 1)
    return torch.where(draft_ids[place] == choices, place, -1)
