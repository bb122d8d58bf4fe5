"""`--mode replay`, and the check of `--mode both` that replay and decoding count alike."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from peagle import log
from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.engine import Answer, Engine, Request, Sampling, common_prefix
from peagle.errors import DataError, StoreError
from peagle.evaluate.compare import TIE_GAP, LogitGap, dtype_name
from peagle.evaluate.config import EvaluateConfig
from peagle.evaluate.prompts import Item
from peagle.evaluate.replay import Recorded, Replayed, replay
from peagle.hidden_states.batch import StoredRow
from peagle.hidden_states.store import StoreReader
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.weights import VerifierHead, load_head

logger = logging.getLogger(__name__)
_TAIL_BATCH = 16
_ROWS_AT_ONCE = 16
_CHOICES_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """One answer that replay and decoding count differently, at the first pass that differs."""

    row_id: str
    num_known: int
    """Tokens known before that pass."""
    decoded_ids: tuple[int, ...]
    """What the engine drafted there, empty if it had no such pass."""
    replayed_ids: tuple[int, ...]
    gap: LogitGap
    """How far the drafter's logit of the engine's token lay behind replay's; None: it was none of the next choices."""


@dataclass(frozen=True)
class Agreement:
    """Whether replay and decoding count alike."""

    num_answers: int
    num_passes: int
    disagreements: list[Disagreement]

    @property
    def equal(self) -> bool | None:
        """Whether all compared answers are counted alike, ties excused; None where nothing was compared."""
        return all(one.gap.is_tie for one in self.disagreements) if self.num_answers else None

    @property
    def is_within_rounding(self) -> bool:
        """Whether they count alike but for what half precision cannot tell apart."""
        return all(one.gap.is_within_rounding for one in self.disagreements)


def replay_recorded(
    config: EvaluateConfig, verifier_config: VerifierConfig, drafter: Drafter, items: Sequence[Item], depth: int
) -> tuple[list[tuple[Recorded, Replayed]], list[str]]:
    """Replay the answers on record: each with what came of it, and notes on the figures.

    Raises:
        DataError: the items have no answers on record.
        StoreError: the store does not fit the drafter or the rows.
    """
    items = [item for item in items if item.recorded_ids is not None]
    if not items:
        raise DataError(
            "--mode replay needs answers on record: rows of `peagle regenerate` (with --tail-tokens) in --data, or "
            "prepared rows in --data-path"
        )
    # 1. where the answers' states come from
    weight = drafter.fc.weight
    head = load_head(verifier_config).to(weight.device, weight.dtype)
    judge = Judge(head)
    source: Iterable[Recorded]
    if config.hidden_states_path is not None:
        reader = open_store(config.hidden_states_path, drafter.config)
        source = from_store(reader, items, judge if config.is_greedy else None)
    else:
        verifier = TransformersVerifier(verifier_config, weight.dtype, weight.device)
        source = on_the_spot(verifier, drafter.config.aux_layer_ids, items, judge if config.is_greedy else None)
    # 2. replay, keeping of each answer only what counting needs: not the states
    replayed = []
    with log.progress("replay", len(items), "answers") as meter:
        for recorded in source:
            bare = replace(recorded, aux_states=recorded.aux_states[:0].clone(), choice_ids=None, last_states=None)
            replayed.append((bare, replay(drafter, head, recorded, depth, config)))
            meter.advance(1)
    # 3. what limits the figures
    notes = [] if judge.note is None else [judge.note]
    unjudged = sum(one.num_unjudged for _, one in replayed)
    if unjudged:
        notes.append(
            f"{unjudged} passes are left out, because their drafts run past the recorded answer's end: regenerate with "
            f"--tail-tokens {depth} to count them"
        )
    return replayed, notes


