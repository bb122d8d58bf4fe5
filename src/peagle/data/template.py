"""A verifier's chat template: rendering conversations as a server would, and turning the text into token ids once.

Templates read their turns in different forms (reasoning under one key or another, tool arguments as text or as an
object). What one template reads is found out by rendering short probes with it.
"""

from __future__ import annotations

import functools
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.data.boundaries import AddedTokens
from peagle.data.formats import REASONING_KEYS
from peagle.data.records import Conversation, Message, UnusableRow
from peagle.errors import ConfigError, TemplateError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WORD = r"(?:[\w-]+:)?(?:thinking|think|thought|reasoning|reason)"
OPENING_TAG = rf"(?:<\|?{_WORD}\|?>|<\|START_THINKING\|>|\[THINK\])"
CLOSING_TAG = rf"(?:<\|?/{_WORD}\|?>|<\|END_THINKING\|>|\[/THINK\])"
CLOSING = re.compile(CLOSING_TAG)
_FUNCTION = {"name": "probe_name", "arguments": {"k_probe": "v"}}
_CALL: dict[str, Any] = {"type": "function", "id": "probe0001", "function": _FUNCTION}
_RESULT, _THOUGHT, _TEXT = "probe_result", "probe_thought", "probe_text"
_CACHE: weakref.WeakKeyDictionary[Any, ChatTemplate] = weakref.WeakKeyDictionary()


def render_prompt(tokenizer: Any, conversation: Conversation) -> list[int]:
    """Token ids of what a server sends the model for this conversation, generation prompt included.

    Args:
        tokenizer: a Transformers tokenizer with a chat template.
        conversation: ends with a user's or a tool's turn (see `Conversation.opening` and `answered`).

    Raises:
        TemplateError: the tokenizer has no chat template.
        UnusableRow: the template refuses this conversation; the reason is for the list of rejected rows.
    """
    template = ChatTemplate.of(tokenizer)
    conversation = replace(conversation, messages=template.split(conversation.messages))
    return template.encode(template.render(conversation, len(conversation.messages), True))


@dataclass(frozen=True)
class ThinkFormat:
    """How reasoning is written in front of a reply: opening + before + reasoning + after + closing + gap + text."""

    opening: str
    before: str
    after: str
    closing: str
    gap: str


