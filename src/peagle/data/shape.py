"""The shape in which a chat template reads its turns, found out by rendering short probes with it.

Templates disagree: reasoning stands under other keys, tool arguments are wanted as an object or as JSON text, a call
without text as null or as an empty text, and some print no tool turns at all.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.data.conversation import Message, UnusableRow
from peagle.data.turns import REASONING_KEYS

_WORD = r"(?:[\w-]+:)?(?:thinking|think|thought|reasoning|reason)"
OPENING_TAG = rf"(?:<\|?{_WORD}\|?>|<\|START_THINKING\|>|\[THINK\])"
CLOSING_TAG = rf"(?:<\|?/{_WORD}\|?>|<\|END_THINKING\|>|\[/THINK\])"
CLOSING = re.compile(CLOSING_TAG)
_CALL = {"type": "function", "id": "probe0001", "function": {"name": "probe_name", "arguments": {"k_probe": "v"}}}
_RESULT, _THOUGHT, _TEXT = "probe_result", "probe_thought", "probe_text"


@dataclass(frozen=True)
class ThinkFormat:
    """How reasoning is written in front of a reply: opening + before + reasoning + after + closing + gap + text."""

    opening: str
    before: str
    after: str
    closing: str
    gap: str


class Shape:
    """What one template wants; each fact is found when it is first needed."""

    def __init__(self, text: str, render: Callable[[list[Message], bool], str]) -> None:
        """
        Args:
            text: the template's source.
            render: renders turns as they are, without tools, with a generation prompt or not; raises `UnusableRow`
                where the template refuses them.
        """
        self._text, self._render = text, render
        self.reasoning_keys = tuple(key for key in REASONING_KEYS if re.search(rf"(?:\.|['\"]){key}\b(?!\s*=)", text))

    def of(self, message: Message) -> Message:
        """A turn with the keys and argument form that this template reads."""
        reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
        if reasoning is None and calls is None:
            return message
        shaped = dict(message)
        if reasoning is not None:
            shaped.update(dict.fromkeys(self.reasoning_keys, reasoning))
        if calls is not None:
            if self.wants_arguments_as_text:
                shaped["tool_calls"] = [_with_text_arguments(call) for call in calls]
            if not message["content"]:
                shaped["content"] = self.no_content
        return shaped

    def split(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The turns with reasoning that stands in the text moved into its own field, for a template that reads one.

        A closing tag alone stays where it is if the generation prompt opens the block: such a reply follows it so.
        """
        if not self.reasoning_keys:
            return tuple(messages)
        return tuple(self._split(message) for message in messages)

    def _split(self, message: Message) -> Message:
        content = message["content"]
        if message["role"] != "assistant" or "reasoning_content" in message or not CLOSING.search(content):
            return message
        found = split_thought(content)
        closing = CLOSING.search(content)
        if found is None or closing is None:
            return message
        if self.prompt_opens and opening_of(closing.group()) not in content[: closing.start()]:
            return message
        return {**message, "content": found[1], "reasoning_content": found[0]}

    def refuse_what_it_drops(self, messages: Sequence[Message], rendered: str) -> None:
        """Raise where tool turns are missing from a rendering of these messages.

        Raises:
            UnusableRow: a call's name is not in the text, or the template prints no tool results.
        """
        for message in messages:
            for call in message.get("tool_calls", ()):
                name = call["function"]["name"]
                if name not in rendered:
                    raise UnusableRow(
                        "template drops tool turns", f"it prints no call of {name!r}; give --chat-template"
                    )
            if message["role"] == "tool" and not self.keeps_results:
                raise UnusableRow("template drops tool turns", "it prints no tool results; give --chat-template")

    @functools.cached_property
    def wants_arguments_as_text(self) -> bool:
        """Whether tool arguments must be JSON text: an object makes the template fail or prints Python's notation."""
        as_object, as_text = (self._probe([_call(form, "")]) for form in ("object", "text"))
        if as_text is None or '{"k_probe"' not in as_text:
            return False
        return as_object is None or "{'k_probe'" in as_object

    @functools.cached_property
    def no_content(self) -> str | None:
        """What a tool call without text has as content: null, as the API sends it, unless the template prints that."""
        rendered = self._probe([_call(self._form, None)])
        return "" if rendered is None or "None" in rendered else None

    @functools.cached_property
    def keeps_results(self) -> bool:
        """Whether a tool's result appears in the text; True where a probe cannot tell."""
        result = {"role": "tool", "content": _RESULT, "tool_call_id": "probe0001", "name": "probe_name"}
        rendered = self._probe([_call(self._form, self.no_content), result])
        return rendered is None or _RESULT in rendered

    @functools.cached_property
    def prompt_opens(self) -> bool:
        """Whether the generation prompt ends with an opening think tag."""
        prompt = self._probe([], add_generation_prompt=True)
        return prompt is not None and re.search(rf"{OPENING_TAG}\s*$", prompt) is not None

    @functools.cached_property
    def think_format(self) -> ThinkFormat | None:
        """How this template writes reasoning, seen in a turn where it prints some; None if it never does."""
        thought = {"reasoning_content": _THOUGHT, **dict.fromkeys(self.reasoning_keys, _THOUGHT)}
        plain = {"role": "assistant", "content": _TEXT, **thought}
        pattern = re.compile(
            rf"({OPENING_TAG})(\s*){_THOUGHT}(\s*)({CLOSING_TAG})(\s*)(?={_TEXT})",
        )
        for turn in (plain, {**_call(self._form, _TEXT), **thought}):
            found = pattern.search(self._probe([turn]) or "")
            if found:
                return ThinkFormat(*found.groups())
        return None

    @property
    def _form(self) -> str:
        return "text" if self.wants_arguments_as_text else "object"

    def _probe(self, messages: list[Message], add_generation_prompt: bool = False) -> str | None:
        try:
            return self._render([{"role": "user", "content": "a"}, *messages], add_generation_prompt)
        except UnusableRow:
            return None


def _call(form: str, content: str | None) -> Message:
    call: dict[str, Any] = _CALL
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [_with_text_arguments(call) if form == "text" else call],
    }


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def split_thought(content: str) -> tuple[str, str] | None:
    """Reasoning and text of a content that holds both, or None.

    Either a whole think block in front of the text, or a closing tag alone, as replies are recorded whose opening tag
    stood in the prompt. The white space behind the block belongs to neither.

    Example:
        "<think>\\na\\n</think>\\n\\nb" and "a</think>b" give "a" and "b".
    """
    closing = CLOSING.search(content)
    if closing is None:
        return None
    thought, opening = content[: closing.start()], opening_of(closing.group())
    before, found, behind = thought.partition(opening)
    if found and before.strip():
        return None  # the tag is quoted in the text
    return (behind if found else thought).strip(), content[closing.end() :].lstrip()


def opening_of(closing: str) -> str:
    """The opening tag that belongs to a closing one."""
    return closing.replace("/", "", 1).replace("END_", "START_")
