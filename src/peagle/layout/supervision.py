"""The supervision rule, stated once: which positions, pair slots and deeper slots count, and how much of a row is used.

Row x_0 .. x_{T-1} has a loss mask, 1 where the assistant wrote the token. The drafter is only ever asked to continue
after a token that the verifier generated, never across a user turn:

- Position p >= 1 has a **label** (its verifier state y_p is a target) iff x_p and x_{p+1} belong to one reply. x_T lies
  just past a row; it counts where the length limit cut the row inside a reply (`next_is_supervised`).
- **Pair slot** i is supervised iff position i + 1 has a label: its target is y_{i+1}, which predicts x_{i+2}.
- **Slot (a, d)** is supervised iff pair slots a .. a+d of one document all are: x_{a+1} .. x_{a+d+2} are one reply's.
- A **replay tail** (the verifier's own continuation past the answer's end, mask 0) has labels, because replay judges
  the tokens drafted there, but is never supervised.

Every chat template puts at least one token between two replies, so a reply is a maximal run of ones.

Worked example. A prompt of two tokens, a reply of four, a user turn of two, not cut:

    position        0  1  2  3  4  5  6  7
    loss mask       .  .  1  1  1  1  .  .
    label           .  .  1  1  1  .  .  .     y_2 predicts x_3, y_3 predicts x_4, y_4 predicts x_5
    pair slot       0  1  2  3  4  5  6
    supervised      .  1  1  1  .  .  .
    run             0  3  2  1  0  0  0        slot (a, d) is supervised iff run[a] > d: (1, 0) to (1, 2), (2, 0) ...

y_1 predicts the reply's first token, which the verifier's own prefill gives, so no slot asks for it. Training uses the
first five tokens: no supervised slot reads past x_4 and y_4, and the three after them can be cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.errors import LayoutError


@dataclass(frozen=True)
class Extent:
    """How much of a row training uses."""

    num_tokens: int
    """Tokens up to the last one that a supervised slot reads: x_0 .. x_p, y_p being the row's last target."""
    num_supervised: int
    """Supervised pair slots."""


def label_positions(loss_mask: Sequence[int], next_is_supervised: bool, tail_length: int) -> list[int]:
    """Positions p whose verifier state y_p is a target, ascending.

    Args:
        loss_mask: 1 where the assistant wrote the token, [num_tokens].
        next_is_supervised: whether x_T, just past the row, continues the reply.
        tail_length: tokens of the replay tail at the row's end; 0 gives the supervised positions alone.
    """
    end = len(loss_mask) - tail_length
    written = [*loss_mask[:end], *[1] * tail_length, int(next_is_supervised)]
    return [p for p in range(1, len(loss_mask)) if written[p] and written[p + 1]]


def extent(loss_mask: Sequence[int], next_is_supervised: bool) -> Extent:
    """How much of a row training uses; (0, 0) if nothing in it is supervised."""
    positions = label_positions(loss_mask, next_is_supervised, 0)
    return Extent(positions[-1] + 1 if positions else 0, len(positions))


def supervised_run(is_supervised: Tensor, document_ids: Tensor) -> Tensor:
    """How many supervised pair slots follow without a gap, each slot itself included.

    Args:
        is_supervised: bool, [num_pairs].
        document_ids: document of each pair slot, -1 for padding, int64, [num_pairs].

    Returns:
        int64, [num_pairs]; slot (a, d) is supervised iff run[a] > d.

    Raises:
        LayoutError: the shapes differ.
    """
    if is_supervised.shape != document_ids.shape or is_supervised.dim() != 1:
        raise LayoutError(
            f"shapes differ: is_supervised {list(is_supervised.shape)}, document_ids {list(document_ids.shape)}"
        )
    num_pairs = is_supervised.numel()
    counts = is_supervised & (document_ids >= 0)
    index = torch.arange(num_pairs, device=is_supervised.device)
    # A slot ends its run if the next one is not supervised or lies in another document.
    ends = torch.ones_like(counts)
    ends[:-1] = ~counts[1:] | (document_ids[1:] != document_ids[:-1])
    next_end = torch.where(ends, index, num_pairs).flip(0).cummin(0).values.flip(0)
    return torch.where(counts, next_end - index + 1, 0)
