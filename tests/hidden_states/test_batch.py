"""Packed pair slots: the one shift between stored rows and what the network reads."""

import pytest
import torch

from peagle.data.records import TokenRow
from peagle.hidden_states.batch import StoredRow, pack


def stored(row_id, ids, mask, next_is_supervised=False, tail_length=0):
    """States that say which position they are of: aux [i, i], last [100 + p]."""
    row = TokenRow(
        row_id=row_id,
        source="a",
        input_ids=ids,
        loss_mask=mask,
        next_is_supervised=next_is_supervised,
        tail_length=tail_length,
    )
    label_pos = torch.tensor(row.label_positions(), dtype=torch.int64)
    aux = torch.arange(len(ids), dtype=torch.float32)[:, None].expand(-1, 2).clone()
    return StoredRow(row, aux, label_pos, (100.0 + label_pos)[:, None])


def test_pair_slot_i_has_token_i_plus_1_state_i_position_i_and_the_target_state_of_position_i_plus_1():
    batch = pack([stored("r", [10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 1, 0])], None)
    assert batch.pair_ids.tolist() == [11, 12, 13, 14, 15]
    assert batch.aux_states[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert batch.rope_pos.tolist() == [0, 1, 2, 3, 4]
    targets = [None if at < 0 else batch.last_states[at, 0].item() for at in batch.label_of_pair.tolist()]
    # y_2 and y_3 predict x_3 and x_4; y_1 predicts the first reply token, which prefill gives; x_5 is no reply token
    assert targets == [None, 102, 103, None, None]
    assert batch.is_supervised.tolist() == [False, True, True, False, False]


def test_M01_the_first_reply_token_is_context_and_every_later_one_is_a_label():
    ids, mask = [1, 2, 3, 4, 20, 21, 22, 23, 24], [0, 0, 0, 0, 1, 1, 1, 1, 1]
    batch = pack([stored("r", ids, mask)], None)
    labels = [ids[slot + 2] for slot, counts in enumerate(batch.is_supervised.tolist()) if counts]
    assert labels == [21, 22, 23, 24]


def test_the_token_just_past_a_cut_reply_is_a_label():
    batch = pack([stored("r", [1, 2, 3, 4], [0, 1, 1, 1], next_is_supervised=True)], None)
    assert batch.is_supervised.tolist() == [True, True, True]
    assert batch.last_states[batch.label_of_pair, 0].tolist() == [101, 102, 103]


def test_a_replay_tail_is_kept_but_not_supervised():
    row = stored("r", [1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 0, 0], tail_length=2)
    assert row.label_pos.tolist() == [1, 2, 3, 4]
    batch = pack([row], None)
    assert batch.is_supervised.tolist() == [True, True, False, False, False]
    assert batch.last_states.shape[0] == 4


def test_rows_are_kept_apart_and_their_labels_point_to_their_own_states():
    a, b = stored("a", [1, 2, 3], [0, 1, 1]), stored("b", [4, 5, 6, 7], [0, 1, 1, 1])
    batch = pack([a, b], None)
    assert batch.document_ids.tolist() == [0, 0, 1, 1, 1]
    assert batch.rope_pos.tolist() == [0, 1, 0, 1, 2]
    assert batch.pair_ids.tolist() == [2, 3, 5, 6, 7]
    assert batch.label_of_pair.tolist() == [0, -1, 1, 2, -1]
    assert batch.row_ids == ("a", "b")


def test_padding_is_at_the_end_and_belongs_to_no_document():
    batch = pack([stored("a", [1, 2, 3], [0, 1, 1])], 5)
    assert batch.document_ids.tolist() == [0, 0, -1, -1, -1]
    assert batch.label_of_pair.tolist() == [0, -1, -1, -1, -1]
    assert batch.aux_states[2:].abs().sum() == 0
    with pytest.raises(ValueError, match="2 pair slots do not fit 1"):
        pack([stored("a", [1, 2, 3], [0, 1, 1])], 1)


def test_a_batch_moves_its_states_to_a_dtype():
    batch = pack([stored("a", [1, 2, 3], [0, 1, 1])], None).to(torch.device("cpu"), torch.bfloat16)
    assert batch.aux_states.dtype == batch.last_states.dtype == torch.bfloat16
    assert batch.pair_ids.dtype == torch.int64
