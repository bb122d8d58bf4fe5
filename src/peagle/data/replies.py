"""What the verifier is sent and what it writes back, for each reply of a conversation, as text.

The prompt of a reply is the rendering of the turns before it with the generation prompt. The reply is what the
template's rendering of the conversation up to it adds: that the prompt is a prefix of that rendering is checked, not
assumed. Thinking templates break the assumption in known ways, handled here by name; what else breaks it is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from peagle.data.records import Conversation, Message, UnusableRow
from peagle.data.template import CLOSING, CLOSING_TAG, OPENING_TAG, ChatTemplate, ThinkFormat, opening_of, split_thought

SUPPLIED = re.compile(rf"(?:(?P<opening>{OPENING_TAG})(?P<space>\s*)(?:{CLOSING_TAG}\s*)?|{CLOSING_TAG}\s*)$")
"""What a generation prompt may end with: an opening think tag, an empty think block, or a closing tag alone."""
EMPTY_BLOCK = re.compile(rf"\s*(?:{OPENING_TAG}\s*)?{CLOSING_TAG}\s*")
"""What a template may print in front of a reply whose reasoning it drops."""
_PROBE = "\ue000reply\ue000"


@dataclass(frozen=True)
class Reply:
    """One assistant turn as a server and its model would have exchanged it."""

    index: int
    """Place of the turn in the conversation's messages."""
    prompt: str
    """What is sent: the text before the first token that the model writes."""
    text: str
    """Prompt, reply and what the template puts behind it."""
    is_rendered: bool
    """Whether `text` is the template's own rendering; False where the reply had to be put together (see `reply_of`)."""
    notes: tuple[str, ...]
    """What was unusual, for the counts of the run."""


@dataclass(frozen=True)
class _Seen:
    """A rendering that begins with the prompt, or with its header: the prompt less the think tags at its end."""

    prompt: str
    """What is sent."""
    remainder: str
    """What the rendering has behind the prompt, or behind the header."""
    is_whole: bool
    """Whether it is behind the whole prompt."""
    is_plain: bool
    """Whether it is the rendering of the conversation as it is."""
    supplied: re.Match[str] | None
    """The think tags at the end of the prompt."""

    @property
    def header(self) -> str:
        """The prompt without these tags."""
        return self.prompt[: self.supplied.start()] if self.supplied else self.prompt


def reply_of(template: ChatTemplate, conversation: Conversation, index: int) -> Reply:
    """Find prompt and reply of the assistant turn `index`.

    Besides the plain case (the prompt is a prefix of the rendering) these are known:

    - The generation prompt ends with an opening think tag and the reply holds the closing tag only, because it was
      recorded as generated: the reply follows the prompt as it is.
    - The rendering drops the reply's reasoning (DeepSeek-R1, Kimi-K2): it is put back where the model wrote it, if the
      template names think tags at all.
    - The reply has no think block where the generation prompt opens (or closes) one: it starts at the header.
    - Adding the reply makes the template drop the reasoning of earlier tool calls (GPT-OSS, Kimi-K2): the reply is read
      off a rendering without that reasoning, and follows the prompt that has it.

    Raises:
        UnusableRow: the template refuses the turns, or its prompt is no prefix of its rendering.
    """
    message = conversation.messages[index]
    seen = _seen(template, conversation, index)
    opens = seen.supplied is not None and not CLOSING.search(seen.supplied.group())
    content, reasoning = message["content"], message.get("reasoning_content")
    closing = CLOSING.search(content)
    if opens and closing is not None and not reasoning and opening_of(closing.group()) not in content:
        note = "reply continues the prompt's think tag"
        return Reply(index, seen.prompt, seen.prompt + content + _behind(template, conversation, index), False, (note,))
    thought = reasoning or (split_thought(content) or ("", ""))[0]
    if thought.strip() and thought.strip() not in seen.remainder:
        block = _think_block(template, message, seen.supplied)
        if block is not None:
            return _with_thought(template, conversation, index, seen, block)
    notes = []
    if thought.strip() and thought.strip() not in seen.remainder:
        notes.append("reasoning left out: the template has no place for it")
    if not seen.is_plain:
        notes.append("earlier reasoning is dropped once the reply is there")
    if not seen.is_whole:
        notes.append("reply does not open with the prompt's think block")
    if not seen.remainder.strip():
        raise UnusableRow("template drops the reply", f"nothing is rendered for turn {index + 1}")
    prompt = seen.prompt if seen.is_whole else seen.header
    return Reply(index, prompt, prompt + seen.remainder, seen.is_plain, tuple(notes))


