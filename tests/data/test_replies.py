"""What is sent and what is written back, under templates that think, drop and rewrite in the ways of real ones."""

from __future__ import annotations

import pytest

from peagle.data.formats import conversation_of
from peagle.data.records import Conversation
from peagle.data.template import ChatTemplate, ThinkFormat, split_thought
from peagle.data.tokenize import RowTokenizer
from tests.data.toys import OPENING, QWEN3, QWEN3_THINKING, chat, supervised, toy_tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|bot|>", "<|tool|>", "<|call|>")
CALLS = (
    "{%- for c in message.tool_calls or [] -%}{{ '<|call|>' + c.function.name + c.function.arguments }}{%- endfor -%}"
)
HEAD = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ '<|user|>' + message.content }}"
    "{%- elif message.role == 'tool' -%}{{ '<|tool|>' + message.content }}"
    "{%- else -%}"
)
TAIL = "{{ '<|im_end|>' }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}"
# Its prompt opens a block without a line feed, its renderings close one at once: DeepSeek-V3.1 with thinking on.
CLOSES = HEAD + "{{ '<|bot|></think>' + (message.content or '').split('</think>')[-1] }}" + CALLS + TAIL
THINKS = CLOSES + "{{ '<|bot|><think>' }}{%- endif -%}"
THINKS_NOT = CLOSES + "{{ '<|bot|></think>' }}{%- endif -%}"
# Prints the reasoning of tool calls only until a reply without a call is there: Kimi-K2, GPT-OSS.
FORGETS = (
    "{%- set ns = namespace(last=-1) -%}{%- for message in messages -%}"
    "{%- if message.role == 'assistant' and not message.tool_calls -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    + HEAD
    + "{%- set thought = message.reasoning_content if message.reasoning_content and loop.index0 > ns.last else '' -%}"
    "{{ '<|bot|><think>' + thought + '</think>' + (message.content or '') }}"
    + CALLS.replace("c.function.arguments", "c.function.arguments | tojson")
    + TAIL
    + "{{ '<|bot|>' }}{%- endif -%}"
)
NULL_CONTENT = (
    HEAD
    + "{%- if message.content is not none -%}{{ '<|bot|>' + message.content }}{%- endif -%}"
    + CALLS.replace("'<|call|>'", "'<|bot|><|call|>'")
    + TAIL
    + "{{ '<|bot|>' }}{%- endif -%}"
)


def rows_of(template, record, **options):
    tokenizer = toy_tokenizer(template, SPECIALS)
    conversation = Conversation(row_id="r", source="s", origin="f", line=1, **conversation_of(record))
    convert = RowTokenizer(
        template=ChatTemplate(tokenizer, options),
        marks=None,
        no_template="",
        vocab_size=len(tokenizer),
        seq_length=4096,
        minimum_valid_tokens=1,
    )
    outcome = convert(conversation)
    assert outcome.rejected is None, outcome.rejected
    found = []
    for row in outcome.rows:
        start = row.loss_mask.index(1)
        found.append((tokenizer.decode(row.input_ids[:start]), supervised(row, tokenizer)))
    return found, outcome.notes


THOUGHT = {"role": "assistant", "reasoning": "work", "content": "so"}
FIELD = {"messages": [{"role": "user", "content": "why work"}, THOUGHT]}
INLINE = chat("why work", "<think>\nwork\n</think>\n\nso")
TOOLS = {
    "messages": [
        {"role": "user", "content": "sky"},
        {"role": "assistant", "content": None, "reasoning": "need", "tool_calls": [{"name": "look", "arguments": {}}]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "Blue ."},
    ]
}


def test_reasoning_of_a_field_is_put_back_in_the_manner_of_the_prompt():
    assert rows_of(THINKS, FIELD)[0] == [("<|user|>why work<|bot|><think>", ["work</think>so<|im_end|>"])]
    lines = THINKS.replace("'<|bot|><think>'", "'<|bot|><think>\\n'")
    assert rows_of(lines, FIELD)[0] == [("<|user|>why work<|bot|><think>\n", ["work\n</think>\n\nso<|im_end|>"])]


def test_reasoning_in_the_text_is_put_back_letter_for_letter():
    assert rows_of(THINKS, INLINE)[0] == [("<|user|>why work<|bot|><think>", ["\nwork\n</think>\n\nso<|im_end|>"])]


def test_a_reply_that_thinks_though_the_prompt_forbids_it_begins_before_the_closed_block():
    for record, text in ((FIELD, "<think>\nwork\n</think>\n\nso"), (INLINE, "<think>\nwork\n</think>\n\nso")):
        found, notes = rows_of(THINKS_NOT, record)
        assert found == [("<|user|>why work<|bot|>", [text + "<|im_end|>"])]
        assert notes == ("reasoning put back that the template drops",)
    assert rows_of(THINKS_NOT, chat("a", "work</think>so"))[0] == [
        ("<|user|>a<|bot|>", ["<think>work</think>so<|im_end|>"])
    ]


