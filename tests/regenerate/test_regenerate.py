"""`peagle regenerate`: the verifier's own answers, each once, resumable, ready for `prepare`."""

import json
import logging
import random

import pytest

from peagle.cli.main import main
from peagle.data.config import PrepareConfig
from peagle.data.prepare import prepare
from peagle.data.prepared import load_prepared
from peagle.engine import Engine, Request, Sampling
from peagle.errors import ConfigError, DataError, EndpointError
from peagle.regenerate import run as regenerate_module
from peagle.regenerate.config import RegenerateConfig
from peagle.regenerate.run import regenerate, reply_text
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.source import Generation, RowAnswer, RowRefused
from tests import fakes

PROMPTS = [f"question {'x' * n} number {n}" for n in (1, 9, 4, 7, 2, 12, 3, 8)]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifier")
    return fakes.tiny_verifier(folder, "qwen3", num_layers=2, tie_word_embeddings=False, max_position_embeddings=256)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prompt_file(path, prompts=PROMPTS):
    return write(path, [{"messages": [{"role": "user", "content": text}]} for text in prompts])


def config(verifier, data, output, **changes):
    values = {"max_new_tokens": 8, "batch_size": 4, **changes}
    return RegenerateConfig(model=str(verifier), data=(str(data),), output=output, **values)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class FakeAnswers:
    """Answers with the prompt's length, or fails."""

    max_tokens = 10_000

    def __init__(self, fail_after=None, refuse=()):
        self.fail_after, self.refuse = fail_after, refuse
        self.asked = []

    def answers(self, prompts, wanted):
        for prompt in prompts:
            if prompt.row_id not in wanted:
                continue
            if len(self.asked) == self.fail_after:
                raise EndpointError("the server is gone")
            self.asked.append(prompt.row_id)
            if len(self.asked) in self.refuse:
                yield RowRefused(prompt.row_id, "the server answered 400", "too odd")
            else:
                yield RowAnswer(prompt.row_id, Generation([5 + len(prompt.input_ids) % 7, 9, 2], "stop", []))

    def close(self):
        pass


@pytest.fixture
def use_answers(monkeypatch):
    def use(**how):
        source = FakeAnswers(**how)
        monkeypatch.setattr(regenerate_module, "_open", lambda *arguments: source)
        return source

    return use


