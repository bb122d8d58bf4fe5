"""What the verifier is sent and what it writes back, for each reply of a conversation, as text.

The prompt of a reply is the rendering of the turns before it with the generation prompt. The reply is what the
template's rendering of the conversation up to it adds: that the prompt is a prefix of that rendering is checked, not
assumed. Thinking templates break the assumption in known ways, handled here by name; what else breaks it is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from peagle.data.conversation import Conversation, Message, UnusableRow
from peagle.data.template import ChatTemplate

_WORD = r"(?:[\w-]+:)?(?:thinking|think|thought|reasoning|reason)"
SUPPLIED = re.compile(rf"(<\|?{_WORD}\|?>)(\s*)(?:(<\|?/{_WORD}\|?>)\s*)?$")
"""An opening think tag (perhaps with its closing tag) at the end of a generation prompt."""
CLOSING = re.compile(rf"<\|?/{_WORD}\|?>")
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


def reply_of(template: ChatTemplate, conversation: Conversation, index: int) -> Reply:
    """Find prompt and reply of the assistant turn `index`.

    Besides the plain case (the prompt is a prefix of the rendering) these are known:

    - The generation prompt ends with an opening think tag and the reply holds the closing tag only, because it was
      recorded as generated: the reply follows the prompt as it is.
    - The rendering drops the reply's reasoning (DeepSeek-R1's template, from field or content): it is put back where
      the model wrote it, if the template names think tags at all.
    - The reply has no think block where the generation prompt opens one: it starts at the header without the tag.

    Raises:
        UnusableRow: the template refuses the turns, or its prompt is no prefix of its rendering.
    """
    message = conversation.messages[index]
    prompt = template.render(conversation, index, True)
    rendered = template.render(conversation, index + 1, False)
    supplied = SUPPLIED.search(prompt)
    opens = supplied is not None and supplied.group(3) is None
    content, reasoning = message["content"], message.get("reasoning_content")
    closing = CLOSING.search(content)
    opened = closing is not None and _opening_of(closing.group()) in content[: closing.start()]
    if opens and closing is not None and not opened and not reasoning:
        return _built(template, conversation, index, prompt, content, "reply continues the prompt's think tag")
    lost = _lost_reasoning(template, message, closing.start() if closing and opened else None, rendered)
    if lost is not None:
        return _with_reasoning(template, conversation, index, prompt, lost)
    notes: tuple[str, ...] = ()
    if reasoning and reasoning.strip() not in rendered:
        notes = ("reasoning left out: the template has no place for it",)
    if rendered.startswith(prompt):
        return _checked(Reply(index, prompt, rendered, True, notes))
    if supplied is not None and rendered.startswith(prompt[: supplied.start()]):
        notes = (*notes, "reply does not open with the prompt's think block")
        return _checked(Reply(index, prompt[: supplied.start()], rendered, True, notes))
    raise UnusableRow("unstable template", _difference(prompt, rendered, index))


def _checked(reply: Reply) -> Reply:
    if not reply.text[len(reply.prompt) :].strip():
        raise UnusableRow("template drops the reply", f"nothing is rendered for turn {reply.index + 1}")
    return reply


def _opening_of(closing: str) -> str:
    return closing.replace("/", "", 1)


def _lost_reasoning(template: ChatTemplate, message: Message, inline_end: int | None, rendered: str) -> str | None:
    """The reply with its reasoning as the model wrote it, if the rendering lacks the reasoning; else None."""
    content = str(message["content"])
    reasoning = message.get("reasoning_content")
    if inline_end is not None:
        closing = CLOSING.search(content)
        assert closing is not None
        opening = _opening_of(closing.group())
        thought = content[content.index(opening) + len(opening) : inline_end].strip()
        return content if thought and thought not in rendered else None
    if not reasoning or reasoning.strip() in rendered:
        return None
    closing = CLOSING.search(template.text)
    if closing is None:
        return None
    return f"{_opening_of(closing.group())}\n{reasoning.strip()}\n{closing.group()}\n\n{content}"


def _with_reasoning(
    template: ChatTemplate, conversation: Conversation, index: int, prompt: str, full_reply: str
) -> Reply:
    """Put the reply behind the prompt, less an opening tag that the prompt has supplied already."""
    note = "reasoning put back that the template drops"
    supplied = SUPPLIED.search(prompt)
    if supplied is None:
        return _built(template, conversation, index, prompt, full_reply, note)
    if supplied.group(3) is not None:  # thinking is switched off in the prompt, yet the reply thinks
        return _built(template, conversation, index, prompt[: supplied.start()], full_reply, note)
    before, _, behind = full_reply.partition(supplied.group(1))
    if before.strip():
        return _built(template, conversation, index, prompt[: supplied.start()], full_reply, note)
    shared = supplied.group(2)
    return _built(template, conversation, index, prompt, behind.removeprefix(shared), note)


def _built(template: ChatTemplate, conversation: Conversation, index: int, prompt: str, reply: str, note: str) -> Reply:
    """A reply put together from what was generated and what the template puts behind a reply."""
    message = conversation.messages[index]
    probe = {"role": "assistant", "content": _PROBE}
    messages = [*conversation.messages[:index], probe]
    rendered = template.render_messages(messages, conversation.tools, conversation.template_options, False)
    place = rendered.rfind(_PROBE)
    if place < 0 or message.get("tool_calls"):
        raise UnusableRow("template drops the reply", f"the reasoning of turn {index + 1} cannot be put back")
    return _checked(Reply(index, prompt, prompt + reply + rendered[place + len(_PROBE) :], False, (note,)))


def _difference(prompt: str, rendered: str, index: int) -> str:
    same = next((i for i, (a, b) in enumerate(zip(prompt, rendered)) if a != b), min(len(prompt), len(rendered)))
    return (
        f"the prompt of turn {index + 1} is no prefix of its rendering: at character {same} "
        f"{prompt[same : same + 24]!a} became {rendered[same : same + 24]!a}"
    )
