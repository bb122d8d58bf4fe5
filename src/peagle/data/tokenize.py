"""From one row that was read to its token rows: ids, loss mask, cut to length.

A conversation's replies are found by rendering it as a server would (`RowTokenizer`), those of text that is rendered
already by the template's own markers or a pattern (`TextMarks`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from peagle.data.boundaries import Boundaries
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
BEYOND_VOCABULARY = "id beyond the vocabulary"


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
    notes: tuple[str, ...] = ()
    """What was unusual about its rendering."""
    method: str = ""
    """How the mask was found: `generation tags`, `prefixes`, `markers`, `pattern` or `ready`."""
    num_unsupervised: int = 0
    """Tokens of rows that were dropped because none of them is supervised."""
    num_cut: int = 0
    example: list[int] = field(default_factory=list)
    """The first ids of a row that was dropped because no token is supervised, to show what it looked like."""


@dataclass(kw_only=True)
class RowTokenizer:
    """Makes token rows of what was read. One per process: it remembers the ids of recurring pieces of text."""

    template: ChatTemplate | None
    """The verifier's; None if it has none."""
    no_template: str
    """The error to raise when a conversation comes and there is no template."""
    marks: TextMarks | None
    """How to find replies in rendered text; None in chat mode."""
    vocab_size: int
    """Rows of the verifier's embedding; an id beyond them rejects a row."""
    seq_length: int
    """Longer rows are cut."""
    minimum_valid_tokens: int
    """Rows with fewer supervised tokens are dropped."""
    _pieces: dict[str, list[int]] = field(default_factory=dict, init=False)

    def __call__(self, row: Conversation | TextRow | ReadyRow | Rejected) -> Outcome:
        """Tokenize one row; whatever is wrong with it ends up in `Outcome.rejected`.

        Raises:
            TemplateError: a conversation comes and there is no template.
        """
        if isinstance(row, Rejected):
            return Outcome(origin=row.origin, line=row.line, row_id=row.row_id or "", rejected=row)
        # 1. The whole rows that it gives.
        notes: list[str] = []
        dropped: list[UnusableRow] = []
        whole_rows: list[TokenRow] = []
        method = ""
        try:
            if isinstance(row, ReadyRow):
                method, whole_rows = "ready", [row.tokens]
            elif isinstance(row, TextRow):
                assert self.marks is not None
                method, whole_rows = self.marks.method, [_uncut(row, "", *text_tokens(self.marks, row.text))]
            elif self.template is None:
                raise TemplateError(self.no_template)
            else:
                method = "generation tags" if self.template.has_generation_tags else "prefixes"
                whole_rows = self._conversation(self.template, row, notes)
        except UnusableRow as problem:
            dropped.append(problem)
        # 2. Cut to length, and checked.
        rows: list[TokenRow] = []
        num_cut = num_unsupervised = 0
        example: list[int] = []
        for whole in whole_rows:
            try:
                rows.append(self._cut(whole))
                num_cut += rows[-1] is not whole
            except UnusableRow as problem:
                dropped.append(problem)
                if problem.reason != BEYOND_VOCABULARY:
                    num_unsupervised += len(whole.input_ids)
                    example = example or whole.input_ids[:200]
        # 3. What became of it.
        return Outcome(
            origin=row.origin,
            line=row.line,
            row_id=row.row_id,
            rows=rows,
            rejected=None if rows else rejected(dropped[0], row.source, row.origin, row.line, row.row_id),
            dropped_turns=[problem.reason for problem in dropped] if rows else [],
            repairs=() if isinstance(row, ReadyRow) else row.repairs,
            notes=tuple(dict.fromkeys(notes)),
            method=method,
            num_unsupervised=num_unsupervised,
            num_cut=num_cut,
            example=example,
        )

    def _conversation(self, template: ChatTemplate, row: Conversation, notes: list[str]) -> list[TokenRow]:
        """One row where a rendering of the whole holds every reply as it was exchanged, else a row per reply."""
        row = replace(row, messages=template.split(row.messages))
        indices = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        if not indices:
            detail = "the conversation is a prompt only; let the verifier write the reply with `peagle regenerate`"
            raise UnusableRow(NO_REPLY, detail)
        if indices[-1] != len(row.messages) - 1:
            notes.append("turns behind the last reply dropped")
        template.prove(row, indices[-1] + 1)
        replies = [reply_of(template, row, index) for index in indices]
        notes.extend(note for reply in replies for note in reply.notes)
        last = replies[-1]
        if all(reply.is_rendered and last.text.startswith(reply.text) for reply in replies):
            whole = self._masked(template, row, replies, "")
            if whole is not None:
                return [whole]
            notes.append("a token of the whole text crosses the start of a reply")
        elif len(replies) > 1:
            notes.append("the template rewrites history: a row per reply")
        rows = []
        for number, reply in enumerate(replies, start=1):
            suffix = "" if len(replies) == 1 else f"/{number}"
            rows.append(self._masked(template, row, [reply], suffix) or self._joined(template, row, reply, suffix))
        return rows

    def _masked(self, template: ChatTemplate, row: Conversation, replies: list[Reply], suffix: str) -> TokenRow | None:
        """Ids of the last reply's text with `replies` supervised; None if a token crosses the start of a reply.

        Where the template has generation tags they must agree; the end token counts even if they leave it out.
        """
        last = replies[-1]
        tagged: list[int] | None = None
        if template.has_generation_tags and last.is_rendered:
            ids, tagged = template.tagged_mask(row, last.index + 1)
        else:
            ids = template.encode(last.text)
        bounds = Boundaries(last.text, ids, template.added_tokens, template.encode, self._pieces)
        mask = [0] * len(ids)
        for reply in replies:
            start = bounds.at(len(reply.prompt))
            end = bounds.end_of_turn(len(reply.prompt), len(reply.text))
            if start is None or end is None:
                return None
            mask[start:end] = [1] * (end - start) if tagged is None else tagged[start:end]
            if ids[end - 1] in template.added_tokens.ending_ids and any(mask[start:end]):
                mask[end - 1] = 1
        return _uncut(row, suffix, ids, mask)

    def _joined(self, template: ChatTemplate, row: Conversation, reply: Reply, suffix: str) -> TokenRow:
        """Prompt ids, then reply ids, as generation makes them where whole-text tokens would cross the seam."""
        prompt = template.encode(reply.prompt)
        written = reply.text[len(reply.prompt) :]
        ids = template.encode(written)
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        decode: Callable[..., str] = template.tokenizer.decode
        if decode(prompt + ids, **plain) != decode(template.encode(reply.text), **plain):
            detail = f"a token crosses the start of the reply in turn {reply.index + 1}, and its text cannot be split"
            raise UnusableRow("unstable template", detail)
        end = Boundaries(written, ids, template.added_tokens, template.encode, {}).end_of_turn(0, len(written))
        mask = [0] * len(prompt) + [int(i < (len(ids) if end is None else end)) for i in range(len(ids))]
        return _uncut(row, suffix, prompt + ids, mask)

    def _cut(self, whole: TokenRow) -> TokenRow:
        """The row itself or, where it is longer than the limit, its beginning.

        Raises:
            UnusableRow: training could learn nothing from it, or an id is beyond the verifier's vocabulary.
        """
        odd = next((token for token in whole.input_ids if not 0 <= token < self.vocab_size), None)
        if odd is not None:
            raise UnusableRow(BEYOND_VOCABULARY, f"id {odd}, the verifier has 0 to {self.vocab_size - 1}")
        limit, mask, row = self.seq_length, whole.loss_mask, whole
        if len(mask) > limit:
            row = replace(
                whole,
                input_ids=whole.input_ids[:limit],
                loss_mask=mask[:limit],
                next_is_supervised=bool(mask[limit - 1] and mask[limit]),
                tail_length=max(whole.tail_length - (len(mask) - limit), 0),
            )
        supervised = sum(row.loss_mask)
        if supervised == 0 and 1 in mask:
            raise UnusableRow(NO_TOKEN, f"the first reply begins at token {mask.index(1) + 1}, --seq-length is {limit}")
        if supervised == 0:
            raise UnusableRow(NO_SPAN, f"0 of {len(mask)} tokens supervised")
        if not row.label_positions():
            raise UnusableRow(TOO_SHORT, "a reply of one token leaves nothing to draft")
        if supervised < self.minimum_valid_tokens:
            detail = f"{supervised} supervised tokens, --minimum-valid-tokens is {self.minimum_valid_tokens}"
            raise UnusableRow(TOO_SHORT, detail)
        return row