def test_a_closed_block_of_the_prompt_is_not_supervised():
    assert rows_of(THINKS_NOT, chat("a", "so be it"))[0] == [("<|user|>a<|bot|></think>", ["so be it<|im_end|>"])]
    found, notes = rows_of(QWEN3, chat("a", "so be it"), enable_thinking=False)
    assert found[0][1] == ["so be it<|im_end|>"]
    assert found[0][0].endswith("<think>\n\n</think>\n\n")
    assert notes == ()


def test_reasoning_before_a_tool_call_is_put_back_before_the_call():
    first, second = rows_of(THINKS, TOOLS)[0]
    assert first == ("<|user|>sky<|bot|><think>", ["need</think><|call|>look{}<|im_end|>"])
    assert second[1] == ["</think>Blue .<|im_end|>"]


def test_a_template_that_forgets_reasoning_once_the_reply_is_there_is_read_without_it():
    found, notes = rows_of(FORGETS, TOOLS)
    assert found == [
        ("<|user|>sky<|bot|>", ["<think>need</think><|call|>look{}<|im_end|>"]),
        (
            "<|user|>sky<|bot|><think>need</think><|call|>look{}<|im_end|><|tool|>blue<|bot|>",
            ["<think></think>Blue .<|im_end|>"],
        ),
    ]
    assert "earlier reasoning is dropped once the reply is there" in notes


def test_the_format_of_reasoning_is_seen_where_the_template_prints_some():
    assert rows_of(FORGETS, FIELD)[0] == [("<|user|>why work<|bot|>", ["<think>work</think>so<|im_end|>"])]
    assert rows_of(FORGETS, INLINE)[0] == [("<|user|>why work<|bot|>", ["<think>work</think>so<|im_end|>"])]
    assert ChatTemplate(toy_tokenizer(FORGETS), {}).think_format == ThinkFormat("<think>", "", "", "</think>", "")
    assert ChatTemplate(toy_tokenizer(QWEN3), {}).think_format == ThinkFormat("<think>", "\n", "\n", "</think>", "\n\n")
    assert ChatTemplate(toy_tokenizer(THINKS), {}).think_format is None


def test_a_call_without_text_is_null_for_a_template_that_asks_and_empty_for_one_that_prints_null():
    assert rows_of(NULL_CONTENT, TOOLS)[0][0][1] == ["<|call|>look{}<|im_end|>", "Blue .<|im_end|>"]
    printed = NULL_CONTENT.replace("message.content is not none", "true")
    printed = printed.replace("'<|bot|>' + message.content", "'<|bot|>' + message.content | string")
    for template, expected in ((NULL_CONTENT, None), (printed, "")):
        assert ChatTemplate(toy_tokenizer(template, SPECIALS), {}).no_content == expected


def test_a_call_whose_name_is_not_printed_rejects_the_row():
    nameless = FORGETS.replace("c.function.name + ", "")
    tokenizer = toy_tokenizer(nameless, SPECIALS)
    conversation = Conversation(row_id="r", source="s", origin="f", line=1, **{**conversation_of(TOOLS), "tools": ()})
    outcome = RowTokenizer(
        template=ChatTemplate(tokenizer, {}),
        marks=None,
        no_template="",
        vocab_size=len(tokenizer),
        seq_length=4096,
        minimum_valid_tokens=1,
    )(conversation)
    assert outcome.rejected.reason == "template drops tool turns"
    assert "'look'" in outcome.rejected.detail


def test_reasoning_without_a_place_is_noted():
    plain = HEAD + "{{ '<|bot|>' + message.content }}" + TAIL + "{{ '<|bot|>' }}{%- endif -%}"
    found, notes = rows_of(plain, FIELD)
    assert found == [("<|user|>why work<|bot|>", ["so<|im_end|>"])]
    assert notes == ("reasoning left out: the template has no place for it",)


def test_reasoning_that_also_stands_in_the_question_is_not_taken_for_rendered():
    ((_, (reply,)),) = rows_of(THINKS, {"messages": [{"role": "user", "content": "work"}, THOUGHT]})[0]
    assert reply == "work</think>so<|im_end|>"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>\na\n</think>\n\nb", ("a", "b")),
        ("a</think>b", ("a", "b")),
        ("<|START_THINKING|>a<|END_THINKING|>b", ("a", "b")),
        ("[THINK]a[/THINK]b", ("a", "b")),
        ("<seed:think>a</seed:think>b", ("a", "b")),
        ("write <think>x</think> like this", None),
        ("no tags", None),
    ],
)
def test_reasoning_and_text_are_told_apart(content, expected):
    assert split_thought(content) == expected


@pytest.mark.parametrize(
    ("template", "opens"), [(OPENING, True), (QWEN3_THINKING, True), (QWEN3, False), (THINKS_NOT, False)]
)
def test_a_prompt_that_opens_a_block_is_known(template, opens):
    template = ChatTemplate(toy_tokenizer(template, SPECIALS), {})
    assert template.prompt_opens is opens