def test_answers_are_the_verifiers_greedy_ones_with_their_prompts(tmp_path, verifier):
    output = tmp_path / "answers.jsonl"
    assert regenerate(config(verifier, prompt_file(tmp_path / "p.jsonl"), output)) == 0
    records = read(output)
    tokenizer = fakes.byte_tokenizer()
    model = TransformersVerifier(load_verifier_config(str(verifier), False), "float32", "cpu").model
    engine = Engine(model, None, 0, [2], Sampling(), 1)
    assert [record["messages"][0]["content"] for record in records] == PROMPTS
    for record in records[:3]:
        prompt = tokenizer.apply_chat_template(
            record["messages"][:1], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        (alone,) = engine.generate([Request(prompt, 8)])
        assert record["input_ids"] == prompt + alone.ids
        assert record["loss_mask"] == [0] * len(prompt) + [1] * len(alone.ids)
        assert record["finish_reason"] == alone.finish_reason
        assert record["messages"][1]["role"] == "assistant"


def test_prepare_takes_the_output_as_it_is_and_what_the_limit_cut_is_marked(tmp_path, verifier):
    output = tmp_path / "answers.jsonl"
    regenerate(config(verifier, prompt_file(tmp_path / "p.jsonl"), output, tail_tokens=3))
    records = {record["id"]: record for record in read(output)}
    assert {record["tail_length"] for record in records.values()} == {3}
    prepare(PrepareConfig(model=str(verifier), data=(str(output),), output=tmp_path / "p", num_preprocessing_workers=1))
    prepared = load_prepared(tmp_path / "p")
    assert len(prepared) == len(PROMPTS)
    for row in (prepared.row(i) for i in range(len(prepared))):
        record = records[row.row_id]
        assert (row.input_ids, row.loss_mask, row.tail_length) == (record["input_ids"], record["loss_mask"], 3)
        assert sum(row.loss_mask[-3:]) == 0
    regenerate(config(verifier, tmp_path / "p.jsonl", tmp_path / "no-tail.jsonl"))
    for record in read(tmp_path / "no-tail.jsonl"):
        assert record["next_is_supervised"] == (record["finish_reason"] == "length")
    assert any(record["finish_reason"] == "length" for record in records.values())


def test_H11_stopped_shuffled_and_resumed_gives_every_row_once(tmp_path, verifier, use_answers):
    prompts = [*PROMPTS, "twice", "twice"]
    data, output = tmp_path / "p.jsonl", tmp_path / "answers.jsonl"
    use_answers(fail_after=6)
    with pytest.raises(EndpointError):
        regenerate(config(verifier, prompt_file(data, prompts), output))
    assert len(read(output)) == 6
    random.Random(0).shuffle(prompts)
    again = use_answers()
    assert regenerate(config(verifier, prompt_file(data, prompts), output)) == 0
    records = read(output)
    assert len(again.asked) == 4
    assert len({record["id"] for record in records}) == len(records) == 10
    assert sorted(record["messages"][0]["content"] for record in records) == sorted(prompts)
    whole = tmp_path / "whole.jsonl"
    regenerate(config(verifier, data, whole))
    assert whole.read_text() == output.read_text()


def test_H11_a_refused_row_is_listed_and_tried_again_by_the_next_run(tmp_path, verifier, use_answers, caplog):
    data, output = prompt_file(tmp_path / "p.jsonl"), tmp_path / "answers.jsonl"
    use_answers(refuse=(3,))
    with caplog.at_level(logging.INFO, "peagle"):
        regenerate(config(verifier, data, output))
    assert len(read(output)) == len(PROMPTS) - 1
    (rejected,) = read(tmp_path / "answers.run" / "rejected.jsonl")
    assert rejected["reason"] == "the server answered 400"
    assert "dropped 1 (1 the server answered 400)" in caplog.text
    again = use_answers()
    regenerate(config(verifier, data, output))
    assert again.asked == [rejected["id"]]
    assert [record["messages"][0]["content"] for record in read(output)] == PROMPTS


def test_a_last_line_cut_by_a_kill_is_made_again_and_a_broken_one_is_refused(tmp_path, verifier, use_answers):
    data, output = prompt_file(tmp_path / "p.jsonl"), tmp_path / "answers.jsonl"
    use_answers()
    regenerate(config(verifier, data, output))
    whole = output.read_text()
    lines = whole.splitlines()
    output.write_text("\n".join(lines[:5]) + "\n" + lines[5][:40])
    again = use_answers()
    regenerate(config(verifier, data, output))
    assert len(again.asked) == 3
    assert output.read_text() == whole
    output.write_text("\n".join([lines[0], "{broken", *lines[1:]]))
    with pytest.raises(DataError, match=r"answers.jsonl:2: not an answer"):
        regenerate(config(verifier, data, output))


def test_answers_made_otherwise_are_not_mixed(tmp_path, verifier, use_answers):
    data, output = prompt_file(tmp_path / "p.jsonl"), tmp_path / "answers.jsonl"
    use_answers()
    regenerate(config(verifier, data, output))
    with pytest.raises(DataError, match=r"holds answers made otherwise \(differs: temperature\).*--overwrite"):
        regenerate(config(verifier, data, output, temperature=0.7))
    again = use_answers()
    assert regenerate(config(verifier, data, output, temperature=0.7, overwrite=True)) == 0
    assert len(again.asked) == len(PROMPTS)
    write(tmp_path / "mine.jsonl", [{"precious": 1}])
    with pytest.raises(DataError, match="not an output of `peagle regenerate`"):
        regenerate(config(verifier, data, tmp_path / "mine.jsonl"))
    assert read(tmp_path / "mine.jsonl") == [{"precious": 1}]


def test_each_user_turn_is_answered_with_the_answers_before_it_in_the_history(tmp_path, verifier, use_answers):
    turns = ["first", "second", "third"]
    messages = []
    for text in turns:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "not the verifier's"}]
    data = write(tmp_path / "p.jsonl", [{"messages": messages}, {"messages": messages[:1]}])
    use_answers()
    regenerate(config(verifier, data, tmp_path / "a.jsonl"))
    records = read(tmp_path / "a.jsonl")
    assert [len(record["messages"]) for record in records] == [2, 4, 6, 2]
    assert [record["id"].rpartition("/")[2] for record in records[:3]] == ["1", "2", "3"]
    assert "not the verifier's" not in (tmp_path / "a.jsonl").read_text()
    for record in records:
        assert record["loss_mask"] == [0] * (len(record["input_ids"]) - 3) + [1] * 3
    regenerate(config(verifier, data, tmp_path / "b.jsonl", max_turns=1))
    assert read(tmp_path / "b.jsonl") == [records[0], records[3]]


