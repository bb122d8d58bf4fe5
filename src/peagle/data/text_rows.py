"""Rendered text (`--mode text`): where its replies are, by the template's own markers or by a pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from peagle.data.boundaries import AddedTokens
from peagle.data.conversation import Message, UnusableRow
from peagle.data.replies import SUPPLIED
from peagle.data.template import ChatTemplate
from peagle.errors import DataError

_USER = "\ue000user\ue000"
_REPLY = "\ue000reply\ue000"


@dataclass(frozen=True)
class TextMarks:
    """How to find replies in rendered text."""

    tokenizer: Any
    method: str
    """`markers` or `pattern`."""
    header: str
    """Text in front of every reply; empty with a pattern."""
    opening: str
    """What a generation prompt supplies behind the header (a think tag); never supervised."""
    endings: tuple[str, ...]
    """Texts that end a reply; the first one found does, itself included."""
    pattern: re.Pattern[str] | None
    """`--assistant-pattern`: its first group (or all of it) is supervised."""


def marks_of_template(template: ChatTemplate) -> TextMarks:
    """Read the markers off a template by rendering two short conversations with it.

    Raises:
        DataError: the template puts nothing before a reply by which it could be found.
    """
    user, reply = {"role": "user", "content": _USER}, {"role": "assistant", "content": _REPLY}
    try:
        bare, prompt = _render(template, [user], False), _render(template, [user], True)
        one, two = _render(template, [user, reply], False), _render(template, [user, reply, user, reply], False)
    except UnusableRow as problem:
        raise DataError(f"the chat template cannot be read for its markers ({problem.detail})") from None
    header = prompt[len(bare) :] if prompt.startswith(bare) else ""
    header = header or prompt[prompt.rfind(_USER) + len(_USER) :]
    supplied = SUPPLIED.search(header)
    opening = supplied.group() if supplied else ""
    header = header[: len(header) - len(opening)]
    if not header.strip():
        raise DataError("the chat template puts no marker before a reply; give --assistant-pattern")
    ends = AddedTokens.of(template.tokenizer)
    behind_last = one[one.rfind(_REPLY) + len(_REPLY) :]
    first = two.find(_REPLY) + len(_REPLY)
    behind_first = two[first : two.find(_USER, first)]
    endings = {_ending(behind_last, ends), _ending(behind_first, ends)} - {""}
    return TextMarks(template.tokenizer, "markers", header, opening, tuple(sorted(endings)), None)


def marks_of_pattern(tokenizer: Any, pattern: str) -> TextMarks:
    """Marks for `--assistant-pattern`.

    Raises:
        DataError: it is no regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise DataError(f"--assistant-pattern: not a regular expression ({error})") from None
    return TextMarks(tokenizer, "pattern", "", "", (), compiled)


def _render(template: ChatTemplate, messages: list[Message], add_generation_prompt: bool) -> str:
    return template.render_messages(messages, (), {}, add_generation_prompt)


def _ending(behind: str, added: AddedTokens) -> str:
    """What ends a reply: the first added token behind it with the text up to there, else the line behind it."""
    found = added.pattern.search(behind) if added.pattern else None
    return behind[: found.end()] if found else behind.rstrip()


def text_tokens(marks: TextMarks, text: str) -> tuple[list[int], list[int]]:
    """Tokenize rendered text as a completion server does and mark its replies.

    Special tokens that the tokenizer adds by itself are kept, but a BOS is not put in front of one that is there.

    Raises:
        UnusableRow: the text is empty.
    """
    found = marks.tokenizer(
        text,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids, offsets = list(found["input_ids"]), list(found["offset_mapping"])
    bos = marks.tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids, offsets = ids[1:], offsets[1:]
    if not ids:
        raise UnusableRow("no text", "the text is empty")
    spans = _pattern_spans(marks.pattern, text) if marks.pattern else _marker_spans(marks, text)
    mask = [0] * len(ids)
    place = 0
    for start, end in spans:
        while place < len(ids) and not _begins_at(text, offsets[place], start):
            place += 1
        while place < len(ids) and offsets[place][0] < end:
            mask[place] = int(_is_of_text(offsets, place))
            place += 1
    return ids, mask


def _begins_at(text: str, offset: tuple[int, int], start: int) -> bool:
    """Whether a token lies behind `start`, or crosses it with only white space before it (" The" of `A: The`)."""
    return offset[0] >= start or (offset[1] > start and text[offset[0] : start].isspace())


def _is_of_text(offsets: list[tuple[int, int]], place: int) -> bool:
    """False for the special tokens that the tokenizer put around the text: they have the offsets (0, 0)."""
    return tuple(offsets[place]) != (0, 0)


def _pattern_spans(pattern: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    group = 1 if pattern.groups else 0
    return [match.span(group) for match in pattern.finditer(text) if match.end(group) > match.start(group)]


def _marker_spans(marks: TextMarks, text: str) -> list[tuple[int, int]]:
    spans = []
    place = text.find(marks.header)
    while place >= 0:
        start = place + len(marks.header)
        if marks.opening and text.startswith(marks.opening, start):
            start += len(marks.opening)
        ends = [found + len(mark) for mark in marks.endings if (found := text.find(mark, start)) >= 0]
        end = min(ends, default=len(text))
        spans.append((start, end))
        place = text.find(marks.header, max(end, start))
    return spans
