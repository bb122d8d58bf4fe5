"""A kept row is proved: what its turns say stands in the rendering, each inside its own turn; else it is rejected."""

import json

import pytest

from peagle.data.prepared import load_prepared
from tests.data.toys import CHATML, chat, prepare, supervised, toy_tokenizer, write_lines

CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
OTHER = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
# ChatML that prints calls, all of them or the first alone, with or without their arguments.
PRINTS_CALLS = CHATML.replace(
    "message['content'] + '<|im_end|>",
    "(message['content'] or '') + (message.tool_calls | default([]) | tojson if message.tool_calls else '')"
    " + '<|im_end|>",
)
PRINTS_FIRST = PRINTS_CALLS.replace("message.tool_calls | default([]) | tojson", "message.tool_calls[0] | tojson")
PRINTS_NAMES = PRINTS_CALLS.replace("message.tool_calls | default([]) | tojson", "message.tool_calls[0].function.name")
# Lists declared tools, never prints a call.
LISTS_TOOLS = "{%- if tools -%}{{ tools | tojson }}{%- endif -%}" + CHATML.replace(
    "message['content'] + '<|im_end|>",
    "(message['content'] | tojson if message['content'] is none else message['content']) + '<|im_end|>",
)
# Reads users' texts as parts only, and reads them from everybody.
PARTS = CHATML.replace(
    "message['content'] + '<|im_end|>",
    "(message['content'][0]['text'] if message['content'] is not string and message['role'] == 'user' else "
    "('' if message['role'] == 'user' else message['content'])) + '<|im_end|>",
)


def with_calls(*calls: dict, content: str | None = None, system: str = "tools: get_weather") -> dict:
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "what is the weather"},
            {"role": "assistant", "content": content, "tool_calls": list(calls)},
            *({"role": "tool", "content": f"sunny {i}", "name": "get_weather"} for i in range(len(calls))),
            {"role": "assistant", "content": "ok"},
        ]
    }


def rows_of(folder) -> list:
    found = load_prepared(folder)
    return [found.row(i) for i in range(len(found))]


def outcome(model_of, tmp_path, template: str, row: dict) -> tuple[list, list[str]]:
    """The rows that are kept, and the reasons of those that are not."""
    out = tmp_path / "out"
    status = prepare(model_of(template), write_lines(tmp_path / "d.jsonl", [row]), out)
    reasons = [json.loads(line)["reason"] for line in (out / "rejected.jsonl").read_text().splitlines()]
    return (rows_of(out) if status == 0 else []), reasons


@pytest.mark.parametrize("system", ["tools: get_weather", "nothing"])
@pytest.mark.parametrize("template", [CHATML, LISTS_TOOLS, PRINTS_NAMES], ids=["none", "declared", "name only"])
def test_D09_N05_a_template_that_prints_no_call_rejects_the_row(model_of, tmp_path, template, system):
    row = {**with_calls(CALL, system=system), "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    kept, reasons = outcome(model_of, tmp_path, template, row)
    assert kept == []
    assert reasons == ["template drops tool turns"]


def test_D09_of_two_calls_to_one_function_the_second_may_not_vanish(model_of, tmp_path):
    kept, reasons = outcome(model_of, tmp_path, PRINTS_FIRST, with_calls(CALL, OTHER))
    assert (kept, reasons) == ([], ["template drops tool turns"])
    kept, reasons = outcome(model_of, tmp_path, PRINTS_CALLS, with_calls(CALL, OTHER))
    assert reasons == []
    said = "".join(text for row in kept for text in supervised(row, toy_tokenizer(PRINTS_CALLS)))
    assert said.count("get_weather") == 2
    assert "Oslo" in said


def test_D09_a_text_beside_a_call_may_not_vanish(model_of, tmp_path):
    drops = PRINTS_CALLS.replace("(message['content'] or '')", "('' if message.tool_calls else message['content'])")
    kept, reasons = outcome(model_of, tmp_path, drops, with_calls(CALL, content="let me look"))
    assert (kept, reasons) == ([], ["template drops a text"])
    assert outcome(model_of, tmp_path, drops, with_calls(CALL))[1] == []


def test_N04_the_form_that_a_template_reads_is_used(model_of, tmp_path):
    kept, reasons = outcome(model_of, tmp_path, PARTS, chat("hello", "answer one"))
    assert reasons == []
    tokenizer = toy_tokenizer(PARTS)
    assert "hello" in tokenizer.decode(kept[0].input_ids)
    assert supervised(kept[0], tokenizer) == ["answer one<|im_end|>"]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_N04_a_text_that_is_not_rendered_rejects_the_row(model_of, tmp_path, role):
    drops = CHATML.replace("message['content'] +", f"(message['content'] if message['role'] != '{role}' else 'x') +")
    row = chat("hello", "answer one", "why", "answer two")
    row["messages"].insert(0, {"role": "system", "content": "be kind"})
    kept, reasons = outcome(model_of, tmp_path, drops, row)
    assert (kept, reasons) == ([], ["template drops a text"])


def test_N04_a_text_that_another_turn_repeats_proves_nothing(model_of, tmp_path):
    first_only = CHATML.replace(
        "message['content'] +", "(messages[0]['content'] if message['role'] == 'user' else message['content']) +"
    )
    kept, reasons = outcome(model_of, tmp_path, first_only, chat("same", "answer one", "same", "answer two"))
    assert (kept, reasons) == ([], ["template drops a text"])