def replay_decoded(
    verifier: TransformersVerifier,
    drafter: Drafter,
    store: StoreReader | None,
    items: Sequence[Item],
    answers: Sequence[Answer],
    depth: int,
) -> Agreement:
    """Replay what was decoded, greedily, and compare pass by pass.

    Stored states are used where the decoded answer is the recorded one; the verifier computes all others anew.
    """
    stored = [
        place
        for place, (item, answer) in enumerate(zip(items, answers))
        if store is not None and item.recorded_ids == answer.ids and len(item.tail_ids) >= depth - 1
    ]
    fresh = sorted(set(range(len(items))) - set(stored))
    tailed = with_tails([items[i] for i in fresh], [answers[i] for i in fresh], verifier, depth, _TAIL_BATCH)
    sources: list[tuple[list[int], Iterable[Recorded]]] = [
        (fresh, on_the_spot(verifier, drafter.config.aux_layer_ids, tailed, None))
    ]
    if store is not None and stored:
        judge = Judge(load_head(verifier.verifier_config).to(verifier.device, verifier.dtype))
        sources.append((stored, from_store(store, [items[i] for i in stored], judge)))
    disagreements: list[Disagreement] = []
    num_passes = 0
    with log.progress("replay what was decoded", len(items), "answers") as meter:
        for places, records in sources:
            for place, recorded in zip(places, records):
                replayed = replay(drafter, None, recorded, depth, Sampling())
                num_passes += len(replayed.passes)
                differing = disagreement(recorded, replayed, answers[place], drafter.fc.weight.dtype)
                if differing is not None:
                    disagreements.append(differing)
                meter.advance(1)
    return Agreement(len(items), num_passes, disagreements)


def disagreement(recorded: Recorded, replayed: Replayed, answer: Answer, dtype: torch.dtype) -> Disagreement | None:
    """Compare the passes of one answer, drafted in `dtype`; None where all are equal.

    A replay without a tail cannot judge the last passes; those it left out are not compared.
    """
    decoded = answer.passes[: len(answer.passes) - replayed.num_unjudged]
    known, gap, largest = recorded.end, None, 0.0
    decoded_ids: tuple[int, ...] = ()
    replayed_ids: tuple[int, ...] = ()
    for ours, theirs in zip(replayed.passes, decoded):
        if (ours.num_known, ours.num_accepted) != (theirs.num_known, theirs.num_accepted):
            known, decoded_ids, replayed_ids = ours.num_known, theirs.draft_ids, ours.draft_ids
            place = common_prefix(replayed_ids, decoded_ids)
            if place < len(replayed_ids):
                logits, largest = dict(zip(ours.best_ids[place], ours.best_logits[place])), ours.best_logits[place][0]
                gap = largest - logits[decoded_ids[place]] if decoded_ids[place] in logits else None
            break
    else:
        if len(decoded) == len(replayed.passes):
            return None
    return Disagreement(
        row_id=recorded.row_id,
        num_known=known,
        decoded_ids=decoded_ids,
        replayed_ids=replayed_ids,
        gap=LogitGap(gap, largest, dtype),
    )


# Answers with their states: from the store, or from the verifier on the spot.


