"""Layouts, roles, tool calls and the repair rules."""

from __future__ import annotations

import json

import pytest

from peagle.data.formats import ROLES, clean, conversation_of, given_id
from peagle.data.records import UnusableRow


def turns_of(record):
    return [(m["role"], m["content"]) for m in conversation_of(record)["messages"]]


ASK, REPLY = ("user", "a"), ("assistant", "b")
LAYOUTS = {
    "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "sharegpt, raw": {"items": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "json text": {"messages": json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])},
    "ultrachat, raw": {"id": "0", "data": ["a", "b"]},
    "ultrachat 200k": {
        "prompt": "a",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    },
    "alpaca": {"instruction": "a", "input": "", "output": "b"},
    "gsm8k": {"question": "a", "answer": "b"},
    "prompt and response": {"prompt": "a", "response": "b"},
    "prompt and completion turns": {
        "prompt": [{"role": "user", "content": "a"}],
        "completion": [{"role": "assistant", "content": "b"}],
    },
    "speaker and text": {"dialogue": [{"speaker": "User", "text": "a"}, {"speaker": "Bot", "text": "b"}]},
    "null fields": {"messages": [{"role": "user", "content": "a", "tool_calls": None}, {"from": "gpt", "value": "b"}]},
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_gives_the_same_turns(name):
    assert turns_of(LAYOUTS[name]) == [ASK, REPLY]


def test_an_instruction_with_input_is_one_prompt():
    record = {"instruction": "sum up", "input": "the text", "output": "b"}
    assert turns_of(record) == [("user", "sum up\n\nthe text"), REPLY]


@pytest.mark.parametrize(
    "record", [{"prompt": "a"}, {"question": "a"}, {"turns": ["a"]}, {"prompt": ["a"]}, {"instruction": "a"}]
)
def test_prompts_without_replies_are_prompts(record):
    assert turns_of(record) == [ASK]


def test_further_turns_of_a_benchmark_wait_for_the_replies_before_them():
    assert conversation_of({"turns": ["a", "b", "c"]})["next_turns"] == ("b", "c")
    assert conversation_of({"prompt": ["a", "b"], "category": "qa"})["next_turns"] == ("b",)


def test_human_eval_is_a_prompt_though_it_has_a_solution():
    record = {"task_id": "HumanEval/0", "prompt": "a", "canonical_solution": "return", "completion": "x"}
    assert turns_of(record) == [ASK]


def test_a_system_column_comes_first_unless_the_turns_have_one():
    turns = LAYOUTS["messages"]["messages"]
    assert turns_of({"system": "s", "messages": turns}) == [("system", "s"), ASK, REPLY]
    own = [{"role": "developer", "content": "own"}, *turns]
    assert turns_of({"system": "s", "messages": own}) == [("system", "own"), ASK, REPLY]


def sharegpt(*pairs):
    return {"conversations": [{"from": role, "value": value} for role, value in pairs]}


REPAIRS = {
    "neighbouring user turns merged": (
        sharegpt(("human", "a"), ("human", "b"), ("gpt", "c")),
        [("user", "a\n\nb"), ("assistant", "c")],
    ),
    "neighbouring assistant turns merged": (
        sharegpt(("human", "a"), ("gpt", "b"), ("gpt", "c")),
        [("user", "a"), ("assistant", "b\n\nc")],
    ),
    "neighbouring system turns merged": (
        sharegpt(("system", "a"), ("system", "b"), ("human", "a"), ("gpt", "b")),
        [("system", "a\n\nb"), ASK, REPLY],
    ),
    "turns before the first user turn dropped": (
        sharegpt(("system", "s"), ("gpt", "x"), ("tool", "y"), ("human", "a"), ("gpt", "b")),
        [("system", "s"), ASK, REPLY],
    ),
    "cut at an empty reply": (
        sharegpt(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", " \n"), ("human", "d"), ("gpt", "e")),
        [ASK, REPLY, ("user", "c")],
    ),
    "number taken as text": (sharegpt(("human", 7), ("gpt", "b")), [("user", "7"), REPLY]),
    "lone surrogate replaced": (sharegpt(("human", "a\udc00"), ("gpt", "b")), [("user", "a\ufffd"), REPLY]),
    "tool result written as JSON": (
        sharegpt(("human", "a"), ("gpt", "b"), ("tool", {"x": 1}), ("gpt", "c")),
        [ASK, REPLY, ("tool", '{"x": 1}'), ("assistant", "c")],
    ),
}


@pytest.mark.parametrize("rule", list(REPAIRS))
def test_each_repair_does_what_its_rule_says_and_is_noted(rule):
    record, expected = REPAIRS[rule]
    found = conversation_of(record)
    assert [(m["role"], m["content"]) for m in found["messages"]] == expected
    assert found["repairs"] == (rule,)


def test_replies_behind_a_tool_call_are_not_merged_into_it():
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    record = {"messages": [{"role": "user", "content": "a"}, call, {"role": "assistant", "content": "b"}]}
    assert len(conversation_of(record)["messages"]) == 3


def test_halves_of_a_surrogate_pair_are_joined():
    repairs = set()
    assert clean("\ud83d\ude00 \ud83d", repairs) == "😀 \ufffd"
    assert repairs


CALLS = {
    "openai": {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    "legacy": {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
    "flat": {"role": "assistant", "tool_calls": [{"name": "f", "parameters": {"x": 1}}]},
    "text": {"role": "assistant", "tool_calls": '[{"name": "f", "arguments": {"x": 1}}]'},
    "sharegpt": {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    "parts": {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"x": 1}}]},
    "one": {"role": "assistant", "tool_calls": {"function": {"name": "f", "arguments": {"x": 1}}}},
}


@pytest.mark.parametrize("name", list(CALLS))
def test_every_form_of_a_tool_call_is_brought_to_one(name):
    record = {"messages": [{"role": "user", "content": "a"}, CALLS[name]]}
    (call,) = conversation_of(record)["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize("role", ["tool", "function", "observation", "ipython"])
def test_results_of_tools_keep_their_call(role):
    record = {
        "messages": [
            {"role": "user", "content": "a"},
            CALLS["openai"],
            {"role": role, "content": "r", "tool_call_id": "c1", "name": "f"},
        ]
    }
    assert conversation_of(record)["messages"][2] == {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"}


@pytest.mark.parametrize("tools", [[{"name": "f"}], json.dumps([{"type": "function", "function": {"name": "f"}}])])
def test_tool_declarations_are_wrapped(tools):
    record = {**LAYOUTS["messages"], "tools": tools}
    assert conversation_of(record)["tools"] == ({"type": "function", "function": {"name": "f"}},)


REJECTED = {
    "turn is not an object": sharegpt(("human", "a"))["conversations"] + ["hi"],
    "unknown role": [{"role": "narrator", "content": "a"}],
    "no content": [{"role": "user"}],
    "unsupported content": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    "bad tool call": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": 1}]}],
    "no user turn": [{"role": "assistant", "content": "a"}],
    "no conversation": [],
}


@pytest.mark.parametrize("reason", list(REJECTED))
def test_what_cannot_be_mended_is_rejected_with_its_reason(reason):
    with pytest.raises(UnusableRow) as problem:
        conversation_of({"messages": REJECTED[reason]})
    assert problem.value.reason == reason


def test_roles_are_the_four_of_chat_templates():
    assert set(ROLES.values()) == {"system", "user", "assistant", "tool"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"id": 3}, "3"),
        ({"id": True}, None),
        ({"id": ""}, None),
        ({"uuid": "a b\n"}, "a_b_"),
        ({"id": [1]}, None),
        ({}, None),
    ],
)
def test_a_rows_own_id_is_made_safe(record, expected):
    assert given_id(record) == expected


@pytest.mark.parametrize("options", [{"chat_template": "{{ 1 }}"}, {"tokenize": True}, [1], "x"])
def test_a_row_cannot_bring_its_own_template_along(options):
    with pytest.raises(UnusableRow) as problem:
        conversation_of({**LAYOUTS["messages"], "chat_template_kwargs": options})
    assert problem.value.reason == "bad template options"
