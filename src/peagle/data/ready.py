"""Rows that come with token ids and loss mask: what must hold of them before anything is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peagle.data.conversation import Message, UnusableRow
from peagle.data.turns import shown, turn


@dataclass(frozen=True)
class ReadyFields:
    """The token columns of such a row, checked."""

    input_ids: list[int]
    loss_mask: list[int]
    next_is_supervised: bool
    tail_length: int
    messages: tuple[Message, ...]


def ready_fields(record: dict[str, Any]) -> ReadyFields:
    """Read `input_ids`, `loss_mask` and, where given, `tail_length`, `next_is_supervised` and `messages`.

    Raises:
        UnusableRow: lengths differ, a value is no id or no 0/1, or a tail that is supervised or as long as the row.
    """
    ids = _integers(record["input_ids"], "input_ids")
    if "loss_mask" not in record:
        raise UnusableRow("bad token row", "input_ids without loss_mask")
    mask = _integers(record["loss_mask"], "loss_mask")
    if not ids:
        raise UnusableRow("bad token row", "input_ids is empty")
    if len(ids) != len(mask):
        raise UnusableRow("bad token row", f"{len(ids)} input_ids, but {len(mask)} values in loss_mask")
    odd = next((value for value in mask if value not in (0, 1)), None)
    if odd is not None:
        raise UnusableRow("bad token row", f"loss_mask holds {odd}, expected 0 and 1 only")
    tail = record.get("tail_length") or 0
    if isinstance(tail, bool) or not isinstance(tail, int) or not 0 <= tail < len(ids):
        raise UnusableRow("bad token row", f"tail_length is {shown(tail)}, expected 0 to {len(ids) - 1}")
    if tail and any(mask[-tail:]):
        raise UnusableRow("bad token row", f"the last {tail} tokens are a tail, but loss_mask is 1 there")
    if tail and not mask[-tail - 1]:
        raise UnusableRow("bad token row", f"the last {tail} tokens are a tail, but no reply ends before them")
    follows = record.get("next_is_supervised") or False
    if not isinstance(follows, bool):
        raise UnusableRow("bad token row", f"next_is_supervised is {shown(follows)}, expected true or false")
    if follows and (tail or not mask[-1]):
        raise UnusableRow("bad token row", "next_is_supervised, but the row does not end inside a reply")
    return ReadyFields(ids, mask, follows, tail, _messages(record.get("messages")))


def _integers(values: Any, what: str) -> list[int]:
    if not isinstance(values, list):
        raise UnusableRow("bad token row", f"{what} is {shown(values)}, expected a list of integers")
    for value in values:
        if type(value) is not int and type(value) is not bool:
            raise UnusableRow("bad token row", f"{what} holds {shown(value)}, expected integers")
    return [int(value) for value in values]


def _messages(raw: Any) -> tuple[Message, ...]:
    if not isinstance(raw, list):
        return ()
    try:
        return tuple(turn(item)[0] for item in raw)
    except UnusableRow:
        return ()  # informative only
