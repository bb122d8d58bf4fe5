"""From one row that was read to its token rows: ids, loss mask, cut to length.

A conversation's replies are found by rendering it as a server would (`RowTokenizer`), those of text that is rendered
already by the template's own markers or a pattern (`TextMarks`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from peagle.data.boundaries import AddedTokens, Boundaries
from peagle.data.records import Conversation, Message, ReadyRow, Rejected, TextRow, TokenRow, UnusableRow, rejected
from peagle.data.replies import SUPPLIED, Reply, reply_of
from peagle.data.template import ChatTemplate
from peagle.errors import DataError, TemplateError

_USER = "\ue000user\ue000"
_REPLY = "\ue000reply\ue000"
NO_REPLY = "no reply"
NO_TOKEN = "no supervised token within --seq-length"
NO_SPAN = "no supervised token"
TOO_SHORT = "reply too short"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one row that was read: rows, or the reason why not."""

    origin: str
    line: int
    row_id: str
    rows: list[TokenRow] = field(default_factory=list)
    rejected: Rejected | None = None
    dropped_turns: list[str] = field(default_factory=list)
    """Reasons for which replies of a conversation that gives a row per reply were left out, though others were kept."""
    repairs: tuple[str, ...] = ()
    """What had to be repaired in the row."""
    notes: tuple[str, ...] = ()
    """What was unusual about its rendering."""
    method: str = ""
    """How the mask was found: `generation tags`, `prefixes`, `markers`, `pattern` or `ready`."""
    num_unsupervised: int = 0
    """Tokens of rows that were dropped because none of them is supervised."""
    num_cut: int = 0
    """Rows that the length limit cut."""
    example: list[int] = field(default_factory=list)
    """The first ids of a row that was dropped because no token is supervised, to show what it looked like."""


