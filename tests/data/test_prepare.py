"""The stage as users run it: outputs, repeats, limits, and one line for each mistake."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest

from peagle.cli.main import main
from peagle.data.prepare import ordered_map
from peagle.data.prepared import load_prepared
from peagle.errors import DataError, TemplateError
from tests.data.toys import (
    CHATML,
    GEMMA,
    QWEN3,
    chat,
    family_tokenizer,
    model_folder,
    prepare,
    rejected,
    supervised,
    toy_tokenizer,
    write_lines,
)


def rows_of(folder):
    prepared = load_prepared(folder)
    return [prepared.row(i) for i in range(len(prepared))]


def many(number, seed=0):
    rng = random.Random(seed)
    words = ["hello", "world", "what", "is", "the", "answer", "think", "that", "we", "can", "do", "it", "now"]

    def text():
        return " ".join(rng.choices(words, k=rng.randint(1, 12)))

    rows = [chat(*(text() for _ in range(2 * rng.randint(1, 3)))) for _ in range(number)]
    for place in range(0, number, 17):
        rows[place] = rng.choice([{"prompt": "only"}, {"messages": "no"}, {"conversations": [1]}])
    return rows


def test_the_output_is_an_arrow_dataset_with_everything_beside_it(chatml, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [*many(40), "{broken"])
    assert prepare(chatml, data, tmp_path / "out") == 0
    table = datasets.load_from_disk(str(tmp_path / "out"))
    assert table.features == datasets.Features(
        {
            "row_id": datasets.Value("string"),
            "source": datasets.Value("string"),
            "input_ids": datasets.List(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("int8")),
            "next_is_supervised": datasets.Value("bool"),
            "tail_length": datasets.Value("int32"),
            "conversation": datasets.Value("string"),
        }
    )
    prepared = load_prepared(tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    summary = prepared.summary
    assert summary["read"] == 41 == summary["kept"] + sum(summary["dropped"].values())
    assert summary["rows"] == len(rows) == len(prepared)
    assert summary["tokens"] == sum(len(row.input_ids) for row in rows)
    assert summary["supervised_tokens"] == sum(sum(row.loss_mask) for row in rows) == int(prepared.frequencies.sum())
    assert summary["vocab_size"] == len(prepared.frequencies) == len(toy_tokenizer(None))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["stage"] == "prepare"
    assert manifest["rows_sha256"] == summary["rows_sha256"]
    assert (tmp_path / "out" / "run.yaml").exists()
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("mode", [[], ["--seq-length", "24"]])
def test_order_and_content_do_not_depend_on_the_number_of_workers(chatml, tmp_path, mode):
    data = write_lines(tmp_path / "d.jsonl", many(150))
    found = []
    for workers in ("1", "2", "3"):
        out = tmp_path / workers
        assert prepare(chatml, data, out, "--num-workers", workers, *mode) == 0
        summary = load_prepared(out).summary
        found.append(
            (rows_of(out), summary, (out / "rejected.jsonl").read_text(), (out / "repaired.jsonl").read_text())
        )
    assert found[0] == found[1] == found[2]
    assert found[0][1]["rows_sha256"]


def test_shuffled_input_gives_the_same_rows_under_the_same_ids(chatml, tmp_path):
    rows = many(60)
    assert prepare(chatml, write_lines(tmp_path / "a.jsonl", rows), tmp_path / "a") == 0
    random.Random(1).shuffle(rows)
    assert prepare(chatml, write_lines(tmp_path / "b.jsonl", rows), tmp_path / "b") == 0
    first, second = ({row.row_id: row.input_ids for row in rows_of(tmp_path / name)} for name in "ab")
    assert first == second


def test_the_same_preparation_is_not_made_twice_and_another_is_not_replaced_unasked(chatml, tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", many(5, 1))
    out = tmp_path / "out"
    assert prepare(chatml, data, out) == 0
    before = (out / "state.json").stat().st_mtime_ns
    assert prepare(chatml, data, out) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert (out / "state.json").stat().st_mtime_ns == before
    assert prepare(chatml, data, out, "--seq-length", "20") == 2
    assert "differs: settings" in capsys.readouterr().err
    write_lines(data, many(6, 2))
    assert prepare(chatml, data, out) == 2
    assert "differs: inputs" in capsys.readouterr().err
    other = model_folder(tmp_path / "other", toy_tokenizer(CHATML + " "), 500)
    (out / "hidden_states").mkdir()
    (out / "hidden_states" / "shard").write_text("kept")
    assert prepare(chatml, data, out, "--overwrite") == 0
    assert len(rows_of(out)) == load_prepared(out).summary["rows"]
    assert (out / "hidden_states" / "shard").read_text() == "kept"
    assert prepare(other, data, out) == 2
    shown = capsys.readouterr().err
    assert "template_sha256" in shown
    assert "vocab_size" in shown


def test_rows_are_cut_at_the_limit_and_say_if_their_next_token_is_supervised(chatml, tmp_path):
    tokenizer = toy_tokenizer(CHATML)
    row = chat("hello", "The answer is 42 . I think that we can do it now")
    whole = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    start = len(tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False))
    data = write_lines(tmp_path / "d.jsonl", [row])
    for limit in range(start + 2, len(whole) + 2):
        out = tmp_path / str(limit)
        assert prepare(chatml, data, out, "--seq-length", str(limit)) == 0
        (found,) = rows_of(out)
        assert found.input_ids == whole[:limit]
        assert sum(found.loss_mask) == min(limit, len(whole) - 1) - start
        assert found.next_is_supervised == (limit < len(whole) - 1)
        assert load_prepared(out).summary["rows_cut"] == int(limit < len(whole))
    assert prepare(chatml, data, tmp_path / "none", "--seq-length", str(start)) == 2


def test_ready_rows_are_checked_and_cut_with_their_tails(chatml, tmp_path):
    ids = list(range(20, 30))
    good = {"id": "a", "source": "qa", "input_ids": ids, "loss_mask": [0] * 3 + [1] * 4 + [0] * 3, "tail_length": 3}
    rows = [
        good,
        {**good, "id": "beyond", "input_ids": [*ids[:-1], 10**6]},
        {**good, "id": "negative", "input_ids": [-1, *ids[1:]]},
        {**good, "id": "short", "loss_mask": [0, 1]},
        {**good, "id": "two", "loss_mask": [0] * 6 + [2] + [0] * 3},
        {**good, "id": "tail", "tail_length": 10},
        {
            **good,
            "id": "late",
            "input_ids": ids,
            "loss_mask": [0] * 7 + [1] * 3,
            "tail_length": 0,
            "next_is_supervised": True,
        },
        {**good, "id": "open", "next_is_supervised": True},
        {"id": "none", "input_ids": ids},
    ]
    data = write_lines(tmp_path / "d.jsonl", rows)
    assert prepare(chatml, data, tmp_path / "out") == 0
    found = rows_of(tmp_path / "out")
    assert [(row.row_id, row.source, row.tail_length, row.next_is_supervised) for row in found] == [
        ("a", "qa", 3, False),
        ("late", "qa", 0, True),
    ]
    assert [(r["row_id"], r["reason"]) for r in rejected(tmp_path / "out")] == [
        ("beyond", "id beyond the vocabulary"),
        ("negative", "id beyond the vocabulary"),
        *[(name, "bad token row") for name in ("short", "two", "tail", "open", "none")],
    ]
    for limit, tail, follows in ((9, 2, False), (7, 0, False), (6, 0, True)):
        out = tmp_path / str(limit)
        assert prepare(chatml, write_lines(tmp_path / "one.jsonl", [good]), out, "--seq-length", str(limit)) == 0
        (row,) = rows_of(out)
        assert (len(row.input_ids), row.tail_length, row.next_is_supervised) == (limit, tail, follows)


def test_prompts_alone_ask_for_regenerate(chatml, tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": "hello"}, {"turns": ["a", "b"]}, chat("no reply here")])
    assert prepare(chatml, data, tmp_path / "out") == 2
    shown = capsys.readouterr().err
    assert "peagle regenerate" in shown
    assert "3 no reply" in shown


def test_a_strict_template_rejects_rows_with_its_own_words(tmp_path, capsys):
    model = model_folder(tmp_path / "model", family_tokenizer("gemma"))
    data = write_lines(tmp_path / "d.jsonl", [chat("a", "b c", system="s"), chat("hello", "The answer")])
    assert prepare(model, data, tmp_path / "out") == 0
    (bad,) = rejected(tmp_path / "out")
    assert bad["reason"] == "template refuses the row"
    assert "System role not supported" in bad["detail"]
    assert GEMMA.count("System role not supported") == 1


def test_template_options_reach_the_template(model_of, tmp_path):
    data = write_lines(
        tmp_path / "d.jsonl",
        [chat("hello", "The answer"), {**chat("hi", "so be it"), "chat_template_kwargs": {"enable_thinking": True}}],
    )
    options = '{"enable_thinking": false}'
    assert prepare(model_of(QWEN3), data, tmp_path / "out", "--chat-template-kwargs", options) == 0
    tokenizer = toy_tokenizer(QWEN3)
    first, second = (supervised(row, tokenizer) for row in rows_of(tmp_path / "out"))
    assert first == ["The answer<|im_end|>"]
    assert second == ["<think>\n\n</think>\n\nso be it<|im_end|>"]


def test_another_template_can_be_given(chatml, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(QWEN3)
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer")])
    assert prepare(chatml, data, tmp_path / "out", "--chat-template", str(template)) == 0
    (row,) = rows_of(tmp_path / "out")
    assert supervised(row, toy_tokenizer(None)) == ["<think>\n\n</think>\n\nThe answer<|im_end|>"]


def test_a_token_across_the_start_of_a_reply_gives_prompt_ids_and_reply_ids(chatml, tmp_path):
    tokenizer = toy_tokenizer(CHATML)
    row = chat("hello", "\n\nThe answer")
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(chatml, data, tmp_path / "out") == 0
    (found,) = rows_of(tmp_path / "out")
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
    assert found.input_ids == prompt + tokenizer.encode("\n\nThe answer<|im_end|>\n", add_special_tokens=False)
    assert supervised(found, tokenizer) == ["\n\nThe answer<|im_end|>"]


def test_a_pattern_finds_the_replies_of_unknown_text(chatml, tmp_path):
    text = "Q: hello\nA: The answer is 42 .\nQ: why\nA: I think so\n"
    data = write_lines(tmp_path / "d.jsonl", [{"text": text}, {"text": "nothing here"}])
    flags = ["--mode", "text", "--assistant-pattern", r"A: (.*?\n)"]
    assert prepare(chatml, data, tmp_path / "out", *flags) == 0
    (row,) = rows_of(tmp_path / "out")
    found = supervised(row, toy_tokenizer(None))
    assert [part.strip() for part in found] == ["The answer is 42 .", "I think so"]
    assert rejected(tmp_path / "out")[0]["reason"] == "no supervised token"


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral", "harmony", "qwen3"])
def test_rendered_text_gives_the_replies_of_every_family(tmp_path, family):
    tokenizer = family_tokenizer(family)
    messages = chat("hello there", "The answer is 42 .", "and why", "I think so")["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    data = write_lines(tmp_path / "d.jsonl", [{"text": text}])
    model = model_folder(tmp_path / "model", tokenizer)
    assert prepare(model, data, tmp_path / "out", "--mode", "text") == 0
    (row,) = rows_of(tmp_path / "out")
    assert tokenizer.decode(row.input_ids) == text
    first, second = supervised(row, tokenizer)
    assert "The answer is 42 ." in first
    assert "hello" not in first + second
    assert "I think so" in second
    ends = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "harmony": "<|return|>"}
    assert second.endswith(ends.get(family, "<|im_end|>"))


def test_a_minimum_of_supervised_tokens_can_be_asked_for(chatml, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "so"), chat("hello", "The answer is 42 . I think so")])
    assert prepare(chatml, data, tmp_path / "out", "--minimum-valid-tokens", "6") == 0
    assert len(rows_of(tmp_path / "out")) == 1
    assert load_prepared(tmp_path / "out").summary["dropped"] == {"reply too short": 1}


def test_max_samples_limits_what_is_read(chatml, tmp_path):
    a = write_lines(tmp_path / "a.jsonl", [chat("hello", f"answer {i}") for i in range(9)])
    b = write_lines(tmp_path / "b.jsonl", [chat("hello", f"world {i}") for i in range(9)])
    assert prepare(chatml, a, tmp_path / "out", "--data", str(b), "--max-samples", "6") == 0
    summary = load_prepared(tmp_path / "out").summary
    assert summary["read"] == 6
    assert summary["sources"] == {"a": 3, "b": 3}


MISTAKES = {
    "no such model": (["--model", "./none"], "./none: no such folder"),
    "a flag that is unknown": (["--seq-len", "5"], "No such option: --seq-len"),
    "a number out of range": (["--seq-length", "1"], "--seq-length"),
    "options that are no object": (["--chat-template-kwargs", "[1]"], "expected a JSON object"),
    "a template that is not there": (["--chat-template", "none.jinja"], "cannot be read"),
    "a pattern in chat mode": (["--assistant-pattern", "a"], "goes with --mode text"),
    "a pattern that is none": (["--mode", "text", "--assistant-pattern", "("], "not a regular expression"),
    "an unknown mode": (["--mode", "image"], "image"),
    "data that is not there": (["--data", "none.jsonl"], "no such file"),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_answered_in_one_line(chatml, tmp_path, capsys, name):
    flags, message = MISTAKES[name]
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer")])
    assert prepare(chatml, data, tmp_path / "out", *flags) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert lines[0].startswith("peagle: error: ")


def test_a_model_without_tokenizer_template_or_config_is_named(tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer")])
    bare = model_folder(tmp_path / "bare", toy_tokenizer(None))
    assert prepare(bare, data, tmp_path / "out") == 2
    assert "no chat template. Give one with --chat-template" in capsys.readouterr().err
    (bare / "config.json").unlink()
    assert prepare(bare, data, tmp_path / "out") == 2
    assert "vocabulary size" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert prepare(empty, data, tmp_path / "out") == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_token_rows_need_no_template(tmp_path):
    bare = model_folder(tmp_path / "bare", toy_tokenizer(None))
    data = write_lines(tmp_path / "d.jsonl", [{"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}])
    assert prepare(bare, data, tmp_path / "out") == 0


def test_an_empty_file_is_named(chatml, tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text("")
    assert prepare(chatml, tmp_path / "d.jsonl", tmp_path / "out") == 2
    assert "d.jsonl: the file is empty" in capsys.readouterr().err
    (tmp_path / "d.jsonl").write_text("\n\n")
    assert prepare(chatml, tmp_path / "d.jsonl", tmp_path / "out") == 2
    assert "no rows in it" in capsys.readouterr().err


def test_a_full_disk_leaves_the_old_rows_and_no_half(chatml, tmp_path, capsys, monkeypatch):
    data = write_lines(tmp_path / "d.jsonl", many(20, 1))
    out = tmp_path / "out"
    assert prepare(chatml, data, out) == 0
    before = rows_of(out)

    def full(*_args, **_how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("datasets.Dataset.save_to_disk", full)
    assert prepare(chatml, data, out, "--overwrite", "--seq-length", "30") == 2
    assert "no space left" in capsys.readouterr().err
    assert rows_of(out) == before
    assert not list(out.glob(".*"))


def test_a_really_full_disk_leaves_no_work_folder(chatml, tmp_path, capsys, monkeypatch):
    data = write_lines(tmp_path / "d.jsonl", many(20, 1))

    def full(writer):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peagle.data.prepared.RowsWriter._close", full)
    assert prepare(chatml, data, tmp_path / "out") == 2
    assert "no space left" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob(".*"))


def test_rows_that_were_prepared_outlive_a_preparation_that_keeps_nothing(chatml, tmp_path):
    out = tmp_path / "out"
    assert prepare(chatml, write_lines(tmp_path / "d.jsonl", many(20, 1)), out) == 0
    before = rows_of(out)
    nothing = write_lines(tmp_path / "n.jsonl", [{"prompt": "only"}])
    assert prepare(chatml, nothing, out, "--overwrite") == 2
    assert rows_of(out) == before


def test_two_preparations_into_one_folder_at_once_are_refused(chatml, tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", many(20, 1))
    code = "import sys; from pathlib import Path; from peagle.files import lock_file; "
    code += (
        f"lock = lock_file(Path({str(tmp_path / 'out' / '.prepare.lock')!r}), ''); print('held', flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    assert prepare(chatml, data, tmp_path / "out") == 2
    assert "another process is preparing into" in capsys.readouterr().err
    holder.communicate(b"\n")
    assert prepare(chatml, data, tmp_path / "out") == 0


def test_somebody_elses_data_set_is_not_replaced_unasked(chatml, tmp_path, capsys):
    out = tmp_path / "out"
    datasets.Dataset.from_list([{"precious": 1}]).save_to_disk(str(out))
    data = write_lines(tmp_path / "d.jsonl", many(20, 1))
    assert prepare(chatml, data, out) == 2
    assert "did not make would be replaced" in capsys.readouterr().err
    assert datasets.load_from_disk(str(out))[0] == {"precious": 1}
    assert prepare(chatml, data, out, "--overwrite") == 0


def test_a_place_that_cannot_be_written_is_one_line(chatml, tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", many(20, 1))
    (tmp_path / "file").write_text("precious")
    for place in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("n" * 300)):
        assert prepare(chatml, data, place) == 2
        shown = capsys.readouterr().err.strip().splitlines()[-1]
        assert shown.startswith("peagle: error: ")
        assert str(place)[:40] in shown
    assert (tmp_path / "file").read_text() == "precious"


def test_a_killed_move_never_passes_for_prepared_rows(chatml, tmp_path, monkeypatch):
    data = write_lines(tmp_path / "d.jsonl", many(20, 1))
    out = tmp_path / "out"
    assert prepare(chatml, data, out) == 0

    def killed(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("peagle.data.prepared.write_json", killed)
    assert prepare(chatml, data, out, "--overwrite", "--seq-length", "30") == 130
    with pytest.raises(DataError, match=r"not prepared rows \(no summary\.json\)"):
        load_prepared(out)
    monkeypatch.undo()
    assert prepare(chatml, data, out, "--seq-length", "30") == 0


def test_damaged_rows_are_named(chatml, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", many(20, 1))
    out = tmp_path / "out"
    assert prepare(chatml, data, out) == 0
    (shard,) = out.glob("data-*.arrow")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        load_prepared(out)
    with pytest.raises(DataError, match="no such folder"):
        load_prepared(tmp_path / "none")
    (out / "summary.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        load_prepared(out)


def test_inspect_marks_supervised_tokens_and_tails(chatml, tmp_path, capsys):
    rows = [chat("hello", "The answer\x1b[31m 👩‍👩‍👧"), {"prompt": "only"}]
    ids = toy_tokenizer(None).encode("helloworldanswerthink", add_special_tokens=False)
    mask = [0] + [1] * (len(ids) - 2) + [0]
    rows.append({"id": "t1", "input_ids": ids, "loss_mask": mask, "tail_length": 1})
    data = write_lines(tmp_path / "d.jsonl", rows)
    assert prepare(chatml, data, tmp_path / "out") == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n[[The answer\\x1b[31m 👩‍👩‍👧<|im_end|>]]\n" in shown
    assert "{{" in shown
    assert "dropped 1: no reply" in shown
    assert main(["inspect", str(tmp_path / "out"), "--row-id", "t1", "--ids"]) == 0
    shown = capsys.readouterr().out
    assert "tail 1" in shown
    assert " ".join(map(str, ids)) in shown
    assert main(["inspect", str(tmp_path / "out"), "--row-id", "nope"]) == 2
    assert main(["inspect", str(tmp_path / "out"), "--start", "9"]) == 2
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert main(["inspect", str(tmp_path / "out"), "--source", "d", "--rows", "1"]) == 0


def test_inspect_colours_a_terminal(chatml, tmp_path):
    from peagle.data.inspect import highlighted

    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer")])
    assert prepare(chatml, data, tmp_path / "out") == 0
    (row,) = rows_of(tmp_path / "out")
    text = highlighted(toy_tokenizer(None), row, True)
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["The answer<|im_end|>"] == "bold black on green"
    assert "[[" not in text.plain


def test_nothing_is_said_when_asked_to_be_quiet(chatml, tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer")])
    assert prepare(chatml, data, tmp_path / "out", "--quiet") == 0
    assert capsys.readouterr().err == ""
    logging.getLogger("peagle").setLevel(logging.INFO)


def double(number: int) -> int:
    return 2 * number


def killed(number: int) -> int:
    if number == 70:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def refused(number: int) -> int:
    raise TemplateError("no template")


@pytest.mark.parametrize("workers", [None, 1, 2, 3])
@pytest.mark.parametrize("number", [0, 1, 31, 33, 300])
def test_results_come_in_order(workers, number):
    assert list(ordered_map(double, iter(range(number)), workers)) == [2 * i for i in range(number)]


def test_few_rows_start_no_process():
    assert set(ordered_map(lambda _: os.getpid(), range(100), None)) == {os.getpid()}


def test_input_is_read_a_bounded_number_ahead():
    taken = []

    def rows():
        for number in range(5000):
            taken.append(number)
            yield number

    results = ordered_map(double, rows(), 2)
    next(results)
    assert len(taken) < 500
    results.close()


def test_a_killed_process_is_said_and_does_not_hang():
    with pytest.raises(DataError, match="a worker process was killed"):
        list(ordered_map(killed, range(200), 2))


def test_a_mistake_found_in_a_process_keeps_its_message():
    with pytest.raises(TemplateError, match="no template"):
        list(ordered_map(refused, range(200), 2))


def test_no_more_processes_are_started_than_there_is_work_for():
    assert set(ordered_map(lambda _: os.getpid(), range(20), 500)) == {os.getpid()}
    assert len(set(ordered_map(lambda _: os.getpid(), range(70), 500))) <= 3


def test_workers_end_when_their_parent_is_killed():
    # One os.write a line: an unbuffered print writes text and line end apart, and two processes' lines then mix.
    code = (
        "import os, time\nfrom peagle.data.prepare import ordered_map\n"
        "def work(n):\n    os.write(1, b'%d\\n' % os.getpid())\n    time.sleep(0.01)\n    return n\n"
        "for _ in ordered_map(work, iter(range(10**6)), 2): pass\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workers = set()
    while len(workers) < 2:
        workers.add(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}/stat") and not is_dead(pid) for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.1)


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
