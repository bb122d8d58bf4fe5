"""A verifier's chat template: rendering conversations as a server would, and turning the text into token ids once."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.data.conversation import Conversation, Message, UnusableRow
from peagle.data.turns import REASONING_KEYS
from peagle.errors import TemplateError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE_CALL = {"type": "function", "id": "probe0001", "function": {"name": "probe_name", "arguments": {"k_probe": "v"}}}
_PROBE_RESULT = "probe_result"
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
    return template.encode(template.render(conversation, len(conversation.messages), True))


class ChatTemplate:
    """The chat template of one tokenizer, with the facts that every rendering needs.

    Messages are handed over in the shape that this template reads: reasoning under the key it asks for, and tool
    arguments as an object or, for the few templates that paste them in as they are, as JSON text.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.options = dict(options)
        self.text = template_text(tokenizer)
        self.has_generation_tags = bool(GENERATION_TAG.search(self.text)) and bool(tokenizer.is_fast)
        self.reasoning_keys = tuple(
            key for key in REASONING_KEYS if re.search(rf"(?:\.|['\"]){key}\b(?!\s*=)", self.text)
        )

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
            UnusableRow: the template refuses these turns, or is known to drop the tool turns among them.
        """
        messages = conversation.messages[:num_messages]
        self._refuse_what_it_drops(messages)
        return self.render_messages(messages, conversation.tools, conversation.template_options, add_generation_prompt)

    def render_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Render turns given one by one; options of the row win over those of the run."""
        shaped = [self.shape(message) for message in messages]
        return self._apply(shaped, tools, options, add_generation_prompt=add_generation_prompt, tokenize=False)

    def tagged_mask(self, conversation: Conversation, num_messages: int) -> tuple[list[int], list[int]]:
        """Ids and assistant mask of the first `num_messages` turns, as the template's generation tags have it."""
        shaped = [self.shape(message) for message in conversation.messages[:num_messages]]
        found = self._apply(
            shaped,
            conversation.tools,
            conversation.template_options,
            add_generation_prompt=False,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        return list(found["input_ids"]), list(found["assistant_masks"])

    def _apply(self, messages: list[Message], tools: Any, options: Mapping[str, Any], **how: Any) -> Any:
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

    def shape(self, message: Message) -> Message:
        """A turn with the keys and argument form that this template reads."""
        reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
        if reasoning is None and calls is None:
            return message
        shaped = dict(message)
        if reasoning is not None:
            shaped.update(dict.fromkeys(self.reasoning_keys, reasoning))
        if calls is not None and self.wants_arguments_as_text:
            shaped["tool_calls"] = [_with_text_arguments(call) for call in calls]
        return shaped

    @functools.cached_property
    def wants_arguments_as_text(self) -> bool:
        """Whether tool arguments must be JSON text: an object makes the template fail or prints Python's notation."""
        shown = {form: self._probe([_probe_call(form)]) for form in ("object", "text")}
        as_object, as_text = shown["object"], shown["text"]
        if as_text is None or '{"k_probe"' not in as_text:
            return False
        return as_object is None or "{'k_probe'" in as_object

    @functools.cached_property
    def keeps_calls(self) -> bool:
        """Whether a tool call appears in the text; True where a probe cannot tell."""
        form = "text" if self.wants_arguments_as_text else "object"
        text = self._probe([_probe_call(form)])
        return text is None or "probe_name" in text

    @functools.cached_property
    def keeps_results(self) -> bool:
        """Whether a tool's result appears in the text; True where a probe cannot tell."""
        form = "text" if self.wants_arguments_as_text else "object"
        result = {"role": "tool", "content": _PROBE_RESULT, "tool_call_id": "probe0001", "name": "probe_name"}
        text = self._probe([_probe_call(form), result])
        return text is None or _PROBE_RESULT in text

    def _probe(self, messages: list[Message]) -> str | None:
        try:
            return self._apply(
                [{"role": "user", "content": "a"}, *messages], (), {}, add_generation_prompt=False, tokenize=False
            )
        except UnusableRow:
            return None

    def _refuse_what_it_drops(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if "tool_calls" in message and not self.keeps_calls:
                raise UnusableRow("template drops tool turns", "it does not print tool calls; give --chat-template")
            if message["role"] == "tool" and not self.keeps_results:
                raise UnusableRow("template drops tool turns", "it does not print tool results; give --chat-template")


def _probe_call(form: str) -> Message:
    call: dict[str, Any] = _PROBE_CALL
    calls = [_with_text_arguments(call)] if form == "text" else [call]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    import json

    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


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
