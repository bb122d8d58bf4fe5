"""What the verifier is sent and what it writes back, for each reply of a conversation, as text.

The prompt of a reply is the rendering of the turns before it with the generation prompt. The reply is what the
template's rendering of the conversation up to it adds: that the prompt is a prefix of that rendering is checked, not
assumed. Thinking templates break the assumption in known ways, handled here by name; what else breaks it is refused.
"""

import re
from dataclasses import dataclass

from peagle.data.records import Conversation, Message, UnusableRow
from peagle.data.template import CLOSING, CLOSING_TAG, OPENING_TAG, ChatTemplate, ThinkFormat, opening_of, split_thought

SUPPLIED = re.compile(rf"(?:(?P<opening>{OPENING_TAG})(?P<space>\s*)(?:{CLOSING_TAG}\s*)?|{CLOSING_TAG}\s*)$")
"""What a generation prompt may end with: an opening think tag, an empty think block, or a closing tag alone."""
EMPTY_BLOCK = re.compile(rf"\A\s*(?:{OPENING_TAG}\s*)?{CLOSING_TAG}\s*")
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
    # 1. The prompt and what is rendered behind it, or behind its header: the prompt less the think tags at its end.
    message = conversation.messages[index]
    prompt = template.render(conversation, index, True)
    supplied = SUPPLIED.search(prompt)
    header = prompt[: supplied.start()] if supplied else prompt
    start, remainder, is_plain = _rendered(template, conversation, index, prompt, header)
    opening = supplied["opening"] if supplied is not None and not CLOSING.search(supplied.group()) else None

    # 2. A reply that was recorded as generated, the opening tag in its prompt.
    content, reasoning = message["content"], message.get("reasoning_content")
    closing = CLOSING.search(content)
    if opening and closing is not None and not reasoning and opening_of(closing.group()) not in content:
        note = "reply continues the prompt's think tag"
        return Reply(index, prompt, prompt + content + _behind(template, conversation, index), False, (note,))

    # 3. Reasoning that the rendering drops. A prompt that closes its think block switches thinking off; a reply that
    #    thinks all the same begins before it.
    thought, text = split_thought(content) or ("", content)
    is_dropped = (reasoning or thought).strip() not in remainder
    block = _think_block(template, message, supplied) if is_dropped else None
    if block is not None:
        if supplied is not None and opening and block.lstrip().startswith(opening):
            begin, block = prompt, block.lstrip().removeprefix(opening).removeprefix(supplied["space"])
        else:
            begin = header
        if message.get("tool_calls") or "reasoning_content" in message:
            text = EMPTY_BLOCK.sub("", remainder, count=1)
        else:  # the text behind the block, letter for letter
            text += _behind(template, conversation, index)
        return Reply(index, begin, begin + block + text, False, ("reasoning put back that the template drops",))

    # 4. The rendering itself.
    if not remainder.strip():
        raise UnusableRow("template drops the reply", f"nothing is rendered for turn {index + 1}")
    unusual = {
        "reasoning left out: the template has no place for it": is_dropped,
        "earlier reasoning is dropped once the reply is there": not is_plain,
        "reply does not open with the prompt's think block": start != prompt,
    }
    return Reply(index, start, start + remainder, is_plain, tuple(note for note, holds in unusual.items() if holds))


def _rendered(
    template: ChatTemplate, conversation: Conversation, index: int, prompt: str, header: str
) -> tuple[str, str, bool]:
    """The prompt (or its header), what a rendering has behind it, and whether that rendering is the conversation's."""
    rendered = template.render(conversation, index + 1, False)
    if rendered.startswith(header):
        start = prompt if rendered.startswith(prompt) else header
        return start, rendered[len(start) :], True
    history = conversation.messages[:index]
    bare = [{key: value for key, value in turn.items() if key != "reasoning_content"} for turn in history]
    if bare != list(history):
        bare_prompt = template.render_messages(conversation, bare, True)
        bare_rendered = template.render_messages(conversation, [*bare, conversation.messages[index]], False)
        bare_header = bare_prompt[: len(bare_prompt) - (len(prompt) - len(header))]
        if rendered == bare_rendered and rendered.startswith(bare_header):
            is_whole = rendered.startswith(bare_prompt)
            return prompt if is_whole else header, rendered[len(bare_prompt if is_whole else bare_header) :], False
    same = next((i for i, (a, b) in enumerate(zip(prompt, rendered)) if a != b), min(len(prompt), len(rendered)))
    raise UnusableRow(
        "unstable template",
        f"the prompt of turn {index + 1} is no prefix of its rendering: at character {same} "
        f"{prompt[same : same + 24]!a} became {rendered[same : same + 24]!a}",
    )


def _think_block(template: ChatTemplate, message: Message, supplied: re.Match[str] | None) -> str | None:
    """The reasoning of a turn with its tags and white space, as the model wrote it; None where that is unknown."""
    content = str(message["content"])
    closing = CLOSING.search(content)
    if "reasoning_content" not in message and closing is not None:
        _, text = split_thought(content) or ("", content)
        block = content[: len(content) - len(text)]
        return block if opening_of(closing.group()) in block else opening_of(closing.group()) + block
    how = template.think_format
    named = CLOSING.search(template.text)
    if (
        how is None and named is not None
    ):  # on lines of their own, unless the prompt opens the block without a line feed
        on_lines = supplied is None or not supplied["opening"] or "\n" in supplied["space"]
        line, gap = ("\n", "\n\n") if on_lines else ("", "")
        how = ThinkFormat(opening_of(named.group()), line, line, named.group(), gap)
    if how is None:
        return None
    return f"{how.opening}{how.before}{message['reasoning_content'].strip()}{how.after}{how.closing}{how.gap}"


def _behind(template: ChatTemplate, conversation: Conversation, index: int) -> str:
    """What the template puts behind the text of this reply."""
    messages = [*conversation.messages[:index], {"role": "assistant", "content": _PROBE}]
    rendered = template.render_messages(conversation, messages, False)
    place = rendered.rfind(_PROBE)
    if place < 0:
        raise UnusableRow("template drops the reply", f"the text of turn {index + 1} is not rendered")
    return rendered[place + len(_PROBE) :]
