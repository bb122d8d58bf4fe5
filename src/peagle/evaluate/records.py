"""Answers with their states, for replay: from the store, or from the verifier on the spot."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peagle.drafter import DrafterConfig
from peagle.engine import Answer, Engine, Request, Sampling
from peagle.errors import StoreError
from peagle.evaluate.contest import TIE_GAP
from peagle.evaluate.items import Item
from peagle.evaluate.replay import Recorded
from peagle.states.batch import StoredRow
from peagle.states.store import StoreReader
from peagle.verifier.transformers import TransformersVerifier
from peagle.verifier.weights import VerifierHead

logger = logging.getLogger(__name__)
_ROWS_AT_ONCE = 16
_CHOICES_AT_ONCE = 256


@dataclass
class OffPolicy:
    """Recorded tokens that are not the verifier's own greedy choice: decoding would not have written them."""

    tokens: int = 0
    judged: int = 0
    dtype: torch.dtype = torch.float32
    """In which the verifier's choice was computed."""

    @property
    def note(self) -> str | None:
        """A warning where it matters."""
        if self.tokens <= self.judged // 1000:
            return None
        found = f"{self.tokens} of {self.judged} recorded tokens are not the verifier's own greedy choice"
        if self.dtype != torch.float32 and self.tokens <= self.judged // 50:
            name = str(self.dtype).removeprefix("torch.")
            return (
                f"{found}; so few are the rounding of {name}. Exact: --dtype float32, at `peagle regenerate` and here"
            )
        return (
            f"{found}: replay then only estimates acceptance. Let the verifier write the answers (`peagle regenerate`, "
            "temperature 0)"
        )


def open_store(folder: Path, drafter: DrafterConfig) -> StoreReader:
    """Open a store whose states this drafter reads.

    Raises:
        StoreError: no store, or one of other layers or another verifier's shape.
    """
    reader = StoreReader.open(folder)
    spec = reader.spec
    for label, found, wanted in (
        ("layers", list(spec.aux_layer_ids), list(drafter.aux_layer_ids)),
        ("hidden size", spec.hidden_size, drafter.hidden_size),
        ("vocabulary size", spec.vocab_size, drafter.vocab_size),
    ):
        if found != wanted:
            raise StoreError(
                f"{folder}: {label} {found}, the drafter reads {wanted}; extract again with the drafter's, or leave "
                "--hidden-states-path away to have the verifier compute them"
            )
    return reader


def from_store(
    reader: StoreReader, items: Sequence[Item], head: VerifierHead, is_greedy: bool, off_policy: OffPolicy
) -> Iterator[Recorded]:
    """Recorded answers whose states are stored, an item at a time.

    Args:
        reader: the store.
        items: replies of its rows.
        head: the verifier's: it tells whether the tokens are the verifier's own.
        is_greedy: judge the tokens; sampled ones are not the most likely ones.
        off_policy: counts those that are not.

    Raises:
        StoreError: a row is not in the store, or was stored with other tokens.
    """
    last: StoredRow | None = None
    for item in items:
        if last is None or last.row.row_id != item.row_id:
            last = reader.read(item.row_id)
        ids = [*item.prompt_ids, *(item.recorded_ids or []), *item.tail_ids]
        if last.row.input_ids[: len(ids)] != ids:
            raise StoreError(f"{reader.folder}: row {item.row_id} was stored with other tokens; extract again")
        states = torch.zeros(len(last.row.input_ids), last.last_states.shape[1], dtype=last.last_states.dtype)
        states[last.label_pos] = last.last_states
        end = item.start + len(item.recorded_ids or [])
        choices = None
        if is_greedy:
            positions = last.label_pos[(last.label_pos >= item.start) & (last.label_pos + 1 < len(ids))]
            choices = choices_at(head, states, ids, positions, off_policy)
        yield Recorded(item.row_id, item.source, ids, item.start, end, last.aux_states, choices, states)


def on_the_spot(
    verifier: TransformersVerifier,
    aux_layer_ids: tuple[int, ...],
    items: Sequence[Item],
    head: VerifierHead | None,
    is_greedy: bool,
    off_policy: OffPolicy,
) -> Iterator[Recorded]:
    """Recorded answers whose states the verifier computes now. With no `head`, the tokens are known to be its own."""
    for some in (items[i : i + _ROWS_AT_ONCE] for i in range(0, len(items), _ROWS_AT_ONCE)):
        rows = [[*item.prompt_ids, *(item.recorded_ids or []), *item.tail_ids] for item in some]
        for item, ids, (aux, last) in zip(some, rows, verifier.states(rows, aux_layer_ids)):
            end = item.start + len(item.recorded_ids or [])
            choices = None
            if head is not None and is_greedy:
                choices = choices_at(head, last, ids, torch.arange(item.start, len(ids) - 1), off_policy)
            yield Recorded(item.row_id, item.source, ids, item.start, end, aux, choices, last)


def with_tails(
    items: Sequence[Item], answers: Sequence[Answer], verifier: TransformersVerifier, depth: int, batch_size: int
) -> list[Item]:
    """Items whose recorded answer is the one just decoded, with the verifier's greedy continuation as tail."""
    plain = Engine(verifier.model, None, 0, [], Sampling(), batch_size)
    whole = [[*item.prompt_ids, *answer.ids] for item, answer in zip(items, answers)]
    tails = plain.generate([Request(ids, depth) for ids in whole])
    return [
        Item(item.row_id, item.source, item.prompt_ids, answer.ids, tail.ids, item.limit)
        for item, answer, tail in zip(items, answers, tails)
    ]


def choices_at(
    head: VerifierHead, last_states: Tensor, ids: list[int], positions: Tensor, off_policy: OffPolicy
) -> Tensor:
    """The verifier's greedy choice of x_{p+1} at some positions, -1 elsewhere, int64, [num_tokens].

    Where the recorded token and the most likely one are a tie, the recorded one was the choice.
    """
    choices = torch.full((len(ids),), -1)
    tokens = torch.tensor(ids)
    for some in positions.split(_CHOICES_AT_ONCE):
        logits = head.logits(head.normed(last_states[some].to(head.weight.device))).float().cpu()
        said = tokens[some + 1]
        best = logits.max(-1)
        is_own = best.values - logits.gather(1, said[:, None])[:, 0] < TIE_GAP
        choices[some] = torch.where(is_own, said, best.indices)
        off_policy.tokens += int((~is_own).sum())
        off_policy.judged += len(some)
    return choices