def _uncut(row: Conversation | TextRow, suffix: str, ids: list[int], mask: list[int]) -> TokenRow:
    return TokenRow(
        row_id=row.row_id + suffix,
        source=row.source,
        input_ids=ids,
        loss_mask=mask,
        next_is_supervised=False,
        tail_length=0,
        conversation=row.conversation or row.row_id,
    )


@dataclass(frozen=True)
class TextMarks:
    """How to find replies in rendered text."""

    tokenizer: Any
    method: str
    """`markers` or `pattern`."""
    pattern: re.Pattern[str]
    """Its first group (or all of it) is supervised."""
    shown: str
    """What is looked for, for messages."""


def marks_of_template(template: ChatTemplate) -> TextMarks:
    """Read the markers off a template by rendering two short conversations with it.

    A reply begins behind the header that the template puts before one and behind what a generation prompt supplies
    after that (a think tag), and ends with the first text that the template puts behind a reply, that text included.

    Raises:
        DataError: the template puts nothing before a reply by which it could be found.
    """
    user, reply = {"role": "user", "content": _USER}, {"role": "assistant", "content": _REPLY}
    turns: list[list[Message]] = [[user], [user, reply], [user, reply, user, reply]]
    try:
        prompt = template.render_messages(None, turns[0], True)
        bare, one, two = (template.render_messages(None, messages, False) for messages in turns)
    except UnusableRow as problem:
        raise DataError(f"the chat template cannot be read for its markers ({problem.detail})") from None
    header = prompt[len(bare) :] if prompt.startswith(bare) else ""
    header = header or prompt[prompt.rfind(_USER) + len(_USER) :]
    supplied = SUPPLIED.search(header)
    opening = supplied.group() if supplied else ""
    header = header[: len(header) - len(opening)]
    if not header.strip():
        raise DataError("the chat template puts no marker before a reply; give --assistant-pattern")
    added = template.added_tokens.pattern
    endings = set()
    for behind in (one.rpartition(_REPLY)[2], two.partition(_REPLY)[2].partition(_USER)[0]):
        token = added.search(behind) if added else None
        endings.add(behind[: token.end()] if token else behind.rstrip())
    ends = "|".join(re.escape(ending) for ending in sorted(endings - {""}, key=len))
    body = rf".*?(?:{ends})|.*" if ends else ".*"
    pattern = re.compile(f"{re.escape(header)}(?:{re.escape(opening)})?({body})", re.DOTALL)
    return TextMarks(template.tokenizer, "markers", pattern, header)


def text_tokens(marks: TextMarks, text: str) -> tuple[list[int], list[int]]:
    """Tokenize rendered text as a completion server does and mark its replies.

    Special tokens that the tokenizer adds by itself are kept, but a BOS is not put in front of one that is there.

    Raises:
        UnusableRow: the text is empty.
    """
    found = marks.tokenizer(
        text, return_offsets_mapping=True, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    ids, offsets = list(found["input_ids"]), [tuple(offset) for offset in found["offset_mapping"]]
    bos = marks.tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids, offsets = ids[1:], offsets[1:]
    if not ids:
        raise UnusableRow("no text", "the text is empty")
    mask = [0] * len(ids)
    place = 0
    group = 1 if marks.pattern.groups else 0
    for start, end in (match.span(group) for match in marks.pattern.finditer(text) if match[group]):
        while place < len(ids) and offsets[place][0] < start:
            first, behind = offsets[place]
            if behind > start and text[first:start].isspace():  # only white space before it: " The" of `A: The`
                break
            place += 1
        while place < len(ids) and offsets[place][0] < end:
            mask[place] = int(offsets[place] != (0, 0))  # the offsets of special tokens put around the text
            place += 1
    return ids, mask