class Judge:
    """The verifier's own greedy choices beside recorded tokens: those that differ, decoding would not have written."""

    def __init__(self, head: VerifierHead) -> None:
        self._head = head
        self.num_judged = self.num_foreign = 0

    def choices(self, last_states: Tensor, ids: list[int], positions: Tensor) -> Tensor:
        """The verifier's greedy choice of x_{p+1} at some positions, -1 elsewhere, int64, [num_tokens].

        Where the recorded token and the most likely one are a tie, the recorded one was the choice.
        """
        choices = torch.full((len(ids),), -1)
        tokens = torch.tensor(ids)
        for some in positions.split(_CHOICES_AT_ONCE):
            normed = self._head.normed(last_states[some].to(self._head.weight.device))
            logits = self._head.logits(normed).float().cpu()
            best = logits.max(-1)
            is_own = best.values - logits.gather(1, tokens[some + 1][:, None])[:, 0] < TIE_GAP
            choices[some] = torch.where(is_own, tokens[some + 1], best.indices)
            self.num_judged += len(some)
            self.num_foreign += int((~is_own).sum())
        return choices

    @property
    def note(self) -> str | None:
        """A warning where it matters."""
        if self.num_foreign <= self.num_judged // 1000:
            return None
        share = f"{self.num_foreign} of {self.num_judged} recorded tokens are not the verifier's own greedy choice"
        dtype = self._head.weight.dtype
        if dtype != torch.float32 and self.num_foreign <= self.num_judged // 50:
            return (
                f"{share}; so few are the rounding of {dtype_name(dtype)}. Exact: --dtype float32, at `peagle "
                "regenerate` and here"
            )
        return (
            f"{share}: replay then only estimates acceptance. Let the verifier write the answers (`peagle regenerate`, "
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
                f"{folder}: {label} {found}, the drafter reads {wanted}; extract again with the drafter's, or omit "
                "--hidden-states-path to have the verifier compute them"
            )
    return reader


def from_store(reader: StoreReader, items: Sequence[Item], judge: Judge | None) -> Iterator[Recorded]:
    """Recorded answers whose states are stored, an item at a time.

    No `judge` for sampled tokens: they are not the most likely ones.

    Raises:
        StoreError: a row is not in the store, or was stored with other tokens.
    """
    stored: StoredRow | None = None
    for item in items:
        if stored is None or stored.row.row_id != item.row_id:
            stored = reader.read(item.row_id)
        ids, label_pos = item.ids, stored.label_pos
        if stored.row.input_ids[: len(ids)] != ids:
            raise StoreError(f"{reader.folder}: row {item.row_id} was stored with other tokens; extract again")
        states = torch.zeros(len(stored.row.input_ids), stored.last_states.shape[1], dtype=stored.last_states.dtype)
        states[label_pos] = stored.last_states
        judged_pos = label_pos[(label_pos >= item.start) & (label_pos + 1 < len(ids))]
        yield _recorded(item, stored.aux_states, states, judge, judged_pos)


def on_the_spot(
    verifier: TransformersVerifier, aux_layer_ids: tuple[int, ...], items: Sequence[Item], judge: Judge | None
) -> Iterator[Recorded]:
    """Recorded answers whose states the verifier computes now; no `judge`: sampled tokens, or known to be its own."""
    for some in (items[i : i + _ROWS_AT_ONCE] for i in range(0, len(items), _ROWS_AT_ONCE)):
        for item, (aux, last) in zip(some, verifier.states([item.ids for item in some], aux_layer_ids)):
            yield _recorded(item, aux, last, judge, torch.arange(item.start, len(item.ids) - 1))


def _recorded(item: Item, aux_states: Tensor, last_states: Tensor, judge: Judge | None, judged_pos: Tensor) -> Recorded:
    return Recorded(
        row_id=item.row_id,
        source=item.source,
        ids=item.ids,
        start=item.start,
        end=item.start + len(item.recorded_ids or []),
        aux_states=aux_states,
        choice_ids=None if judge is None else judge.choices(last_states, item.ids, judged_pos),
        last_states=last_states,
    )


def with_tails(
    items: Sequence[Item], answers: Sequence[Answer], verifier: TransformersVerifier, depth: int, batch_size: int
) -> list[Item]:
    """Items whose recorded answer is the one just decoded, with the verifier's greedy continuation as tail."""
    plain = Engine.plain(verifier.model, (), Sampling(), batch_size)
    whole = [[*item.prompt_ids, *answer.ids] for item, answer in zip(items, answers)]
    tails = plain.generate([Request(ids, depth) for ids in whole])
    return [
        replace(item, recorded_ids=answer.ids, tail_ids=tail.ids) for item, answer, tail in zip(items, answers, tails)
    ]
