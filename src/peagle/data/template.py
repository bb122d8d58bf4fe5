"""A verifier's chat template: rendering conversations as a server would, and turning the text into token ids once."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from peagle.data.conversation import Conversation, Message, UnusableRow
from peagle.data.shape import Shape
from peagle.errors import TemplateError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
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
    conversation = replace(conversation, messages=template.shape.split(conversation.messages))
    return template.encode(template.render(conversation, len(conversation.messages), True))


class ChatTemplate:
    """The chat template of one tokenizer; turns are handed over in the shape that it reads."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.options = dict(options)
        self.text = template_text(tokenizer)
        self.has_generation_tags = bool(GENERATION_TAG.search(self.text)) and bool(tokenizer.is_fast)
        self.shape = Shape(self.text, self._render_bare)

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
        options = conversation.template_options
        rendered = self.render_messages(messages, conversation.tools, options, add_generation_prompt)
        self.shape.refuse_what_it_drops(messages, rendered)
        return rendered

    def render_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Render turns given one by one; options of the row win over those of the run."""
        shaped = [self.shape.of(message) for message in messages]
        return self._apply(shaped, tools, options, add_generation_prompt=add_generation_prompt, tokenize=False)

    def tagged_mask(self, conversation: Conversation, num_messages: int) -> tuple[list[int], list[int]]:
        """Ids and assistant mask of the first `num_messages` turns, as the template's generation tags have it."""
        shaped = [self.shape.of(message) for message in conversation.messages[:num_messages]]
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

    def _render_bare(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self._apply(messages, (), {}, add_generation_prompt=add_generation_prompt, tokenize=False)

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
