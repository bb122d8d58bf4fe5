"""One row that was read to the token rows it gives: ids, loss mask, cut to length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from peagle.data.boundaries import AddedTokens, Boundaries
from peagle.data.conversation import Conversation, ReadyRow, Rejected, TextRow, UnusableRow
from peagle.data.replies import Reply, reply_of
from peagle.data.rows import TokenRow
from peagle.data.template import ChatTemplate
from peagle.data.text_rows import TextMarks, text_tokens
from peagle.errors import TemplateError

NO_REPLY = "no reply"
NO_TOKEN = "no supervised token within --seq-length"
NO_SPAN = "no supervised token"
TOO_SHORT = "reply too short"


@dataclass(frozen=True)
class Outcome:
    """What became of one row that was read: rows, or the reason why not."""

    origin: str
    line: int
    row_id: str
    rows: list[TokenRow]
    rejected: Rejected | None
    dropped_turns: list[str] = field(default_factory=list)
    """Reasons for which replies of a conversation that gives a row per reply were left out, though others were kept."""
    repairs: tuple[str, ...] = ()
    """What had to be mended in the row."""
    notes: tuple[str, ...] = ()
    """What was unusual about its rendering."""
    method: str = ""
    """How the mask was found: `generation tags`, `prefixes`, `markers`, `pattern` or `ready`."""
    num_unsupervised: int = 0
    """Tokens of rows that were dropped because none of them is supervised."""
    num_cut: int = 0
    """Rows that the length limit cut."""
    example: list[int] = field(default_factory=list)
    """The first ids of a row that was dropped for want of a supervised token, to show what it looked like."""


@dataclass(frozen=True)
class Tokens:
    """Ids and mask of one row before the length limit."""

    row_id: str
    ids: list[int]
    mask: list[int]
    next_is_supervised: bool = False
    tail_length: int = 0


class RowTokenizer:
    """Turns what was read into token rows. One per process: it remembers the ids of recurring pieces of text."""

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
            return Outcome(row.origin, row.line, row.row_id or "", [], row)
        notes: list[str] = []
        try:
            if isinstance(row, ReadyRow):
                method = "ready"
                found = [Tokens(row.row_id, row.input_ids, row.loss_mask, row.next_is_supervised, row.tail_length)]
            elif isinstance(row, TextRow):
                assert self.marks is not None
                ids, mask = text_tokens(self.marks, row.text)
                method, found = self.marks.method, [Tokens(row.row_id, ids, mask)]
            else:
                method, found = self._conversation(row, notes)
        except UnusableRow as problem:
            return _lost(row, problem)
        repairs = () if isinstance(row, ReadyRow) else row.repairs
        return self._cut_all(row, found, method, repairs, tuple(dict.fromkeys(notes)))

    def _conversation(self, row: Conversation, notes: list[str]) -> tuple[str, list[Tokens]]:
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
            turns.append(self._masked(row, [reply], reply, row_id) or self._joined(reply, row_id))
        return method, turns

    def _masked(self, row: Conversation, replies: list[Reply], last: Reply, row_id: str) -> Tokens | None:
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
        return Tokens(row_id, ids, mask)

    def _joined(self, reply: Reply, row_id: str) -> Tokens:
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
        return Tokens(row_id, prompt + ids, mask)

    def _cut_all(
        self,
        row: Conversation | TextRow | ReadyRow,
        found: list[Tokens],
        method: str,
        repairs: tuple[str, ...],
        notes: tuple[str, ...],
    ) -> Outcome:
        kept: list[TokenRow] = []
        dropped: list[UnusableRow] = []
        num_cut = num_unsupervised = 0
        example: list[int] = []
        for tokens in found:
            problem = self._beyond_vocabulary(tokens)
            if problem is not None:
                dropped.append(problem)
                continue
            cut = self._cut(tokens, row.source)
            problem = self._useless(cut, tokens)
            if problem is None:
                kept.append(cut)
                num_cut += len(cut.input_ids) < len(tokens.ids)
            else:
                dropped.append(problem)
                num_unsupervised += len(tokens.ids)
                example = example or tokens.ids[:_EXAMPLE]
        where = (row.origin, row.line, row.row_id)
        if not kept:
            lost = _lost(row, dropped[0])
            return replace(lost, num_unsupervised=num_unsupervised, example=example)
        reasons = [problem.reason for problem in dropped]
        return Outcome(*where, kept, None, reasons, repairs, notes, method, num_unsupervised, num_cut)

    def _beyond_vocabulary(self, tokens: Tokens) -> UnusableRow | None:
        if min(tokens.ids, default=0) >= 0 and max(tokens.ids, default=0) < self.vocab_size:
            return None
        odd = next(token for token in tokens.ids if not 0 <= token < self.vocab_size)
        return UnusableRow("id beyond the vocabulary", f"id {odd}, the verifier has 0 to {self.vocab_size - 1}")

    def _cut(self, tokens: Tokens, source: str) -> TokenRow:
        limit, size = self.seq_length, len(tokens.ids)
        if size <= limit:
            return TokenRow(
                tokens.row_id, source, tokens.ids, tokens.mask, tokens.next_is_supervised, tokens.tail_length
            )
        mask = tokens.mask
        return TokenRow(
            row_id=tokens.row_id,
            source=source,
            input_ids=tokens.ids[:limit],
            loss_mask=mask[:limit],
            next_is_supervised=bool(mask[limit - 1] and mask[limit]),
            tail_length=max(tokens.tail_length - (size - limit), 0),
        )

    def _useless(self, row: TokenRow, whole: Tokens) -> UnusableRow | None:
        """Why training could learn nothing from a row, or None."""
        supervised = sum(row.loss_mask)
        if supervised == 0 and 1 in whole.mask:
            first = whole.mask.index(1)
            detail = f"the first reply begins at token {first + 1}, --seq-length is {self.seq_length}"
            return UnusableRow(NO_TOKEN, detail)
        if supervised == 0:
            return UnusableRow(NO_SPAN, f"0 of {len(whole.ids)} tokens supervised")
        if b"\x01\x01" not in bytes(row.loss_mask[1:]) and not row.label_positions():
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


def _lost(row: Conversation | TextRow | ReadyRow, problem: UnusableRow) -> Outcome:
    rejected = Rejected(row.source, row.origin, row.line, row.row_id, problem.reason, problem.detail)
    return Outcome(row.origin, row.line, row.row_id, [], rejected)
