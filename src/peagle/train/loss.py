"""From states to loss without ever holding [num_rows, vocab_size]: rows go through the head a chunk at a time.

Rows come sorted by label, so that the verifier's distribution is computed once for all rows that share a label; how
they are cut is planned beforehand, on the CPU (`plan_labels`), so that no device is asked. The backward is written by
hand: a chunk's logits become their own gradient, which costs one more matrix product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from peagle.kernels import cpu as kernels
from peagle.kernels import gpu
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
    """Not weighted, float32 (float64 of such states), [num_rows]."""
    is_correct: Tensor
    """The first of the largest logits is the verifier's choice, as a decoder chooses; bool, [num_rows]."""
    grad: Tensor | None
    """d sum(weight * loss) / d states, [num_rows, hidden_size]; None without gradients."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows that go through the head together."""

    begin: int
    end: int
    """Rows begin .. end-1."""
    first_label: int
    last_label: int
    """Their labels: first_label .. last_label-1 of the plan's."""
    pieces: tuple[tuple[slice, slice], ...]
    """What a CPU takes at a time, whole labels: rows of the chunk, and labels of the chunk."""


@dataclass(frozen=True, kw_only=True)
class LabelPlan:
    """How rows, sorted by label, are cut into chunks; a label whose rows lie in two chunks is in both."""

    labels: Tensor
    """Row of `Targets.normed` of each chunk's labels, ascending within a chunk, int64, [num_labels]."""
    label_of_row: Tensor
    """Place of each row's label among those of its own chunk, int64, [num_rows]."""
    chunks: tuple[Chunk, ...]


