"""Claims about which rows go together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.errors import DataError
from peagle.train.batches import Pack, first_by_hash, packs, seed_of, share, split

LENGTHS = {f"row-{i}": 10 + (37 * i) % 90 for i in range(300)}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(2, 100), min_size=1, max_size=120), st.integers(0, 5), st.integers(0, 3))
def test_every_row_is_in_one_pack_and_no_pack_is_too_long(lengths, seed, epoch):
    named = {str(i): length for i, length in enumerate(lengths)}
    found = packs(named, 100, seed, epoch)
    assert sorted(row for pack in found for row in pack.row_ids) == sorted(named)
    for pack in found:
        assert pack.num_tokens == sum(named[row] for row in pack.row_ids) <= 100


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    assert packs(LENGTHS, 256, 1, 0) == packs(dict(LENGTHS), 256, 1, 0)
    assert packs(LENGTHS, 256, 1, 0) != packs(LENGTHS, 256, 1, 1)
    assert packs(LENGTHS, 256, 1, 0) != packs(LENGTHS, 256, 2, 0)
    assert packs(LENGTHS, 256, 1, None) == packs(LENGTHS, 256, 2, None)


def test_packs_are_filled_to_nine_tenths():
    found = packs(LENGTHS, 256, 0, 0)
    assert sum(pack.num_tokens for pack in found) / (256 * len(found)) > 0.9


def test_a_row_longer_than_a_pack_is_refused_by_name_and_length():
    with pytest.raises(DataError, match=r"row long has 300 tokens, --total-seq-len is 256"):
        packs({"short": 10, "long": 300}, 256, 0, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_share_every_pack_of_a_step_evenly(num_ranks):
    group = [Pack((str(i),), 100 - i) for i in range(7)]
    dealt = share(group, num_ranks)
    assert len(dealt) == num_ranks
    assert sorted(index for mine in dealt for index in mine) == list(range(7))
    assert max(map(len, dealt)) <= -(-7 // num_ranks)
    assert all(mine == sorted(mine) for mine in dealt)


def test_a_step_of_fewer_packs_than_ranks_leaves_ranks_without_any():
    assert share([Pack(("a",), 5)], 3) == [[0], [], []]


def test_the_split_depends_on_the_rows_alone_and_added_rows_move_few():
    ids = [f"r{i}" for i in range(1000)]
    train, held_out = split(ids, 0.9, {})
    assert sorted(train + held_out) == sorted(ids)
    assert (len(train), len(held_out)) == (900, 100)
    assert sorted(split(ids[::-1], 0.9, {})[1]) == sorted(held_out)
    _, fewer = split(ids[:950], 0.9, {})
    assert len(set(fewer) - set(held_out)) <= 10


def test_N01_rows_of_one_conversation_stay_on_one_side_whatever_their_ids_are():
    of = {f"chat#{i}/{reply}": f"chat#{i}" for i in range(24) for reply in (1, 2, 3)}
    train, held_out = split(list(of), 0.7, of)
    assert held_out
    assert not {of[row_id] for row_id in train} & {of[row_id] for row_id in held_out}
    # Without a record of conversations no id is taken apart: `#` and `/` are letters.
    train, held_out = split(list(of), 0.7, {})
    assert len(held_out) == round(0.3 * len(of))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_neither_side_of_a_split_is_empty(count):
    for start in range(20):
        train, held_out = split([f"{start}-{i}" for i in range(count)], 0.95, {})
        assert train
        assert held_out


def test_without_a_validation_share_all_rows_are_trained_on():
    assert split(["a", "b"], 1.0, {}) == (["a", "b"], [])
    assert split(["a"], 0.5, {}) == (["a"], [])
    assert split([], 0.5, {}) == ([], [])


def test_a_limit_keeps_the_same_rows_when_more_are_added():
    ids = [f"r{i}" for i in range(100)]
    kept = first_by_hash(ids, 10)
    assert len(kept) == 10
    assert set(first_by_hash(ids[:50], 10)) - set(kept) <= set(ids[:50])
    assert first_by_hash(ids, None) == first_by_hash(ids, 500) == ids


def test_seeds_are_the_same_on_every_machine():
    assert seed_of("cod", 42, 0, "row-7") == seed_of("cod", 42, 0, "row-7") != seed_of("cod", 42, 0, "row-8")
    assert 0 <= seed_of("x") < 2**63
