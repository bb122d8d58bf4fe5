"""The mask token's id."""

import pytest

from peagle.errors import VerifierError
from peagle.verifier.special_tokens import resolve_mask_token
from tests import fakes


def test_T01_spare_rows_are_preferred_to_pad_and_eos():
    tokenizer = fakes.word_tokenizer(100, eos_token="w0", pad_token="w0")
    chosen = resolve_mask_token(tokenizer, 104, None, ())
    assert chosen.id in range(100, 104)
    assert chosen.warning is None


def test_T01_without_spare_rows_pad_stands_in_with_a_warning_that_says_so():
    tokenizer = fakes.word_tokenizer(100, eos_token="w0", pad_token="w0")
    chosen = resolve_mask_token(tokenizer, 100, None, ())
    assert (chosen.id, chosen.how) == (0, "pad token")
    assert "fills all 100 rows" in chosen.warning
    assert "--mask-token-id" in chosen.warning


def test_T01_with_nothing_left_the_error_names_the_options():
    with pytest.raises(VerifierError, match=r"no mask, pad, eos or unk token. Set --mask-token-id"):
        resolve_mask_token(fakes.word_tokenizer(100), 100, None, ())


@pytest.mark.parametrize("role", ["pad", "eos", "unk"])
def test_the_fallbacks_are_tried_in_order(role):
    order = ["pad", "eos", "unk"]
    given = {f"{name}_token": f"w{i + 1}" for i, name in enumerate(order) if i >= order.index(role)}
    chosen = resolve_mask_token(fakes.word_tokenizer(50, **given), 50, None, ())
    assert chosen.how == f"{role} token"


def test_T03_the_id_is_a_row_of_the_embedding_which_is_never_resized():
    assert resolve_mask_token(fakes.word_tokenizer(100), 128, None, ()).id in range(100, 128)
    with pytest.raises(VerifierError, match="all 128 rows of the verifier's embedding, which is not resized"):
        resolve_mask_token(fakes.word_tokenizer(128), 128, None, ())


def test_T03_a_tokenizers_mask_token_beyond_the_embedding_is_not_used():
    tokenizer = fakes.word_tokenizer(100, pad_token="w0")
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert tokenizer.mask_token_id == 100
    assert resolve_mask_token(tokenizer, 101, None, ()).how == "tokenizer's mask token"
    assert resolve_mask_token(tokenizer, 100, None, ()).how == "pad token"


def test_an_unused_row_is_one_that_neither_the_tokenizer_nor_the_data_has():
    assert resolve_mask_token(fakes.word_tokenizer(100), 128, None, {100, 101}).id == 102


def test_the_first_row_behind_the_tokenizer_is_taken_as_for_qwen3():
    assert resolve_mask_token(fakes.byte_tokenizer(), 272, None, ()).id == fakes.BYTE_VOCABULARY


def test_a_named_mask_token_of_the_tokenizer_is_used():
    tokenizer = fakes.word_tokenizer(100)
    tokenizer.add_tokens(["<|MASK|>"])
    assert resolve_mask_token(tokenizer, 128, None, ()).id == 100


def test_the_flag_wins_and_is_checked():
    tokenizer = fakes.word_tokenizer(100, eos_token="w7")
    assert resolve_mask_token(tokenizer, 128, 120, ()) == (resolve_mask_token(tokenizer, 128, 120, {5}))
    assert "eos token" in resolve_mask_token(tokenizer, 128, 7, ()).warning
    assert "occurs in the data" in resolve_mask_token(tokenizer, 128, 5, {5}).warning
    for bad in (128, -1):
        with pytest.raises(VerifierError, match="is no row of the verifier's embedding, which has 128"):
            resolve_mask_token(tokenizer, 128, bad, ())