class RowTokenizer:
    """Makes token rows of what was read. One per process: it remembers the ids of recurring pieces of text."""

    def __init__(
        self,
        template: ChatTemplate | None,
        marks: TextMarks | None,
        no_template: str,
        vocab_size: int,
        seq_length: int,
        minimum_valid_tokens: int,
    ) -> None:
        """
        Args:
            template: the verifier's chat template; None if it has none.
            no_template: the error to raise when a conversation comes and there is no template.
            marks: how to find replies in rendered text; None in chat mode.
            vocab_size: rows of the verifier's embedding; an id beyond them rejects a row.
            seq_length: longer rows are cut.
            minimum_valid_tokens: rows with fewer supervised tokens are dropped.
        """
        self.template, self.marks, self.no_template = template, marks, no_template
        self.vocab_size, self.seq_length, self.minimum_valid_tokens = vocab_size, seq_length, minimum_valid_tokens
        self._added = AddedTokens.of(template.tokenizer) if template is not None else None
        self._pieces: dict[str, list[int]] = {}

    def __call__(self, row: Conversation | TextRow | ReadyRow | Rejected) -> Outcome:
        """Tokenize one row; whatever is wrong with it ends up in `Outcome.rejected`."""
        if isinstance(row, Rejected):
            return Outcome(origin=row.origin, line=row.line, row_id=row.row_id or "", rejected=row)
        notes: list[str] = []
        try:
            if isinstance(row, ReadyRow):
                method = "ready"
                found = [row.tokens]
            elif isinstance(row, TextRow):
                assert self.marks is not None
                ids, mask = text_tokens(self.marks, row.text)
                method, found = self.marks.method, [_uncut(row.row_id, row.source, ids, mask)]
            else:
                method, found = self._conversation(row, notes)
        except UnusableRow as problem:
            return _lost(row, problem)
        repairs = () if isinstance(row, ReadyRow) else row.repairs
        return self._cut_all(row, found, method, repairs, tuple(dict.fromkeys(notes)))

    def _conversation(self, row: Conversation, notes: list[str]) -> tuple[str, list[TokenRow]]:
        template = self.template
        if template is None:
            raise TemplateError(self.no_template)
        row = replace(row, messages=template.shape.split(row.messages))
        indices = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        if not indices:
            detail = "the conversation is a prompt only; let the verifier write the reply with `peagle regenerate`"
            raise UnusableRow(NO_REPLY, detail)
        if indices[-1] != len(row.messages) - 1:
            notes.append("turns behind the last reply dropped")
        replies = [reply_of(template, row, index) for index in indices]
        notes.extend(note for reply in replies for note in reply.notes)
        method = "generation tags" if template.has_generation_tags else "prefixes"
        last = replies[-1]
        if all(reply.is_rendered and last.text.startswith(reply.text) for reply in replies):
            whole = self._masked(row, replies, last, row.row_id)
            if whole is not None:
                return method, [whole]
            notes.append("a token of the whole text crosses the start of a reply")
        elif len(replies) > 1:
            notes.append("the template rewrites history: a row per reply")
        turns = []
        for number, reply in enumerate(replies, start=1):
            row_id = row.row_id if len(replies) == 1 else f"{row.row_id}/{number}"
            turns.append(self._masked(row, [reply], reply, row_id) or self._joined(row, reply, row_id))
        return method, turns

    def _masked(self, row: Conversation, replies: list[Reply], last: Reply, row_id: str) -> TokenRow | None:
        """Ids of `last.text` with `replies` supervised; None if a token crosses the start of a reply."""
        template, added = self.template, self._added
        assert template is not None
        assert added is not None
        tagged: list[int] | None = None
        if template.has_generation_tags and last.is_rendered:
            ids, tagged = template.tagged_mask(row, last.index + 1)
        else:
            ids = template.encode(last.text)
        bounds = Boundaries(last.text, ids, added, template.encode, self._pieces)
        mask = [0] * len(ids)
        for reply in replies:
            start = bounds.at(len(reply.prompt))
            end = bounds.end_of_turn(len(reply.prompt), len(reply.text))
            if start is None or end is None:
                return None
            _supervise(mask, start, end, tagged, ids[end - 1] in added.ending_ids)
        return _uncut(row_id, row.source, ids, mask)

    def _joined(self, row: Conversation, reply: Reply, row_id: str) -> TokenRow:
        """Prompt ids, then reply ids, as generation makes them where whole-text tokens would cross the seam."""
        template, added = self.template, self._added
        assert template is not None
        assert added is not None
        prompt = template.encode(reply.prompt)
        written = reply.text[len(reply.prompt) :]
        ids = template.encode(written)
        decode: Callable[..., str] = template.tokenizer.decode
        if decode(prompt + ids, **_PLAIN) != decode(template.encode(reply.text), **_PLAIN):
            detail = f"a token crosses the start of the reply in turn {reply.index + 1}, and its text cannot be split"
            raise UnusableRow("unstable template", detail)
        end = Boundaries(written, ids, added, template.encode, {}).end_of_turn(0, len(written))
        mask = [0] * len(prompt) + [int(i < (len(ids) if end is None else end)) for i in range(len(ids))]
        return _uncut(row_id, row.source, prompt + ids, mask)

    def _cut_all(
        self,
        row: Conversation | TextRow | ReadyRow,
        found: list[TokenRow],
        method: str,
        repairs: tuple[str, ...],
        notes: tuple[str, ...],
    ) -> Outcome:
        kept: list[TokenRow] = []
        dropped: list[UnusableRow] = []
        num_cut = num_unsupervised = 0
        example: list[int] = []
        for whole in found:
            problem = self._beyond_vocabulary(whole)
            if problem is not None:
                dropped.append(problem)
                continue
            cut = self._cut(whole)
            problem = self._useless(cut, whole)
            if problem is None:
                kept.append(cut)
                num_cut += cut is not whole
            else:
                dropped.append(problem)
                num_unsupervised += len(whole.input_ids)
                example = example or whole.input_ids[:_EXAMPLE]
        if not kept:
            lost = _lost(row, dropped[0])
            return replace(lost, num_unsupervised=num_unsupervised, example=example)
        return Outcome(
            origin=row.origin,
            line=row.line,
            row_id=row.row_id,
            rows=kept,
            dropped_turns=[problem.reason for problem in dropped],
            repairs=repairs,
            notes=notes,
            method=method,
            num_unsupervised=num_unsupervised,
            num_cut=num_cut,
        )

    def _beyond_vocabulary(self, row: TokenRow) -> UnusableRow | None:
        odd = next((token for token in row.input_ids if not 0 <= token < self.vocab_size), None)
        if odd is None:
            return None
        return UnusableRow("id beyond the vocabulary", f"id {odd}, the verifier has 0 to {self.vocab_size - 1}")

    def _cut(self, whole: TokenRow) -> TokenRow:
        limit, mask = self.seq_length, whole.loss_mask
        excess = len(mask) - limit
        if excess <= 0:
            return whole
        return replace(
            whole,
            input_ids=whole.input_ids[:limit],
            loss_mask=mask[:limit],
            next_is_supervised=bool(mask[limit - 1] and mask[limit]),
            tail_length=max(whole.tail_length - excess, 0),
        )

    def _useless(self, row: TokenRow, whole: TokenRow) -> UnusableRow | None:
        """Why training could learn nothing from a row, or None."""
        supervised = sum(row.loss_mask)
        if supervised == 0 and 1 in whole.loss_mask:
            first = whole.loss_mask.index(1)
            detail = f"the first reply begins at token {first + 1}, --seq-length is {self.seq_length}"
            return UnusableRow(NO_TOKEN, detail)
        if supervised == 0:
            return UnusableRow(NO_SPAN, f"0 of {len(whole.input_ids)} tokens supervised")
        if not row.label_positions():
            return UnusableRow(TOO_SHORT, "a reply of one token leaves nothing to draft")
        if supervised < self.minimum_valid_tokens:
            detail = f"{supervised} supervised tokens, --minimum-valid-tokens is {self.minimum_valid_tokens}"
            return UnusableRow(TOO_SHORT, detail)
        return None


_EXAMPLE = 200
_PLAIN = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def _supervise(mask: list[int], start: int, end: int, tagged: list[int] | None, has_end_token: bool) -> None:
    """Set the mask in [start, end), where generation tags agree; the end token counts even if the tags leave it out."""
    for place in range(start, end):
        mask[place] = 1 if tagged is None else tagged[place]
    if tagged is not None and has_end_token and any(tagged[start:end]):
        mask[end - 1] = 1


def _uncut(row_id: str, source: str, ids: list[int], mask: list[int]) -> TokenRow:
    return TokenRow(
        row_id=row_id, source=source, input_ids=ids, loss_mask=mask, next_is_supervised=False, tail_length=0
    )


def _lost(row: Conversation | TextRow | ReadyRow, problem: UnusableRow) -> Outcome:
    why = rejected(problem, row.source, row.origin, row.line, row.row_id)
    return Outcome(origin=row.origin, line=row.line, row_id=row.row_id, rejected=why)


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
