"""The record that leaves `data/`: one tokenized row, nothing shifted yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenRow:
    """Token ids x_0 .. x_{T-1} of one conversation (or of one turn with its history) and what is supervised.

    A turn is a maximal run of ones in `loss_mask`: every chat template puts at least one token between two replies.
    """

    row_id: str
    """Stable identity: survives shuffling of the input and another number of workers."""
    source: str
    """The data set the row came from; evaluation has one table row for each."""
    input_ids: list[int]
    """[num_tokens]"""
    loss_mask: list[int]
    """1 where the token was written by the assistant, [num_tokens]."""
    next_is_supervised: bool
    """True iff the length limit cut the row inside a reply: the label x_T just past the row is then supervised too."""
    tail_length: int
    """How many trailing tokens lie past the answer's end: the verifier's own continuation, mask 0, kept for replay."""

    def label_positions(self) -> list[int]:
        """Positions p whose verifier state y_p is a target, ascending: x_p and x_{p+1} belong to one reply.

        A replay row also keeps the positions of its tail, so that every drafted token has a target to be judged by.

        Example:
            mask 0 0 1 1 1 0 gives 2 and 3 (y_2 predicts x_3, y_3 predicts x_4); y_1 predicts the first reply token,
            which the verifier's own prefill gives, so no slot asks for it.
        """
        ids, mask, tail = self.input_ids, self.loss_mask, self.tail_length
        last = len(ids) - 1
        ends = len(ids) - tail
        found = []
        for p in range(1, len(ids)):
            here = mask[p] or (tail and p >= ends)
            after = (mask[p + 1] or (tail and p + 1 >= ends)) if p < last else self.next_is_supervised
            if here and after:
                found.append(p)
        return found
