"""Mutated conversations through `peagle prepare`: no crash, and every row that was read is kept or rejected."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.data.prepared import load_prepared
from peagle.data.readers import read_rows
from peagle.data.template import ChatTemplate
from peagle.data.tokenize import RowTokenizer
from tests.data.toys import (
    CHATML,
    CHATML_TAGGED,
    FAMILIES,
    QWEN3_THINKING,
    TOOLS_LOOPED,
    chat,
    family_tokenizer,
    model_folder,
    prepare,
    rejected,
    toy_tokenizer,
    write_lines,
)

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}}
BASES: list[dict[str, Any]] = [
    chat("hello", "The answer is 42 .", "why", "\n\nI think <think> so", system="be brief"),
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "work</think>so"}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "w"}, "x"]},
            {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "tool_call_id": "c"},
            {"role": "assistant", "content": "It is 4"},
        ],
        "tools": json.dumps([{"name": "f", "parameters": {}}]),
    },
    {"prompt": "a", "response": "b c"},
    {"prompt": "only"},
    {"turns": ["one", "two"], "category": "qa"},
    {"instruction": "do", "input": "this", "output": "done it"},
    {"question": "q", "answer": "<<1+1=2>>2 #### 2"},
    {"text": "<|im_start|>assistant\nhi there<|im_end|>"},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0], "tail_length": 1},
    {"data": ["a", "b c", "d", "e f"]},
]
ODD: list[Any] = [
    None, True, False, 0, -1, 10**30, 1.5, float("nan"), "", " ", "\n\n", "narrator", "\ud83d", "<|im_end|>",
    "</think>", "{", "[]", [], {}, [None], [[]], {"role": "user"}, {"type": "image_url"}, "assistant", "tool",
    "x" * 3000, "\x00", [{"type": "tool_use"}], {"function": None}, ["a", 1], '{"a": ', "\u2028", "\udfff\ud800",
]  # fmt: skip


def mutate(value: Any, rng: random.Random, replace: float = 0.25) -> Any:
    """Change one place of a JSON value: replace, drop, double, rename, swap or nest it."""
    if rng.random() < replace or not isinstance(value, (dict, list)) or not value:
        return copy.deepcopy(rng.choice(ODD)) if rng.random() < 0.8 else [value]
    if isinstance(value, list):
        place = rng.randrange(len(value))
        kind = rng.randrange(5)
        if kind == 0:
            del value[place]
        elif kind == 1:
            value.insert(place, copy.deepcopy(value[place]))
        elif kind == 2:
            rng.shuffle(value)
        else:
            value[place] = mutate(value[place], rng)
        return value
    key = rng.choice(sorted(value))
    kind = rng.randrange(6)
    if kind == 0:
        del value[key]
    elif kind == 1:
        names = ["role", "from", "content", "value", "messages", "conversations", "thinking", "tool_calls", "input_ids"]
        value[rng.choice(names)] = value.pop(key)
    else:
        value[key] = mutate(value[key], rng)
    return value


def mutated_row(rng: random.Random) -> Any:
    row = copy.deepcopy(rng.choice(BASES))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        row = mutate(row, rng, 0.02)
    return row


def mutated_line(rng: random.Random) -> str:
    line = json.dumps(mutated_row(rng))
    if rng.random() < 0.1:
        place = rng.randrange(len(line) + 1)
        line = (
            line[:place] + rng.choice(['"', "}", "\\", "\\ud800", "\x00", "", "\t"]) + line[place + rng.randrange(3) :]
        )
    return line.replace("\n", " ")


MODELS = {
    "chatml": lambda: toy_tokenizer(CHATML),
    "tagged": lambda: toy_tokenizer(CHATML_TAGGED),
    "thinking": lambda: toy_tokenizer(QWEN3_THINKING),
    "tools": lambda: toy_tokenizer(TOOLS_LOOPED),
    **{name: (lambda name=name: family_tokenizer(name)) for name in FAMILIES},
}


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_thousands_of_mutated_rows_are_each_kept_or_rejected(tmp_path_factory, name, seed):
    folder = tmp_path_factory.mktemp("mutated")
    model = model_folder(folder / "model", MODELS[name]())
    rng = random.Random(seed)
    lines = [mutated_line(rng) for _ in range(200)]
    data = write_lines(folder / "d.jsonl", [*lines, chat("hello", "The answer")])
    num_rows = sum(bool(line.strip()) for line in lines) + 1
    flags = ["--mode", "text"] if rng.random() < 0.15 and name == "chatml" else []
    if flags:
        write_lines(data, [*lines, BASES[8]])
    seq_length = rng.choice((4, 16, 64, 8192)) if not flags else 8192
    status = prepare(model, data, folder / "out", "--quiet", "--seq-length", str(seq_length), *flags)
    if status == 2:  # everything was dropped, which a tiny limit can do
        assert seq_length < 64
        assert len(rejected(folder / "out")) == num_rows
        return
    assert status == 0
    check(folder / "out", num_rows, seq_length)


def check(folder: Path, num_rows: int, seq_length: int) -> None:
    prepared = load_prepared(folder)
    summary = prepared.summary
    assert summary["read"] == num_rows
    assert summary["read"] == summary["kept"] + sum(summary["dropped"].values())
    assert len(rejected(folder)) == sum(summary["dropped"].values())
    assert all(item["reason"] and item["line"] for item in rejected(folder))
    frequencies = [0] * summary["vocab_size"]
    ids = set()
    for index in range(len(prepared)):
        row = prepared.row(index)
        assert 2 <= len(row.input_ids) == len(row.loss_mask) <= seq_length
        assert 0 <= min(row.input_ids) <= max(row.input_ids) < summary["vocab_size"]
        assert set(row.loss_mask) <= {0, 1}
        assert sum(row.loss_mask) > 0
        assert row.label_positions()
        assert not row.tail_length or not any(row.loss_mask[-row.tail_length :])
        ids.add(row.row_id)
        for token, mask in zip(row.input_ids, row.loss_mask):
            frequencies[token] += mask
    assert len(ids) == len(prepared) == summary["rows"]
    assert prepared.frequencies.tolist() == frequencies


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(ODD),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "from", "content", "value", "text", "type", "tool_calls", "function", "name",
                             "arguments", "thinking"]) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)  # fmt: skip
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt"]) | JSON},
    optional={
        "content": st.text(max_size=30) | JSON,
        "reasoning_content": st.text(max_size=9) | JSON,
        "tool_calls": JSON,
    },
)
ROW = st.dictionaries(
    st.sampled_from(["prompt", "turns", "question", "answer", "tools", "system", "id", "chat_template_kwargs", "data",
                     "input_ids", "loss_mask", "tail_length", "source", "category"]), JSON, max_size=3,
) | st.fixed_dictionaries({"messages": st.lists(TURN | JSON, max_size=6) | JSON}, optional={"tools": JSON})  # fmt: skip
CONVERT = {
    name: RowTokenizer(
        template=ChatTemplate(tokenizer, {}),
        marks=None,
        no_template="",
        vocab_size=len(tokenizer),
        seq_length=64,
        minimum_valid_tokens=1,
    )
    for name, tokenizer in ((name, make()) for name, make in MODELS.items())
}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(ROW | JSON, min_size=1, max_size=8), name=st.sampled_from(sorted(CONVERT)))
def test_any_json_at_all_gives_one_outcome_a_row(tmp_path_factory, rows, name):
    path = write_lines(tmp_path_factory.mktemp("any") / "d.jsonl", [json.dumps(row) for row in rows])
    outcomes = [CONVERT[name](row) for row in read_rows([str(path)], None, "chat")]
    assert len(outcomes) == len(rows)
    for outcome in outcomes:
        assert (outcome.rejected is None) == bool(outcome.rows)
        assert all(sum(row.loss_mask) for row in outcome.rows)