def test_turns_behind_an_answer_that_was_cut_are_left_out_and_counted(tmp_path, verifier, caplog):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    data = write(tmp_path / "p.jsonl", [{"messages": messages}])
    with caplog.at_level(logging.INFO, "peagle"):
        regenerate(config(verifier, data, tmp_path / "a.jsonl", max_new_tokens=1))
    assert len(read(tmp_path / "a.jsonl")) == 1
    assert "later turns left out" in caplog.text


def test_H20_prompts_that_leave_no_room_are_named_with_their_length(tmp_path, verifier, caplog):
    shortest = len(
        fakes.byte_tokenizer().apply_chat_template(
            [{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )
    prompts = ["x" * (n - shortest) for n in (100, 255, 256, 300)]
    with caplog.at_level(logging.WARNING, "peagle"):
        regenerate(config(verifier, prompt_file(tmp_path / "p.jsonl", prompts), tmp_path / "a.jsonl", max_new_tokens=1))
    assert [len(record["input_ids"]) for record in read(tmp_path / "a.jsonl")] == [101, 256]
    assert "has 256 tokens" in caplog.text
    assert "has 300 tokens" in caplog.text


def test_sampled_answers_depend_on_seed_and_row_not_on_batches(tmp_path, verifier):
    data = prompt_file(tmp_path / "p.jsonl")
    how = {"temperature": 1.0, "top_p": 0.95, "seed": 3}
    regenerate(config(verifier, data, tmp_path / "a.jsonl", **how, batch_size=1))
    regenerate(config(verifier, data, tmp_path / "b.jsonl", **how, batch_size=8))
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "b.jsonl")
    regenerate(config(verifier, data, tmp_path / "c.jsonl", **{**how, "seed": 4}))
    assert read(tmp_path / "a.jsonl") != read(tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty|no prompt"),
        ('{"messages": [{"role": "system", "content": "x"}]}\n', "no prompt"),
        ("{broken\n", "no prompt"),
    ],
)
def test_data_without_a_prompt_fails_in_one_line(tmp_path, verifier, content, message):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        regenerate(config(verifier, tmp_path / "p.jsonl", tmp_path / "a.jsonl"))
    assert "\n" not in str(caught.value)


def test_the_command_line_takes_users_words_and_refuses_wrong_ones(tmp_path, verifier, use_answers, capsys):
    data = str(prompt_file(tmp_path / "p.jsonl"))
    use_answers()
    arguments = ["regenerate", "--model", str(verifier), "--data", data, "--output", str(tmp_path / "a.jsonl")]
    assert main([*arguments, "--limit", "3", "--max-tokens", "8"]) == 0
    assert len(read(tmp_path / "a.jsonl")) == 3
    assert main([*arguments[:-1], str(tmp_path / "a.txt")]) == 2
    assert "--output: expected a file name ending in .jsonl" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="top-p"):
        RegenerateConfig.build({"model": "m", "data": ["d"], "output": "a.jsonl", "top_p": 1.5})


def test_a_verifier_without_a_chat_template_is_refused_before_it_loads(tmp_path, monkeypatch):
    folder = fakes.tiny_verifier(tmp_path / "v", "llama", num_layers=2, tokenizer=fakes.byte_tokenizer(None))
    monkeypatch.setattr(regenerate_module, "_open", lambda *arguments: pytest.fail("the verifier was loaded"))
    data = prompt_file(tmp_path / "p.jsonl")
    with pytest.raises(Exception, match="no chat template"):
        regenerate(config(folder, data, tmp_path / "a.jsonl"))
    use = RegenerateConfig(
        model=str(folder), data=(str(data),), output=tmp_path / "a.jsonl", chat_template=tmp_path / "none.jinja"
    )
    with pytest.raises(ConfigError, match="--chat-template"):
        regenerate(use)


def test_a_harmony_answers_text_is_its_final_channel():
    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four."
            return text if not skip_special_tokens else "analysishmassistantfinalFour."

    assert reply_text(Tokenizer(), [1, 2, 3], (3,)) == "Four."
    assert reply_text(fakes.byte_tokenizer(), [*fakes.byte_tokenizer().encode("yes"), 2], (2,)) == "yes"
