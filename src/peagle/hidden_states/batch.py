"""Rows with their verifier states, packed into one sequence of pair slots. The one place where a shift happens.

A row x_0 .. x_{T-1} gives T-1 pair slots: slot i carries token x_{i+1} and state g_i at rotary position i, predicts
x_{i+2}, and its target is the verifier's distribution softmax(head(norm(y_{i+1}))). Rows follow one another;
a document id per slot keeps them apart, -1 is padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.data.records import TokenRow
from peagle.layout.supervision import label_positions


@dataclass(frozen=True)
class StoredRow:
    """One row as it comes out of the hidden-state store (or straight from a verifier)."""

    row: TokenRow
    aux_states: Tensor
    """g_i: the states entering the auxiliary layers, concatenated, [num_tokens, num_aux_layers * hidden_size]."""
    label_pos: Tensor
    """Positions p whose y_p is kept (`layout.supervision.label_positions`), ascending, int64, [num_labels]."""
    last_states: Tensor
    """y_p after the last layer, BEFORE the final norm, [num_labels, hidden_size]."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed pair slots. Everything here is already shifted: nothing downstream shifts again."""

    pair_ids: Tensor
    """x_{i+1} of each pair slot, int64, [num_pairs]."""
    aux_states: Tensor
    """g_i, [num_pairs, num_aux_layers * hidden_size]."""
    rope_pos: Tensor
    """i, counted inside its document, int64, [num_pairs]."""
    document_ids: Tensor
    """Document of each pair slot, ascending from 0; -1 is padding, at the end only; int64, [num_pairs]."""
    label_of_pair: Tensor
    """Row of `last_states` that holds y_{i+1}, or -1 where the slot has no supervised target; int64, [num_pairs].
    Slot (a, d) has the target of pair slot a + d."""
    last_states: Tensor
    """[num_labels, hidden_size], before the final norm."""
    row_ids: tuple[str, ...]
    """Source row of each document."""

    @property
    def is_supervised(self) -> Tensor:
        """Whether each pair slot (a, 0) counts, bool, [num_pairs]. Slot (a, d) counts iff a .. a + d all do."""
        return self.label_of_pair >= 0

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The same batch on `device`, states in `dtype`."""
        return replace(
            self,
            pair_ids=self.pair_ids.to(device),
            aux_states=self.aux_states.to(device, dtype),
            rope_pos=self.rope_pos.to(device),
            document_ids=self.document_ids.to(device),
            label_of_pair=self.label_of_pair.to(device),
            last_states=self.last_states.to(device, dtype),
        )


def pack(rows: list[StoredRow], num_pairs: int | None) -> Batch:
    """Put rows, each of at least two tokens, one after another and pad to `num_pairs` pair slots (None: no padding).

    Labels inside a row's replay tail are kept out of supervision: `label_of_pair` is -1 there.
    """
    pair_ids, aux, rope_pos, documents, labels, last = [], [], [], [], [], []
    num_labels = 0
    for document, stored in enumerate(rows):
        row = stored.row
        count = len(row.input_ids) - 1
        pair_ids.append(torch.tensor(row.input_ids[1:], dtype=torch.int64))
        aux.append(stored.aux_states[:count])
        rope_pos.append(torch.arange(count))
        documents.append(torch.full((count,), document))
        supervised_pos = torch.tensor(label_positions(row.loss_mask, row.next_is_supervised, 0), dtype=torch.int64)
        is_target = torch.isin(stored.label_pos, supervised_pos)
        label_of_pair = torch.full((count,), -1)
        label_of_pair[stored.label_pos[is_target] - 1] = num_labels + is_target.nonzero()[:, 0]
        labels.append(label_of_pair)
        last.append(stored.last_states)
        num_labels += len(stored.label_pos)
    total = sum(len(ids) for ids in pair_ids)
    padding = 0 if num_pairs is None else num_pairs - total
    if padding < 0:
        raise ValueError(f"{total} pair slots do not fit {num_pairs}")
    if padding:
        pair_ids.append(torch.zeros(padding, dtype=torch.int64))
        aux.append(aux[0].new_zeros(padding, aux[0].shape[1]))
        rope_pos.append(torch.zeros(padding, dtype=torch.int64))
        documents.append(torch.full((padding,), -1))
        labels.append(torch.full((padding,), -1))
    return Batch(
        pair_ids=torch.cat(pair_ids),
        aux_states=torch.cat(aux),
        rope_pos=torch.cat(rope_pos),
        document_ids=torch.cat(documents),
        label_of_pair=torch.cat(labels),
        last_states=torch.cat(last),
        row_ids=tuple(stored.row.row_id for stored in rows),
    )
