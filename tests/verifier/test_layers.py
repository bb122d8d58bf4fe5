"""Auxiliary layer ids."""

import pytest

from peagle.errors import VerifierError
from peagle.verifier.model_config import resolve_aux_layer_ids


def test_the_default_is_the_published_one():
    assert resolve_aux_layer_ids(36, None) == (2, 18, 33)
    assert resolve_aux_layer_ids(8, None) == (2, 4, 5)


@pytest.mark.parametrize("num_layers", range(1, 9))
def test_H18_shallow_verifiers_get_distinct_ids_in_range_or_a_message(num_layers):
    if num_layers < 7:
        with pytest.raises(VerifierError, match=f"verifier of {num_layers} layers.*--target-layer-ids"):
            resolve_aux_layer_ids(num_layers, None)
        return
    ids = resolve_aux_layer_ids(num_layers, None)
    assert list(ids) == sorted(set(ids))
    assert ids[0] >= 0
    assert ids[-1] <= num_layers


@pytest.mark.parametrize(
    ("asked", "message"), [((2, 2, 5), "given twice"), ((2, 4, 9), "9 does not exist"), ((-1,), "-1")]
)
def test_H18_users_lists_with_duplicates_or_out_of_range_are_refused(asked, message):
    with pytest.raises(VerifierError, match=message):
        resolve_aux_layer_ids(8, asked)


def test_H13_the_last_layer_is_a_valid_id_and_one_beyond_it_is_not():
    assert resolve_aux_layer_ids(8, (2, 4, 5, 8)) == (2, 4, 5, 8)
    with pytest.raises(VerifierError, match="9 does not exist"):
        resolve_aux_layer_ids(8, (2, 4, 5, 9))


def test_ids_in_any_order_come_out_ascending_as_states_are_laid_out():
    assert resolve_aux_layer_ids(8, (5, 2, 4)) == (2, 4, 5)
