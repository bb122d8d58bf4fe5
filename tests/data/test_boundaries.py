"""Token boundaries of rendered text: the short proof agrees with tokenizing every prefix."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.data.boundaries import AddedTokens, Boundaries
from tests.data.toys import CHATML, FAMILIES, family_tokenizer, toy_tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<think>"]
WORDS = ["assistant", "user", "\n", "\n\n", " ", "hello world", ".", "👩‍👩‍👧", "42", "<", "漢"]
PIECES = MARKS + WORDS
TOKENIZER = toy_tokenizer(CHATML)


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.data())
def test_the_short_proof_agrees_with_tokenizing_the_prefix(pieces, data):
    text = "".join(pieces)
    place = data.draw(st.integers(0, len(text)))
    ids = encode(text)
    prefix = encode(text[:place])
    expected = len(prefix) if ids[: len(prefix)] == prefix else None
    bounds = Boundaries(text, ids, AddedTokens.of(TOKENIZER), encode, {})
    found = bounds.at(place)
    if found is None:  # an added token that is cut in two is no boundary, whatever its letters spell
        assert expected is None or any(
            text.startswith(mark, start) and start < place < start + len(mark)
            for mark in MARKS
            for start in range(len(text))
        )
    else:
        assert found == expected


@pytest.mark.parametrize("name", list(FAMILIES))
def test_headers_are_tokenized_once_for_all_texts(name):
    tokenizer = family_tokenizer(name)
    calls: list[str] = []

    def counted(text: str) -> list[int]:
        calls.append(text)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    added, pieces = AddedTokens.of(tokenizer), {}
    for number in range(5):
        turns = [{"role": "user", "content": f"hello {number}"}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        text = prompt + "reply"
        bounds = Boundaries(text, tokenizer(text, add_special_tokens=False)["input_ids"], added, counted, pieces)
        assert bounds.at(len(prompt)) is not None
    assert len(calls) == 1


def test_a_token_across_the_boundary_is_seen():
    text = "<|im_start|>assistant\n\nhello"
    bounds = Boundaries(text, encode(text), AddedTokens.of(TOKENIZER), encode, {})
    assert bounds.at(len("<|im_start|>assistant\n")) is None
    assert bounds.at(len("<|im_start|>assistant\n\n")) is not None


def test_a_turn_ends_with_its_end_token_or_its_last_letter():
    added = AddedTokens.of(TOKENIZER)
    for text, end in (
        ("<|im_start|>hello<|im_end|>\n", "<|im_start|>hello<|im_end|>"),
        ("<|im_start|>hello\n\n", "<|im_start|>hello"),
        ("<|im_start|>a<|im_end|>b \n", "<|im_start|>a<|im_end|>b"),
        ("<|im_start|>hello</think>\n", "<|im_start|>hello</think>"),
    ):
        bounds = Boundaries(text, encode(text), added, encode, {})
        assert bounds.end_of_turn(len("<|im_start|>"), len(text)) == len(encode(end)), text


def test_a_tokenizer_without_added_tokens_is_proved_by_whole_prefixes():
    text = "assistant: hello world"
    bounds = Boundaries(text, encode(text), AddedTokens(None, frozenset(), frozenset()), encode, {})
    assert bounds.at(len("assistant:")) == len(encode("assistant:"))
    assert bounds.at(len("assistant: hel")) is None
