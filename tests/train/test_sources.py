"""Claims about rows whose states are made while training goes on: order, window, refusals, the hybrid store."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from peagle.data.records import TokenRow
from peagle.errors import EndpointError, StoreError
from peagle.hidden_states.proof import StateProof
from peagle.hidden_states.store import StoreReader, StoreSpec
from peagle.layout.supervision import Extent
from peagle.train.batches import trim
from peagle.train.sources import RunStore, ServedRows, StateMaker
from peagle.verifier.source import RowRefused, RowStates

HIDDEN = 4
SPEC = StoreSpec(
    verifier="verifier",
    verifier_fingerprint="",
    model_type="llama",
    num_layers=4,
    hidden_size=HIDDEN,
    vocab_size=50,
    aux_layer_ids=(1, 2, 3),
    dtype="float32",
    tokenizer_sha256="",
)
ROWS = {
    f"r{i}": TokenRow(
        row_id=f"r{i}",
        source="s",
        input_ids=list(range(i, i + 6 + i)),
        loss_mask=[0, 0] + [1] * (4 + i),
        next_is_supervised=False,
        tail_length=0,
    )
    for i in range(12)
}
EXTENTS = {row_id: Extent(len(row.input_ids) - 1, len(row.input_ids) - 3) for row_id, row in ROWS.items()}


def made(row: TokenRow) -> RowStates:
    ids = torch.tensor(row.input_ids, dtype=torch.float32)[:, None]
    number = int(row.row_id[1:])  # in every state: no two rows have the same ones
    aux_states = ids + number / 64 + torch.arange(1, 3 * HIDDEN + 1)
    return RowStates(
        row_id=row.row_id,
        input_ids=row.input_ids,
        aux_states=aux_states,
        last_states=3 * aux_states[:, :HIDDEN],
        choice_pos=[],
        choice_ids=[],
    )


class Verifier:
    """Counts what is asked for and how much at once.

    Args:
        together: the first so many answers come only when so many are asked for at once.
        answers: by row id, an error or another answer than the right one.
    """

    def __init__(self, together: int = 0, answers=None) -> None:
        self.asked: list[str] = []
        self.most, self.now = 0, 0
        self.gate = threading.Barrier(together, timeout=20) if together else None
        self.lock, self.answers = threading.Lock(), answers or {}

    def __call__(self, row: TokenRow) -> RowStates | RowRefused:
        with self.lock:
            self.asked.append(row.row_id)
            self.now += 1
            self.most = max(self.most, self.now)
            waits = self.gate is not None and len(self.asked) <= self.gate.parties
        if waits:
            self.gate.wait()
        with self.lock:
            self.now -= 1
        answer = self.answers.get(row.row_id, made)
        if isinstance(answer, Exception):
            raise answer
        return answer(row)

    def settled(self, count: int) -> list[str]:
        """What was asked for, once that is `count` rows and a moment has passed in which more could have come."""
        deadline_s = time.monotonic() + 20
        while len(self.asked) < count and time.monotonic() < deadline_s:
            time.sleep(0.005)
        time.sleep(0.05)
        return list(self.asked)


def maker(verifier: Verifier, skips: bool = False, store: RunStore | None = None) -> StateMaker:
    proof = StateProof(spec=SPEC, head=None, again=None, is_quantised=False, checks_all=False)
    return StateMaker(
        fetch=verifier, row_of=ROWS.__getitem__, spec=SPEC, proof=proof, num_threads=4, skips=skips, store=store
    )


def test_announced_rows_are_asked_for_ahead_several_at_once_and_each_once():
    verifier = Verifier(4)
    rows = ServedRows(maker(verifier), EXTENTS, 1000)
    rows.expect(list(ROWS))
    for row_id in ROWS:
        assert rows.read(row_id).row == ROWS[row_id]
    assert sorted(verifier.asked) == sorted(ROWS)
    assert verifier.most == 4


def test_no_more_than_the_window_is_held():
    verifier = Verifier()
    rows = ServedRows(maker(verifier), EXTENTS, 20)
    rows.expect(list(ROWS))
    assert sorted(verifier.settled(3)) == ["r0", "r1", "r2"]  # 5 + 6 + 7 tokens, and 8 more would be 26
    rows.read("r0")
    assert len(verifier.settled(3)) == 3  # 21
    rows.read("r1")
    assert verifier.settled(4)[3:] == ["r3"]


def test_a_row_longer_than_the_window_is_let_through_alone():
    verifier = Verifier()
    rows = ServedRows(maker(verifier), EXTENTS, 1)
    rows.expect(["r5", "r6"])
    assert rows.read("r5").row == ROWS["r5"]
    assert rows.read("r6").row == ROWS["r6"]


def test_a_row_that_was_not_announced_or_is_out_of_order_comes_all_the_same():
    verifier = Verifier()
    rows = ServedRows(maker(verifier), EXTENTS, 6)
    assert rows.read("r3").row == ROWS["r3"]
    rows.expect(["r0", "r1", "r2"])
    assert rows.read("r2").row == ROWS["r2"]
    assert rows.read("r0").row == ROWS["r0"]
    assert rows.read("r1").row == ROWS["r1"]
    assert sorted(verifier.asked) == ["r0", "r1", "r2", "r3"]


def test_a_row_of_two_epochs_is_asked_for_twice():
    verifier = Verifier()
    rows = ServedRows(maker(verifier), EXTENTS, 1000)
    rows.expect(["r0", "r1", "r1", "r0"])
    for row_id in ("r0", "r1", "r1", "r0"):
        rows.read(row_id)
    assert sorted(verifier.asked) == ["r0", "r0", "r1", "r1"]


def test_a_dead_verifier_stops_the_reader_of_its_row_and_no_earlier_one():
    verifier = Verifier(answers={"r2": EndpointError("gone for 300 s")})
    rows = ServedRows(maker(verifier), EXTENTS, 1000)
    rows.expect(["r0", "r1", "r2"])
    rows.read("r0")
    rows.read("r1")
    with pytest.raises(EndpointError, match="gone for 300 s"):
        rows.read("r2")


def test_a_refused_row_stops_the_run_or_is_passed_over_without_adding_to_any_loss():
    refusal = {"r1": lambda row: RowRefused(row.row_id, "refused by the server", "status 400")}
    with pytest.raises(StoreError, match=r"row r1: refused by the server \(status 400\); --on-missing skip"):
        maker(Verifier(answers=refusal)).make("r1")
    skipping = maker(Verifier(answers=refusal), skips=True)
    stand_in = trim(skipping.make("r1"))
    assert not any(stand_in.row.loss_mask)
    assert stand_in.last_states.shape == (0, HIDDEN)
    assert skipping.refused == {"r1": "refused by the server (status 400)"}


def test_states_of_other_ids_or_not_finite_are_refused():
    wrong = {
        "r0": lambda row: replace(made(row), input_ids=row.input_ids[::-1]),
        "r1": lambda row: replace(made(row), aux_states=torch.full((7, 12), torch.nan)),
    }
    with pytest.raises(StoreError, match="other token ids, first at index 0"):
        maker(Verifier(answers=wrong)).make("r0")
    with pytest.raises(StoreError, match="NaN or infinity"):
        maker(Verifier(answers=wrong)).make("r1")


def test_hybrid_asks_once_for_each_row_and_fills_a_store_that_can_be_read_and_gone_on_with(tmp_path):
    verifier = Verifier()
    stored = RunStore(tmp_path, SPEC, fills=True)
    rows = ServedRows(maker(verifier, store=stored), EXTENTS, 1000)
    first = {}
    order = [row_id for row_id in ROWS if row_id != "r11"]
    rows.expect(order)
    for row_id in order:
        first[row_id] = rows.read(row_id)
    rows.expect(order[::-1])
    for row_id in order[::-1]:
        again = rows.read(row_id)
        assert again.row == first[row_id].row
        assert torch.equal(again.aux_states, first[row_id].aux_states)
        assert torch.equal(again.last_states, first[row_id].last_states)
    assert sorted(verifier.asked) == sorted(order)
    stored.close(ROWS)
    assert not StoreReader.open(tmp_path).is_complete

    later = RunStore(tmp_path, SPEC, fills=True)
    resumed = ServedRows(maker(verifier, store=later), EXTENTS, 1000)
    for row_id in ROWS:
        resumed.read(row_id)
    assert verifier.asked[len(order) :] == ["r11"]
    later.close(ROWS)
    store = StoreReader.open(tmp_path)
    assert store.is_complete
    assert set(store.row_ids) == set(ROWS)


def test_generate_reads_the_store_and_leaves_it_alone(tmp_path):
    filling = RunStore(tmp_path, SPEC, fills=True)
    maker(Verifier(), store=filling).make("r0")
    filling.close([])
    verifier = Verifier()
    rows = ServedRows(maker(verifier, store=RunStore(tmp_path, SPEC, fills=False)), EXTENTS, 1000)
    for row_id in ("r0", "r1", "r1"):
        rows.read(row_id)
    assert verifier.asked == ["r1", "r1"]
    assert StoreReader.open(tmp_path).row_ids == ["r0"]