def _seen(template: ChatTemplate, conversation: Conversation, index: int) -> _Seen:
    """Render the prompt and the turn behind it, and see that the one begins the other."""
    prompt = template.render(conversation, index, True)
    rendered = template.render(conversation, index + 1, False)
    supplied = SUPPLIED.search(prompt)
    header = prompt[: supplied.start()] if supplied else prompt
    if rendered.startswith(header):
        is_whole = rendered.startswith(prompt)
        return _Seen(prompt, rendered[len(prompt if is_whole else header) :], is_whole, True, supplied)
    history = conversation.messages[:index]
    bare = [{key: value for key, value in turn.items() if key != "reasoning_content"} for turn in history]
    if bare != list(history):
        given = (conversation.tools, conversation.template_options)
        bare_prompt = template.render_messages(bare, *given, True)
        bare_rendered = template.render_messages([*bare, conversation.messages[index]], *given, False)
        bare_header = bare_prompt[: len(bare_prompt) - (len(prompt) - len(header))]
        if rendered == bare_rendered and rendered.startswith(bare_header):
            is_whole = rendered.startswith(bare_prompt)
            remainder = rendered[len(bare_prompt if is_whole else bare_header) :]
            return _Seen(prompt, remainder, is_whole, False, supplied)
    raise UnusableRow("unstable template", _difference(prompt, rendered, index))


def _think_block(template: ChatTemplate, message: Message, supplied: re.Match[str] | None) -> str | None:
    """The reasoning of a turn with its tags and white space, as the model wrote it; None where that is unknown."""
    content = str(message["content"])
    closing = CLOSING.search(content)
    if "reasoning_content" not in message and closing is not None:
        _, text = split_thought(content) or ("", content)
        block = content[: len(content) - len(text)]
        return block if opening_of(closing.group()) in block else opening_of(closing.group()) + block
    how = template.shape.think_format or _guessed_format(template, supplied)
    if how is None:
        return None
    return f"{how.opening}{how.before}{message['reasoning_content'].strip()}{how.after}{how.closing}{how.gap}"


def _guessed_format(template: ChatTemplate, supplied: re.Match[str] | None) -> ThinkFormat | None:
    """The format of a template that never prints reasoning: tags on lines of their own, unless its prompt opens
    the block without a line feed."""
    closing = CLOSING.search(template.text)
    if closing is None:
        return None
    on_lines = supplied is None or not supplied["opening"] or "\n" in supplied["space"]
    line, gap = ("\n", "\n\n") if on_lines else ("", "")
    return ThinkFormat(opening_of(closing.group()), line, line, closing.group(), gap)


def _with_thought(template: ChatTemplate, conversation: Conversation, index: int, seen: _Seen, block: str) -> Reply:
    """Put a think block in front of a reply that was rendered without it, less the tag that the prompt supplies.

    A prompt that closes its think block switches thinking off; a reply that thinks all the same begins before it.
    """
    message = conversation.messages[index]
    prompt, supplied = seen.prompt, seen.supplied
    if supplied is not None:
        opening = supplied["opening"] or ""
        if opening and not CLOSING.search(supplied.group()) and block.lstrip().startswith(opening):
            block = block.lstrip().removeprefix(opening).removeprefix(supplied["space"])
        else:
            prompt = seen.header
    if message.get("tool_calls") or "reasoning_content" in message:
        empty = EMPTY_BLOCK.match(seen.remainder)
        rest = seen.remainder[empty.end() :] if empty else seen.remainder
    else:  # the text behind the block, letter for letter
        rest = str(message["content"])
        rest = (split_thought(rest) or ("", rest))[1] + _behind(template, conversation, index)
    return Reply(index, prompt, prompt + block + rest, False, ("reasoning put back that the template drops",))


def _behind(template: ChatTemplate, conversation: Conversation, index: int) -> str:
    """What the template puts behind the text of this reply."""
    messages = [*conversation.messages[:index], {"role": "assistant", "content": _PROBE}]
    rendered = template.render_messages(messages, conversation.tools, conversation.template_options, False)
    place = rendered.rfind(_PROBE)
    if place < 0:
        raise UnusableRow("template drops the reply", f"the text of turn {index + 1} is not rendered")
    return rendered[place + len(_PROBE) :]


def _difference(prompt: str, rendered: str, index: int) -> str:
    same = next((i for i, (a, b) in enumerate(zip(prompt, rendered)) if a != b), min(len(prompt), len(rendered)))
    return (
        f"the prompt of turn {index + 1} is no prefix of its rendering: at character {same} "
        f"{prompt[same : same + 24]!a} became {rendered[same : same + 24]!a}"
    )
