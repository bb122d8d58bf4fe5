"""What is refused before it is stored."""

import dataclasses

import pytest
import torch

from peagle.hidden_states.extract import to_stored
from peagle.hidden_states.proof import choice_fault
from peagle.hidden_states.proof import row_fault as fault
from peagle.hidden_states.store import StoreSpec
from peagle.verifier.source import RowStates
from peagle.verifier.weights import VerifierHead
from tests import fakes

SPEC = StoreSpec(
    verifier="verifier",
    verifier_fingerprint="",
    model_type="qwen3",
    num_layers=8,
    hidden_size=8,
    vocab_size=272,
    aux_layer_ids=(2, 4, 5),
    dtype="float32",
    tokenizer_sha256="",
)
ROW = fakes.random_row("row-0", 10, 3, 200, 0)


def states(**changes):
    generator = torch.Generator().manual_seed(0)
    whole = RowStates(
        row_id=ROW.row_id,
        input_ids=ROW.input_ids,
        aux_states=torch.randn(10, 24, generator=generator),
        last_states=torch.randn(10, 8, generator=generator),
        choice_pos=[],
        choice_ids=[],
    )
    return dataclasses.replace(whole, **changes)


def test_a_sound_row_has_no_fault():
    assert fault(states(), ROW, SPEC) is None


def test_H01_fewer_state_rows_than_tokens_are_refused():
    short = states(aux_states=torch.zeros(10 - 3, 24))
    assert fault(short, ROW, SPEC) == "aux_states have shape [7, 24], expected [10, 24]"
    assert "last_states have shape [7, 8]" in fault(states(last_states=torch.zeros(7, 8)), ROW, SPEC)


def test_H19_other_token_ids_are_refused_with_the_first_index_that_differs():
    ids = list(ROW.input_ids)
    assert fault(states(input_ids=[1, *ids]), ROW, SPEC).endswith("first at index 0")
    assert fault(states(input_ids=[*ids[:4], 999, *ids[5:]]), ROW, SPEC).endswith("first at index 4")
    assert fault(states(input_ids=ids[:6]), ROW, SPEC).endswith("first at index 6")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_H06_nan_and_infinity_are_refused_with_their_position(value):
    for name in ("aux_states", "last_states"):
        broken = states()
        getattr(broken, name)[6, 1] = value
        assert fault(broken, ROW, SPEC) == f"{name} hold NaN or infinity, first at position 6"


def test_H06_states_that_overflow_the_stored_dtype_are_refused():
    half = dataclasses.replace(SPEC, dtype="float16")
    large = states()
    large.aux_states[2, 2] = 1e6
    assert fault(large, ROW, SPEC) is None
    assert "NaN or infinity" in fault(large, ROW, half)


def head_and_choices():
    generator = torch.Generator().manual_seed(1)
    head = VerifierHead(
        norm_weight=torch.rand(8, generator=generator) + 0.5,
        norm_eps=1e-6,
        weight=torch.randn(40, 8, generator=generator),
        logit_scale=1.0,
        logit_softcap=None,
    )
    found = dataclasses.replace(states(), last_states=torch.randn(200, 8, generator=generator))
    positions = list(range(3, 199))
    ids = head.logits(head.normed(found.last_states[positions])).argmax(-1).tolist()
    return head, dataclasses.replace(found, choice_pos=positions, choice_ids=ids)


def test_the_verifiers_own_choices_pass_and_another_choice_is_named():
    head, found = head_and_choices()
    assert choice_fault(found, head, torch.float32, None) is None
    wrong = [*found.choice_ids]
    wrong[2] = (wrong[2] + 1) % 40
    message = choice_fault(dataclasses.replace(found, choice_ids=wrong), head, torch.float32, None)
    assert f"after position {found.choice_pos[2]}" in message


def test_H16_states_that_were_normed_already_fail_the_check():
    head, found = head_and_choices()
    strong = dataclasses.replace(head, norm_weight=torch.tensor([9.0, 0.1, 5.0, 0.1, 7.0, 0.1, 3.0, 0.1]))
    ids = strong.logits(strong.normed(found.last_states[found.choice_pos])).argmax(-1).tolist()
    found = dataclasses.replace(found, choice_ids=ids)
    assert choice_fault(found, strong, torch.float32, None) is None
    twice = dataclasses.replace(found, last_states=strong.normed(found.last_states))
    assert choice_fault(twice, strong, torch.float32, None) is not None
    shifted = dataclasses.replace(found, last_states=found.last_states.roll(1, 0))
    assert choice_fault(shifted, strong, torch.float32, None) is not None


def test_a_near_tie_within_the_dtypes_rounding_is_no_fault():
    head = VerifierHead(
        norm_weight=torch.ones(2),
        norm_eps=0.0,
        weight=torch.tensor([[1.0, 0.0], [1.0, 1e-4], [-1.0, 0.0]]),
        logit_scale=1.0,
        logit_softcap=None,
    )
    last = torch.zeros(10, 2)
    last[:] = torch.tensor([1.0, 1.0])
    tie = states(last_states=last, choice_pos=[4], choice_ids=[0])
    assert choice_fault(tie, head, torch.float32, None) is None
    assert choice_fault(dataclasses.replace(tie, choice_ids=[2]), head, torch.float32, None) is not None


def test_only_label_positions_keep_their_last_state():
    found = states()
    stored = to_stored(found, ROW, torch.bfloat16)
    assert stored.label_pos.tolist() == ROW.label_positions()
    assert torch.equal(stored.last_states, found.last_states[stored.label_pos].bfloat16())
    assert torch.equal(stored.aux_states, found.aux_states.bfloat16())
