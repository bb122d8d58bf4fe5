"""The pruned draft vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.data.draft_vocab import build_vocab, must_keep_ids, vocab_of_ids
from peagle.errors import ConfigError
from tests.data.toys import CHATML, LLAMA3, toy_tokenizer


def counts(size: int, seen: dict[int, int]) -> torch.Tensor:
    found = torch.zeros(size, dtype=torch.int64)
    for token, number in seen.items():
        found[token] = number
    return found


def test_V01_fills_up_with_unseen_ids_to_the_asked_size():
    seen = {2 * i: 5 + i for i in range(60)}
    frequencies = counts(128, seen)
    vocab = build_vocab(frequencies, 100, (), 128)
    assert len(vocab.ids.unique()) == 100 == vocab.size
    assert torch.equal(vocab.ids, vocab.ids.sort().values)
    assert set(seen) <= set(vocab.ids.tolist())
    assert int(vocab.t2d.sum()) == 100
    with pytest.raises(ConfigError, match="--draft-vocab-size 200: expected 1 to 128"):
        build_vocab(frequencies, 200, (), 128)
    whole = build_vocab(frequencies, 128, (), 128)
    assert whole.is_full
    assert not whole.d2t.any()
    assert torch.equal(whole.ids, torch.arange(128))


def test_V05_d2t_holds_offsets_and_t2d_marks_the_same_ids():
    vocab = vocab_of_ids([9, 2, 5], 12)
    assert vocab.ids.tolist() == [2, 5, 9]
    assert vocab.d2t.tolist() == [2, 4, 7]
    assert torch.nonzero(vocab.t2d).flatten().tolist() == [2, 5, 9]
    assert not vocab_of_ids(range(12), 12).d2t.any()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_the_kept_ids_are_the_most_frequent_and_everything_that_must_stay(numbers, data):
    frequencies = torch.tensor(numbers)
    size = len(numbers)
    keep = data.draw(st.sets(st.integers(0, size - 1), max_size=size))
    asked = data.draw(st.integers(max(1, len(keep)), size))
    vocab = build_vocab(frequencies, asked, keep, size)
    chosen = set(vocab.ids.tolist())
    assert len(chosen) == asked
    assert keep <= chosen
    free, out = chosen - keep, set(range(size)) - chosen
    assert all((numbers[a], -a) > (numbers[b], -b) for a in free for b in out)
    assert (torch.arange(asked) + vocab.d2t).tolist() == sorted(chosen) == torch.nonzero(vocab.t2d).flatten().tolist()
    left = sum(numbers[token] for token in out)
    assert vocab.mass_left_out(frequencies) == pytest.approx(left / sum(numbers) if sum(numbers) else 0.0)


def test_end_tokens_control_tokens_and_special_tokens_in_use_are_always_kept():
    specials = (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
        "<|x|>",
    )
    tokenizer = toy_tokenizer(LLAMA3, specials, "<|eot_id|>", "<|begin_of_text|>")
    begin, start, end, eot, python, unused = tokenizer.convert_tokens_to_ids(list(specials))
    frequencies = counts(len(tokenizer) + 10, {5: 100, python: 1})
    keep = must_keep_ids(tokenizer, [eot, 3], frequencies)
    assert set(keep) >= {3, start, end, eot, python}
    assert unused not in keep
    assert begin not in keep  # the template prints it by a variable, and no verifier generates it
    vocab = build_vocab(frequencies, len(keep) + 1, keep, len(frequencies))
    assert bool(vocab.t2d[list(keep)].all())
    assert bool(vocab.t2d[5])
    with pytest.raises(ConfigError, match="end and control tokens must be kept"):
        build_vocab(frequencies, len(keep) - 1, keep, len(frequencies))


def test_think_tags_are_kept_where_the_template_names_them():
    tokenizer = toy_tokenizer(CHATML + "{# <think> </think> #}")
    keep = must_keep_ids(tokenizer, [], counts(len(tokenizer), {}))
    assert set(tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|im_start|>", "<|im_end|>"])) <= set(keep)


def test_frequencies_of_another_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="count 100 ids, the verifier has 128"):
        build_vocab(torch.zeros(100, dtype=torch.int64), 10, (), 128)
    with pytest.raises(ConfigError, match="ids to keep"):
        build_vocab(torch.zeros(100, dtype=torch.int64), 10, (100,), 100)
