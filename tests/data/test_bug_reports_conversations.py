"""Bug reports D01 to D12: conversations as they are found, through `peagle prepare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.data.prepared import load_prepared
from tests.data.toys import (
    QWEN3,
    TOOLS_LOOPED,
    TOOLS_PASTED,
    TOOLS_SERIALISED,
    chat,
    prepare,
    rejected,
    supervised,
    toy_tokenizer,
    write_lines,
)


def rows_of(folder: Path):
    prepared = load_prepared(folder)
    return [prepared.row(i) for i in range(len(prepared))]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_D01_a_chat_with_two_turns_of_one_side_never_ends_the_job(chatml, tmp_path, capsys, workers):
    good = [chat("hello world", "The answer is 42 ."), chat("what is this", "I think so")]
    odd = [
        {"conversations": [{"from": "human", "value": v} for v in ("a", "b")] + [{"from": "gpt", "value": "yes sir"}]},
        {"conversations": [{"from": "human", "value": "a"}] + [{"from": "gpt", "value": v} for v in ("one", "two")]},
    ]
    mixed = write_lines(tmp_path / "mixed.jsonl", [good[0], *odd, good[1]])
    alone = write_lines(tmp_path / "alone.jsonl", good)
    assert prepare(chatml, mixed, tmp_path / "mixed", "--num-workers", workers) == 0
    shown = capsys.readouterr().err
    assert prepare(chatml, alone, tmp_path / "alone") == 0
    mixed_rows, alone_rows = rows_of(tmp_path / "mixed"), rows_of(tmp_path / "alone")
    kept = [mixed_rows[0], mixed_rows[3]]
    assert [(r.row_id, r.input_ids, r.loss_mask) for r in kept] == [
        (r.row_id, r.input_ids, r.loss_mask) for r in alone_rows
    ]
    summary = load_prepared(tmp_path / "mixed").summary
    assert summary["read"] == 4 == summary["kept"]
    assert summary["repaired"] == {"neighbouring user turns merged": 1, "neighbouring assistant turns merged": 1}
    assert "neighbouring user turns merged" in shown
    listed = [json.loads(line) for line in (tmp_path / "mixed" / "repaired.jsonl").read_text().splitlines()]
    assert [item["line"] for item in listed] == [2, 3]
    tokenizer = toy_tokenizer(None)
    assert supervised(mixed_rows[1], tokenizer) == ["yes sir<|im_end|>"]
    assert supervised(mixed_rows[2], tokenizer) == ["one\n\ntwo<|im_end|>"]


def test_D03_tool_turns_and_calls_survive_and_only_the_assistant_is_supervised(model_of, tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    row = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "weather in Oslo"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "4 degrees"},
            {"role": "assistant", "content": "It is 4 degrees ."},
        ]
    }
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(model_of(TOOLS_SERIALISED), data, tmp_path / "out") == 0
    (found,) = rows_of(tmp_path / "out")
    tokenizer = toy_tokenizer(None)
    text = tokenizer.decode(found.input_ids)
    assert text.count("<|im_start|>") == 5
    assert 'get_weather {"city": "Oslo"}' in text
    assert "4 degrees" in text
    assert supervised(found, tokenizer) == [
        '<call>get_weather {"city": "Oslo"}</call><|im_end|>',
        "It is 4 degrees .<|im_end|>",
    ]


def test_D03_a_template_that_drops_tool_turns_is_named(chatml, tmp_path):
    call = {"function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "done it"},
    ]
    data = write_lines(tmp_path / "d.jsonl", [{"messages": turns}, chat("hi", "hello")])
    assert prepare(chatml, data, tmp_path / "out") == 0
    assert [(r["line"], r["reason"]) for r in rejected(tmp_path / "out")] == [(1, "template drops tool turns")]


def test_D04_four_layouts_of_one_dialogue_give_the_same_row(model_of, tmp_path):
    texts = ["hello world", "The answer is 42 .", "why", "I think that we can do it ."]
    roles = ["user", "assistant"] * 2
    aliases = ["human", "gpt"] * 2
    layouts = [
        {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts)]},
        {"conversations": [{"from": r, "value": t} for r, t in zip(aliases, texts)]},
        {"conversations": [{"role": r, "content": t} for r, t in zip(roles, texts)]},
        {
            "messages": [
                {"role": r, "content": [{"type": "text", "text": t[:3]}, {"type": "text", "text": t[3:]}]}
                for r, t in zip(roles, texts)
            ]
        },
    ]
    data = write_lines(tmp_path / "d.jsonl", layouts)
    assert prepare(model_of(QWEN3), data, tmp_path / "out") == 0
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 8
    assert len({(tuple(r.input_ids), tuple(r.loss_mask)) for r in rows}) == 2
    assert load_prepared(tmp_path / "out").summary["rows"] == 8
    assert [r.row_id.split("/")[0].partition("#")[2] for r in rows[::2]] == ["", "2", "3", "4"]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_D04_reasoning_is_kept_whichever_key_holds_it(model_of, tmp_path, key):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", key: "work it out", "content": "so"}]}
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(model_of(QWEN3), data, tmp_path / "out") == 0
    (found,) = rows_of(tmp_path / "out")
    assert supervised(found, toy_tokenizer(None)) == ["<think>\nwork it out\n</think>\n\nso<|im_end|>"]


def test_D05_speaker_aliases_are_mapped_and_an_unknown_one_is_named(chatml, tmp_path, capsys):
    speakers = [("human", "gpt"), ("Human", "GPT"), ("user", "chatgpt"), ("user", "bing"), ("user", "narrator")]
    rows = [
        {"conversations": [{"from": a, "value": f"ask {i}"}, {"from": b, "value": f"reply {i}"}]}
        for i, (a, b) in enumerate(speakers)
    ]
    data = write_lines(tmp_path / "d.jsonl", rows)
    assert prepare(chatml, data, tmp_path / "out") == 0
    kept = rows_of(tmp_path / "out")
    assert [supervised(r, toy_tokenizer(None)) for r in kept] == [[f"reply {i}<|im_end|>"] for i in range(4)]
    assert all(sum(row.loss_mask) > 0 for row in kept)
    (bad,) = rejected(tmp_path / "out")
    assert (bad["line"], bad["reason"]) == (5, "unknown role")
    assert "narrator" in bad["detail"]
    assert "narrator" in capsys.readouterr().err


def test_D06_malformed_lines_and_entries_are_skipped_with_line_and_reason(chatml, tmp_path, capsys):
    good = chat("hello", "world hello")
    lines = [
        good,
        {"conversations": ["hi", None, {"from": "human", "value": "a"}]},
        {"conversations": "text"},
        {"other": 1},
        '{"messages": [',
        "",
    ]
    data = write_lines(tmp_path / "d.jsonl", lines)
    assert prepare(chatml, data, tmp_path / "out") == 0
    assert len(rows_of(tmp_path / "out")) == 1
    assert [(r["line"], r["reason"]) for r in rejected(tmp_path / "out")] == [
        (2, "turn is not an object"),
        (3, "no conversation"),
        (4, "no conversation"),
        (5, "broken JSON"),
    ]
    shown = capsys.readouterr().err
    assert all(f"d.jsonl:{line} (" in shown for line in (2, 3, 4, 5))


def test_D08_tool_arguments_as_object_and_as_text_give_one_text(model_of, tmp_path):
    arguments = {"city": "Oslo", "days": 2, "units": ["c", "f"]}

    def row(given):
        call = {"function": {"name": "weather", "arguments": given}}
        return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}

    data = write_lines(tmp_path / "d.jsonl", [row(arguments), row(json.dumps(arguments)), row('{"city": ')])
    texts = set()
    for number, template in enumerate((TOOLS_SERIALISED, TOOLS_LOOPED, TOOLS_PASTED)):
        out = tmp_path / str(number)
        assert prepare(model_of(template), data, out) == 0
        rows = rows_of(out)
        found = {toy_tokenizer(None).decode(row.input_ids) for row in rows}
        assert len(rows) == 2
        assert len(found) == 1
        texts |= found
        (bad,) = rejected(out)
        assert (bad["line"], bad["reason"]) == (3, "bad tool call")
    assert len(texts) == 1
    (text,) = texts
    assert '<call>weather {"city": "Oslo", "days": 2, "units": ["c", "f"]}</call>' in text


def test_D10_each_mode_reads_its_own_columns_and_names_the_missing_one(chatml, tmp_path, capsys):
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe answer is 42 .<|im_end|>\n"
    data = write_lines(tmp_path / "d.jsonl", [{"id": 1, "text": text}])
    assert prepare(chatml, data, tmp_path / "text", "--mode", "text") == 0
    (row,) = rows_of(tmp_path / "text")
    assert supervised(row, toy_tokenizer(None)) == ["The answer is 42 .<|im_end|>"]
    capsys.readouterr()
    assert prepare(chatml, data, tmp_path / "chat") == 2
    shown = capsys.readouterr().err
    assert "'id, text'" in shown
    assert "--mode text" in shown
    chats = write_lines(tmp_path / "chats.jsonl", [chat("hello", "world hello")])
    assert prepare(chatml, chats, tmp_path / "other", "--mode", "text") == 2
    shown = capsys.readouterr().err
    assert "`text`" in shown
    assert "--mode chat" in shown


REPLY = {"role": "assistant", "content": "c d"}


def test_D11_fields_that_change_type_harm_no_other_row(chatml, tmp_path):
    rows = [
        {"id": 1, **chat("hello", "world hello")},
        {"id": "b7", **chat("what", "is this")},
        {
            "id": 3,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a b"}]},
                *chat("", "c d")["messages"][1:],
            ],
        },
        {"id": 4, "messages": [{"role": "user", "content": 42}, {"role": "assistant", "content": "forty two"}]},
        {"id": [5], "extra": {"deep": {"er": [1, "x"]}}, **chat("last", "row here")},
    ]
    data = write_lines(tmp_path / "d.jsonl", rows)
    assert prepare(chatml, data, tmp_path / "out") == 0
    found = rows_of(tmp_path / "out")
    assert len(found) == 5
    assert [r.row_id.split(".")[0] for r in found[:4]] == ["1", "b7", "3", "4"]
    assert load_prepared(tmp_path / "out").summary["repaired"] == {"number taken as text": 1}


SCRIPTS = {
    "cjk": "漢字とかな 한국어",
    "right to left": "שלום عالم",
    "joined emoji": "family 👩‍👩‍👧 flag 🏳️‍🌈",
    "combining": "e\u0301 n\u0303 \u0939\u093f",
    "nul": "a\x00b",
    "crlf": "one\r\ntwo\rthree",
    "line separator": "one\u2028two\u2029three",
}


def test_D12_a_lone_surrogate_is_replaced_and_every_script_comes_back_exactly(chatml, tmp_path):
    rows = [chat(text, text) for text in SCRIPTS.values()]
    data = write_lines(tmp_path / "d.jsonl", [*rows, json.dumps(chat("a", "bad \ud83d half"))])
    assert prepare(chatml, data, tmp_path / "out") == 0
    found, tokenizer = rows_of(tmp_path / "out"), toy_tokenizer(None)
    for row, text in zip(found, SCRIPTS.values()):
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        assert tokenizer.decode(row.input_ids) == rendered
        assert supervised(row, tokenizer) == [text + "<|im_end|>"]
    assert len(found) == len(SCRIPTS) + 1
    assert supervised(found[-1], tokenizer) == ["bad \ufffd half<|im_end|>"]
    assert load_prepared(tmp_path / "out").summary["repaired"] == {"lone surrogate replaced": 1}