class ChatTemplate:
    """The chat template of one tokenizer, and the form in which it reads turns, each trait probed when first needed."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.options = dict(options)
        self.text = template_text(tokenizer)
        self.has_generation_tags = bool(GENERATION_TAG.search(self.text)) and bool(tokenizer.is_fast)
        self.reasoning_keys = tuple(
            key for key in REASONING_KEYS if re.search(rf"(?:\.|['\"]){key}\b(?!\s*=)", self.text)
        )

    @functools.cached_property
    def added_tokens(self) -> AddedTokens:
        """The added tokens of its tokenizer."""
        return AddedTokens.of(self.tokenizer)

    @staticmethod
    def of(tokenizer: Any) -> ChatTemplate:
        """The template of a tokenizer, made once, without further options."""
        found = _CACHE.get(tokenizer)
        if found is None or found.text != template_text(tokenizer):
            found = _CACHE[tokenizer] = ChatTemplate(tokenizer, {})
        return found

    def render(self, conversation: Conversation, num_messages: int, add_generation_prompt: bool) -> str:
        """Render the first `num_messages` turns.

        Raises:
            UnusableRow: the template refuses these turns, or is known to drop the tool turns among them: a call's name
                is not in the text, or the template prints no tool results.
        """
        messages = conversation.messages[:num_messages]
        rendered = self.render_messages(conversation, messages, add_generation_prompt)
        for message in messages:
            for call in message.get("tool_calls", ()):
                name = call["function"]["name"]
                if name not in rendered:
                    detail = f"it prints no call of {name!r}; give --chat-template"
                    raise UnusableRow("template drops tool turns", detail)
            if message["role"] == "tool" and not self.keeps_results:
                raise UnusableRow("template drops tool turns", "it prints no tool results; give --chat-template")
        return rendered

    def prove(self, conversation: Conversation, num_messages: int) -> None:
        """Show that the rendering of the first `num_messages` turns holds what they say, each inside its own turn.

        Every text, and the name and texts of every call, is replaced by a marker of its own, and the rendering of that
        must hold all markers, turn after turn (a system prompt may stand anywhere). A name that also stands in a
        declaration, or a text that another turn repeats, proves nothing. Reasoning is left out: templates drop it on
        purpose (`replies.reply_of`).

        Raises:
            UnusableRow: a turn's text or call isn't rendered, or in another turn's place.
        """
        marked = [_marked(message, number) for number, message in enumerate(conversation.messages[:num_messages])]
        try:
            turns = [turn for turn, _ in marked]
            rendered = self.render_messages(conversation, turns, False).lower()  # history may be rewritten in capitals
        except UnusableRow:
            return  # a template that looks into texts; what it makes of the real ones is looked at by its reader
        reached = 0
        for number, (message, own) in enumerate(marked, start=1):
            places = {what: rendered.find(marker) for what, marker in own}
            gone = next((what for what, place in places.items() if place < 0), None)
            if gone is not None:
                reason = (
                    "template drops tool turns" if gone.startswith(("call", "argument")) else "template drops a text"
                )
                raise UnusableRow(reason, f"it does not print the {gone} of turn {number}; give --chat-template")
            if message["role"] == "system" or not places:
                continue
            if min(places.values()) < reached:
                raise UnusableRow("unstable template", f"it prints turn {number} inside an earlier one")
            reached = max(places.values())

    def render_messages(
        self, conversation: Conversation | None, messages: Sequence[Message], add_generation_prompt: bool
    ) -> str:
        """Render turns with a conversation's tools and options, if one is given; its options win over the run's."""
        shaped = [self._shaped(message) for message in messages]
        return str(self._apply(conversation, shaped, add_generation_prompt=add_generation_prompt, tokenize=False))

    def tagged_mask(self, conversation: Conversation, num_messages: int) -> tuple[list[int], list[int]]:
        """Ids and assistant mask of the first `num_messages` turns, as the template's generation tags have it."""
        found = self._apply(
            conversation,
            [self._shaped(message) for message in conversation.messages[:num_messages]],
            add_generation_prompt=False,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        return list(found["input_ids"]), list(found["assistant_masks"])

    def _apply(self, conversation: Conversation | None, messages: list[Message], **how: Any) -> Any:
        tools, options = (conversation.tools, conversation.template_options) if conversation is not None else ((), {})
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, **{**self.options, **options, **how}
            )
        except Exception as error:  # a template is a program of the model's authors and may raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UnusableRow("template refuses the row", f"{type(error).__name__}: {lines[0][:160]!a}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text, without special tokens of the tokenizer's own: the template printed its BOS.

        This is what `apply_chat_template(tokenize=True)` and a chat server do, so ids are the same everywhere.
        """
        found = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        return list(found["input_ids"])

    def _shaped(self, message: Message) -> Message:
        """A turn with the keys and argument form that this template reads."""
        reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
        shaped = dict(message)
        if reasoning is not None:
            shaped.update(dict.fromkeys(self.reasoning_keys, reasoning))
        if calls is not None:
            if self.wants_arguments_as_text:
                shaped["tool_calls"] = [_with_text_arguments(call) for call in calls]
            if not message["content"]:
                shaped["content"] = self.no_content
        if shaped.get("content") and message["role"] in self.roles_with_parts:
            shaped["content"] = [{"type": "text", "text": shaped["content"]}]
        return shaped

    @functools.cached_property
    def roles_with_parts(self) -> frozenset[str]:
        """Roles whose text this template reads as a list of parts only; as plain text it would be dropped."""
        found = set()
        for role in ("system", "user", "assistant"):
            shown = []
            for as_parts in (False, True):
                text, user = ([{"type": "text", "text": one}] if as_parts else one for one in (_TEXT, "a"))
                turns: list[Message] = [{"role": role, "content": text}]
                if role != "user":
                    turns.insert(int(role == "system"), {"role": "user", "content": user})
                shown.append(_TEXT in (self._tried(turns) or ""))
            if shown == [False, True]:
                found.add(role)
        return frozenset(found)

    def split(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The turns with reasoning that stands in the text moved into its own field, for a template that reads one.

        A closing tag alone stays where it is if the generation prompt opens the block: such a reply follows it so.
        """
        return tuple(self._split(message) for message in messages) if self.reasoning_keys else tuple(messages)

    def _split(self, message: Message) -> Message:
        content = message["content"]
        closing = CLOSING.search(content)
        if message["role"] != "assistant" or "reasoning_content" in message or closing is None:
            return message
        parts = split_thought(content)
        is_continued = opening_of(closing.group()) not in content[: closing.start()] and self.prompt_opens
        if parts is None or is_continued:
            return message
        return {**message, "content": parts[1], "reasoning_content": parts[0]}

    @functools.cached_property
    def wants_arguments_as_text(self) -> bool:
        """Whether tool arguments must be JSON text: an object makes the template fail or prints Python's notation."""
        as_object, as_text = (self._probe([_call(is_text, "")]) for is_text in (False, True))
        if as_text is None or '{"k_probe"' not in as_text:
            return False
        return as_object is None or "{'k_probe'" in as_object

    @functools.cached_property
    def no_content(self) -> str | None:
        """What a tool call without text has as content: null, as the API sends it, unless the template prints that."""
        rendered = self._probe([_call(self.wants_arguments_as_text, None)])
        return "" if rendered is None or "None" in rendered else None

    @functools.cached_property
    def keeps_results(self) -> bool:
        """Whether a tool's result appears in the text; True where a probe cannot tell."""
        result = {"role": "tool", "content": _RESULT, "tool_call_id": "probe0001", "name": "probe_name"}
        rendered = self._probe([_call(self.wants_arguments_as_text, self.no_content), result])
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
        pattern = re.compile(rf"({OPENING_TAG})(\s*){_THOUGHT}(\s*)({CLOSING_TAG})(\s*)(?={_TEXT})")
        for turn in (plain, {**_call(self.wants_arguments_as_text, _TEXT), **thought}):
            if found := pattern.search(self._probe([turn]) or ""):
                return ThinkFormat(*found.groups())
        return None

    def _probe(self, messages: list[Message], add_generation_prompt: bool = False) -> str | None:
        """These turns behind a user's, rendered as they are; None where the template refuses them."""
        return self._tried([{"role": "user", "content": "a"}, *messages], add_generation_prompt)

    def _tried(self, turns: list[Message], add_generation_prompt: bool = False) -> str | None:
        """These turns as they are; None where the template refuses them."""
        try:
            return str(self._apply(None, turns, add_generation_prompt=add_generation_prompt, tokenize=False))
        except UnusableRow:
            return None


