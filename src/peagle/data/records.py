"""The records between a data file and its token rows: what was read, and what it became or why it could not be used."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
"""One turn: `role` (system, user, assistant or tool), `content` (text), and where there are any `reasoning_content`,
`tool_calls` ([{"type": "function", "function": {"name", "arguments": object}, "id"?}]), `tool_call_id` and `name`."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation in the one layout that everything behind the readers knows.

    Turns alternate as chat templates demand: system turns first and merged, then user (or tool) turns and replies.
    The last turn may be a user's: then the conversation is a prompt, and `peagle regenerate` writes the reply.
    """

    row_id: str
    """Made of the row's own id and a hash of its content, so it survives shuffling; equal rows get `#2`, `#3`, ..."""
    source: str
    """The data set, or the category inside it: evaluation has one table row for each."""
    origin: str
    """File or hub name that it was read from."""
    line: int
    """Line in the file (or number of the row where there are no lines), from 1."""
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    """Tool declarations, [{"type": "function", "function": {...}}], empty if there are none."""
    template_options: dict[str, Any]
    """Further variables for the chat template (`enable_thinking`, ...), from the row's `chat_template_kwargs`."""
    next_turns: tuple[str, ...]
    """Prompt-only data of several turns (MT-Bench, Spec-Bench): what the user says after each reply."""
    repairs: tuple[str, ...]
    """What had to be repaired (`docs/data.md` has the rules), one short phrase each."""
    conversation: str = ""
    """See `TokenRow`."""

    @property
    def is_prompt(self) -> bool:
        """Whether the last turn waits for a reply."""
        return bool(self.messages) and self.messages[-1]["role"] in ("user", "tool")

    def opening(self) -> Conversation:
        """The conversation before its first reply, later user turns as `next_turns`: what regeneration starts from.

        User turns behind a tool's result are left out: they answer to calls that the verifier may never make. A
        conversation whose first reply is a tool call therefore opens with the turns before that call.
        """
        roles = [message["role"] for message in self.messages]
        if "assistant" not in roles:
            return self
        first = roles.index("assistant")
        before_tools = itertools.takewhile(lambda message: message["role"] != "tool", self.messages[first:])
        later = (message["content"] for message in before_tools if message["role"] == "user")
        return replace(self, messages=self.messages[:first], next_turns=(*later, *self.next_turns))

    def answered(self, reply: Message) -> Conversation:
        """This conversation with `reply` appended, and the next user turn behind it if there is one."""
        following = tuple({"role": "user", "content": text} for text in self.next_turns[:1])
        return replace(self, messages=(*self.messages, reply, *following), next_turns=self.next_turns[1:])


@dataclass(frozen=True, kw_only=True)
class TextRow:
    """Text that is rendered already (`--mode text`)."""

    row_id: str
    source: str
    origin: str
    line: int
    text: str
    repairs: tuple[str, ...]
    conversation: str = ""
    """See `TokenRow`."""


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """Token ids x_0 .. x_{T-1} of one conversation (or of one turn with its history), nothing shifted yet.

    This is what leaves `data/`; `layout/supervision.py` says which positions count.
    """

    row_id: str
    """Stable identity: survives shuffling of the input and another number of workers."""
    source: str
    input_ids: list[int]
    """[num_tokens]"""
    loss_mask: list[int]
    """1 where the token was written by the assistant, [num_tokens]."""
    next_is_supervised: bool
    """True iff the length limit cut the row inside a reply: the label x_T just past the row is then supervised too."""
    tail_length: int
    """How many trailing tokens lie past the answer's end: the verifier's own continuation, mask 0, kept for replay."""
    conversation: str = ""
    """The conversation that it is of: rows of one are never split over training and validation. It is recorded here,
    never read out of an id. Empty: no other row is of the same."""

    def label_positions(self) -> list[int]:
        """Positions whose verifier state is a target, a replay tail's included (`layout/supervision.py`)."""
        from peagle.layout.supervision import label_positions  # here: it loads torch, which readers do without

        return label_positions(self.loss_mask, self.next_is_supervised, self.tail_length)


@dataclass(frozen=True, kw_only=True)
class ReadyRow:
    """A row that came with its token ids and loss mask; `peagle regenerate` writes such rows."""

    row_id: str
    source: str
    origin: str
    line: int
    tokens: TokenRow


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A row that cannot be used. The reason is one of a few fixed phrases, the detail says what was found."""

    source: str
    origin: str
    line: int
    row_id: str | None
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.origin}:{self.line}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class UnusableRow(Exception):
    """Raised inside `data/` where a row turns out to be unusable; becomes a `Rejected`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def rejected(problem: UnusableRow, source: str, origin: str, line: int, row_id: str | None) -> Rejected:
    """The entry of an unusable row in the list of rejected ones."""
    return Rejected(
        source=source, origin=origin, line=line, row_id=row_id, reason=problem.reason, detail=problem.detail
    )


class RowIds:
    """Gives row ids: `<own id>.<hash>` or `<hash>`, then `#2`, `#3`, ... when the very same row comes again.

    They depend on content alone, not on the order of the input or the number of workers: rows with the same id differ
    in nothing but their place, so it does not matter which of them is `#2`.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def of_content(self, own_id: str | None, content: Any) -> dict[str, Any]:
        """`row_id` of a row that is known by its content, and the `conversation` that equal rows have in common.

        The hash is 16 hex digits of the SHA-256 of its sorted JSON.
        """
        text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
        digest = hashlib.sha256(text.encode("ascii")).hexdigest()[:16]
        wanted = f"{own_id}.{digest}" if own_id else digest
        return {"row_id": self.unique(wanted), "conversation": wanted}

    def unique(self, wanted: str) -> str:
        """`wanted`, with a counter behind it if it was handed out before."""
        count = self._seen.get(wanted, 0) + 1
        self._seen[wanted] = count
        return wanted if count == 1 else self.unique(f"{wanted}#{count}")