def plan_labels(label_rows: Tensor, chunk_rows: int, vocab_size: int) -> LabelPlan:
    """Cut sorted rows into chunks of at most `chunk_rows`, at label borders where a label's rows allow it.

    Args:
        label_rows: row of `Targets.normed` for each row, ascending, int64, on the CPU, [num_rows].
        chunk_rows: see above.
        vocab_size: the drafter's; more of it makes smaller pieces.
    """
    assert label_rows.device.type == "cpu", "planning reads every row"
    labels, label_of_row, counts = torch.unique_consecutive(label_rows, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).tolist()
    starts = [0, *ends]
    chunks: list[Chunk] = []
    chosen, places = [], []
    piece_rows = max(1, PIECE_ELEMENTS // vocab_size)
    first_label = 0
    for begin, end in _chunk_bounds(starts, chunk_rows):
        first, last = (int(label_of_row[row]) for row in (begin, end - 1))
        rows_per_label = [min(starts[label + 1], end) - max(starts[label], begin) for label in range(first, last + 1)]
        last_label = first_label + last + 1 - first
        pieces = tuple(_pieces(rows_per_label, piece_rows))
        chunks.append(Chunk(begin=begin, end=end, first_label=first_label, last_label=last_label, pieces=pieces))
        chosen.append(labels[first : last + 1])
        places.append(label_of_row[begin:end] - first)
        first_label = last_label
    none = label_rows.new_empty(0)
    return LabelPlan(labels=torch.cat([none, *chosen]), label_of_row=torch.cat([none, *places]), chunks=tuple(chunks))


def _chunk_bounds(starts: list[int], chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows; `starts` are those of the labels, and the end."""
    begin = 0
    for here, after in pairwise(starts):
        if after - begin > chunk_rows and here > begin:
            yield begin, here
            begin = here
        while after - begin > chunk_rows:
            yield begin, begin + chunk_rows
            begin += chunk_rows
    if begin < starts[-1]:
        yield begin, starts[-1]


def head_loss(
    *,
    states: Tensor,
    weight: Tensor,
    plan: LabelPlan,
    row_weight: Tensor,
    targets: Targets,
    loss: LossName,
    logits_buffer: Tensor,
    with_grad: bool,
    weight_grad: Tensor | None,
) -> RowLoss:
    """Loss, correctness and gradient of rows against their labels. The host waits for no device.

    Args:
        states: what the drafter's head reads, in the plan's order, [num_rows, hidden_size].
        weight: the drafter's head, [draft_vocab_size, hidden_size].
        plan: the rows' labels and chunks, its tensors on the device of `states`.
        row_weight: weight of each row in the sum whose gradient is taken, [num_rows].
        targets: the verifier's side.
        loss: `kl_div` KL(verifier || drafter), `ce` the verifier's choice as a hard label, `tv` total variation.
        logits_buffer: holds the logits of a chunk, [at least its rows, draft_vocab_size]. A step has one: fresh pages
            cost a third of the product that fills them.
        with_grad: whether to compute `grad`.
        weight_grad: the head's gradient is added here, [draft_vocab_size, hidden_size]; None for a frozen head.
    """
    num_rows = states.shape[0]
    losses = torch.empty(num_rows, dtype=torch.promote_types(states.dtype, torch.float32), device=states.device)
    is_correct = torch.empty(num_rows, dtype=torch.bool, device=states.device)
    grad = torch.empty_like(states) if with_grad else None
    is_fused = states.device.type != "cpu" and gpu.fused_loss_problem() is None
    for chunk in plan.chunks:
        rows = slice(chunk.begin, chunk.end)
        labels = plan.labels[chunk.first_label : chunk.last_label]
        verifier_logits = targets.head.logits(targets.normed[labels])
        known = None if targets.choices is None else targets.choices[labels]
        logits = torch.mm(states[rows], weight.t(), out=logits_buffer[: chunk.end - chunk.begin])
        if is_fused:
            losses[rows], is_correct[rows] = gpu.row_losses_(
                logits=logits,
                verifier_logits=verifier_logits,
                label_of_row=plan.label_of_row[rows],
                choices=known,
                loss=loss,
                with_grad=with_grad,
            )
        else:
            whole = (slice(0, chunk.end - chunk.begin), slice(0, labels.numel()))
            for some, own in chunk.pieces if states.device.type == "cpu" else (whole,):
                here = slice(chunk.begin + some.start, chunk.begin + some.stop)
                losses[here], is_correct[here] = _row_losses_(
                    logits=logits[some],
                    verifier_logits=verifier_logits[own],
                    label_of_row=plan.label_of_row[here] - own.start,
                    choices=None if known is None else known[own],
                    loss=loss,
                    with_grad=with_grad,
                )
        if grad is not None:
            scale = row_weight[rows, None]
            torch.mm(logits, weight, out=grad[rows])
            grad[rows].mul_(scale)
            if weight_grad is not None:
                kernels.add_product_(weight_grad, logits.t(), (states[rows] * scale).to(logits.dtype))
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


def _row_losses_(
    *,
    logits: Tensor,
    verifier_logits: Tensor,
    label_of_row: Tensor,
    choices: Tensor | None,
    loss: LossName,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """The definition of `kernels.gpu.row_losses_`, and what a CPU runs; `verifier_logits` may be overwritten.

    Half precision is computed in float32, so that a loss near 10 nats isn't known to a sixteenth only.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    z, verifier = logits.to(exact), verifier_logits.to(exact)
    # 1. The verifier's distributions and choices: [num_labels, draft_vocab_size], [num_labels].
    if loss == "ce" and choices is not None:
        chosen = choices
    else:
        target, log_sum, dot, best = kernels.softmax_(verifier)
        chosen = best if choices is None else choices
    choice = chosen[label_of_row]  # [num_rows]
    # 2. KL divergence: cross entropy less the verifier's own entropy.
    if loss == "kl_div":
        cross_entropy, best = kernels.soft_cross_entropy_(z, target, label_of_row, with_grad)
        losses, grad = (dot - log_sum)[label_of_row] + cross_entropy, z
    # 3. Cross entropy with the choice. One outside the draft vocabulary has no logit to raise: its row teaches nothing.
    elif loss == "ce":
        place, inside = choice.clamp(min=0)[:, None], (choice >= 0).to(exact)
        at_choice = z.gather(1, place)[:, 0]  # before the logits are overwritten
        grad, log_sum, _, best = kernels.softmax_(z)
        losses = (log_sum - at_choice) * inside
        if with_grad:
            grad.scatter_add_(1, place, -inside[:, None]).mul_(inside[:, None])
    # 4. Total variation: d(1 - sum min(q, p)) / dz = -q * (1[q <= p] - sum of q where q <= p)
    else:
        grad, _, _, best = kernels.softmax_(z)
        wanted = target if target.shape[0] == 1 else target[label_of_row]
        losses = 1 - torch.minimum(grad, wanted).sum(-1)
        if with_grad:
            below = (grad <= wanted).to(exact)
            grad.mul_(torch.linalg.vecdot(grad, below)[:, None] - below)
    if with_grad:
        logits.copy_(grad)
    return losses, best == choice


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