def _marked(message: Message, number: int) -> tuple[Message, list[tuple[str, str]]]:
    """A turn with markers in place of what it says, and what (text, call, argument) has which."""
    own: list[tuple[str, str]] = []

    def mark(what: str) -> str:
        own.append((what, f"q{number}z{len(own)}q"))
        return own[-1][1]

    turn = dict(message)
    text = message["content"] or ""
    closing = CLOSING.search(text) if message["role"] == "assistant" else None
    thought = text[: closing.end()] if closing is not None else ""
    if text[len(thought) :].strip():
        turn["content"] = thought + mark("text")
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        function["name"] = mark(f"call of {function['name']!r}")
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            function["arguments"] = {
                key: mark(f"argument {key!r}") if isinstance(value, str) and value else value
                for key, value in arguments.items()
            }
        calls.append({**call, "function": function})
    if calls:
        turn["tool_calls"] = calls
    return turn, own


def use_template_file(tokenizer: Any, path: Path | None) -> None:
    """Let a tokenizer use a Jinja file (`--chat-template`) instead of its own template; None leaves it as it is.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: cannot be read ({error})") from None


def template_text(tokenizer: Any) -> str:
    """The source of a tokenizer's chat template (all of them, where it has several).

    Raises:
        TemplateError: it has none.
    """
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        return "\n".join(f"{name}:\n{found[name]}" for name in sorted(found))
    if not found:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise TemplateError(
            f"{name}: the tokenizer has no chat template. Give one with --chat-template FILE, "
            "or rendered text with --mode text, or rows with input_ids and loss_mask."
        )
    return str(found)


def _call(has_text_arguments: bool, content: str | None) -> Message:
    call = _with_text_arguments(_CALL) if has_text_arguments else _CALL
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


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
