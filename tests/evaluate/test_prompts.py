import json

import pytest

from peagle.data.records import TokenRow
from peagle.data.tokenizer import load_tokenizer
from peagle.errors import CheckpointError, ConfigError, DataError
from peagle.evaluate.config import EvaluateConfig
from peagle.evaluate.prompts import check_pair, in_turn, read_items, replies, reply_spans, token_difference
from peagle.verifier.model_config import load_verifier_config
from tests.engine.helpers import random_drafter
from tests.fakes import byte_tokenizer, tiny_model, tiny_verifier, word_tokenizer


def config(**values) -> EvaluateConfig:
    return EvaluateConfig.build({"checkpoint": "c", "data": ["x.jsonl"], **values})


def test_each_reply_with_something_before_it_is_an_item():
    row = TokenRow(
        row_id="r",
        source="s",
        input_ids=list(range(10)),
        loss_mask=[0, 0, 1, 1, 0, 1, 1, 1, 0, 0],
        next_is_supervised=False,
        tail_length=2,
    )
    first, second = replies(row, config())
    assert (first.prompt_ids, first.recorded_ids, first.tail_ids, first.limit) == ([0, 1], [2, 3], [], 2)
    assert (second.prompt_ids, second.recorded_ids, second.tail_ids) == ([0, 1, 2, 3, 4], [5, 6, 7], [8, 9])
    assert reply_spans([1, 1, 0]) == [(0, 2)]
    assert (
        replies(
            TokenRow(
                row_id="r", source="s", input_ids=[1, 2], loss_mask=[1, 1], next_is_supervised=False, tail_length=0
            ),
            config(),
        )
        == []
    )


def test_what_a_limit_cuts_off_is_the_tail():
    row = TokenRow(
        row_id="r",
        source="s",
        input_ids=list(range(8)),
        loss_mask=[0, 0, 1, 1, 1, 1, 0, 0],
        next_is_supervised=False,
        tail_length=2,
    )
    (item,) = replies(row, config(max_new_tokens=3))
    assert (item.recorded_ids, item.tail_ids, item.limit) == ([2, 3, 4], [5, 6, 7], 3)
    (item,) = replies(row, config(max_new_tokens=9))
    assert (item.recorded_ids, item.tail_ids, item.limit) == ([2, 3, 4, 5], [6, 7], 9)


def test_data_sets_take_turns():
    assert in_turn(["a", "a", "b", "a", "b"]) == [0, 2, 1, 4, 3]


def test_prompts_come_from_conversations_and_from_rows_on_record(tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"id": "t", "input_ids": [3, 4, 5, 6], "loss_mask": [0, 1, 1, 0], "tail_length": 1},
        {"messages": [{"role": "assistant", "content": "only me"}]},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    tokenizer = byte_tokenizer()
    found = read_items(config(data=[str(path)], max_new_tokens=7), tokenizer, 100)
    assert found.read == 3
    prompt, ready = found.items
    assert tokenizer.decode(prompt.prompt_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt.recorded_ids, prompt.limit, prompt.source) == (None, 7, "mixed")
    assert (ready.row_id, ready.prompt_ids, ready.recorded_ids, ready.tail_ids) == ("t", [3], [4, 5], [6])
    assert sum(found.dropped.values()) == 1


def test_a_prompt_beyond_the_verifiers_length_is_dropped_and_a_limit_is_shortened(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"input_ids": [3] * n, "loss_mask": [0] * (n - 4) + [1] * 4} for n in (8, 30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_items(config(data=[str(path)]), byte_tokenizer(), 6)
    (item,) = found.items
    assert (item.recorded_ids, item.tail_ids, item.limit) == ([3, 3], [3, 3], 2)
    assert "longer than the verifier takes" in found.dropped_text


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="either --data"):
        EvaluateConfig.build({"checkpoint": "c"})
    with pytest.raises(ConfigError, match="--data-path too"):
        EvaluateConfig.build({"checkpoint": "c", "data": ["x"], "hidden_states_path": "h"})
    with pytest.raises(ConfigError, match="needs no server"):
        EvaluateConfig.build({"checkpoint": "c", "data": ["x"], "mode": "replay", "endpoint": ["http://h"]})
    with pytest.raises(DataError, match="no such file"):
        read_items(config(data=["nothing.jsonl"]), byte_tokenizer(), 10)
    assert config(output="a/b.json").json_path.as_posix() == "a/b.json"
    assert config(output="a/b").json_path.as_posix() == "a/b/evaluation.json"


def test_E12_a_drafter_for_another_vocabulary_size_is_refused(tmp_path):
    verifier_config = load_verifier_config(str(tiny_verifier(tmp_path, vocab_size=160, num_layers=3)), False)
    drafter = random_drafter(tiny_model("qwen3", vocab_size=128, num_hidden_layers=3), verifier=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"vocabulary 128, .* has 160"):
        check_pair(drafter.config, verifier_config, word_tokenizer(160))


def test_E12_two_swapped_tokens_are_refused(tmp_path):
    folders = []
    for name in ("trained", "used"):
        tokenizer = word_tokenizer(128)
        folder = tiny_verifier(tmp_path / name, vocab_size=128, num_layers=3, tokenizer=tokenizer)
        folders.append(folder)
    path = folders[1] / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"w7": 7', '"w8": 7', 1).replace('"w8": 8', '"w7": 8', 1))
    assert path.read_text() != text
    verifier_config = load_verifier_config(str(folders[1]), False)
    drafter = random_drafter(tiny_model("qwen3", vocab_size=128, num_hidden_layers=3), verifier=str(folders[0]))
    with pytest.raises(CheckpointError, match="id 7 is 'w7' and 'w8'"):
        check_pair(drafter.config, verifier_config, load_tokenizer(str(folders[1]), False))


def test_a_verifier_that_moved_is_warned_about_and_its_own_folder_is_silent(tmp_path):
    folder = tiny_verifier(tmp_path, vocab_size=128, num_layers=3, tokenizer=word_tokenizer(128))
    verifier_config = load_verifier_config(str(folder), False)
    model = tiny_model("qwen3", vocab_size=128, num_hidden_layers=3)
    moved = random_drafter(model, verifier=str(tmp_path / "gone")).config
    assert "not compared" in check_pair(moved, verifier_config, word_tokenizer(128))
    assert check_pair(random_drafter(model, verifier=str(folder)).config, verifier_config, word_tokenizer(128)) is None
    wide = random_drafter(model, verifier=str(folder), aux_layer_ids=(1, 2, 7)).config
    with pytest.raises(CheckpointError, match="reads layer 7"):
        check_pair(wide, verifier_config, word_tokenizer(128))


def test_a_longer_vocabulary_is_a_difference():
    assert token_difference(word_tokenizer(5), word_tokenizer(5)) is None
    assert token_difference(word_tokenizer(5), word_tokenizer(6)) == "id 5 is None and 'w5'"
