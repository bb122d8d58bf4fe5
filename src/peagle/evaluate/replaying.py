"""`--mode replay`, and the check of `--mode both` that replay and decoding count alike."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peagle import log
from peagle.drafter import Drafter
from peagle.engine import Answer, Sampling
from peagle.errors import DataError
from peagle.evaluate.agreement import Disagreement, disagreement, is_equal
from peagle.evaluate.config import EvaluateConfig
from peagle.evaluate.items import Item
from peagle.evaluate.records import OffPolicy, from_store, on_the_spot, open_store, with_tails
from peagle.evaluate.replay import Recorded, Replayed, replay
from peagle.states.store import StoreReader
from peagle.verifier.facts import VerifierFacts
from peagle.verifier.transformers import TransformersVerifier
from peagle.verifier.weights import load_head

logger = logging.getLogger(__name__)
_TAIL_BATCH = 16


@dataclass(frozen=True)
class Agreement:
    """Whether replay and decoding count alike."""

    equal: bool | None
    num_answers: int
    num_passes: int
    found: list[Disagreement]

    @property
    def is_within_rounding(self) -> bool:
        """Whether they count alike but for what half precision cannot tell apart."""
        return all(one.is_within_rounding for one in self.found)


def replay_recorded(
    config: EvaluateConfig,
    facts: VerifierFacts,
    drafter: Drafter,
    items: Sequence[Item],
    depth: int,
    sampling: Sampling,
) -> tuple[list[tuple[Recorded, Replayed]], list[str]]:
    """Replay the answers on record.

    Returns:
        The answers with what came of each, and notes.

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
    weight = drafter.fc.weight
    head = load_head(facts).to(weight.device, weight.dtype)
    off_policy = OffPolicy(dtype=weight.dtype)
    source: Iterable[Recorded]
    if config.hidden_states_path is not None:
        reader = open_store(config.hidden_states_path, drafter.config)
        source = from_store(reader, items, head, sampling.is_greedy, off_policy)
    else:
        verifier = TransformersVerifier(facts, weight.dtype, weight.device)
        source = on_the_spot(verifier, drafter.config.aux_layer_ids, items, head, sampling.is_greedy, off_policy)
    found = []
    with log.progress("replay", len(items), "answers") as meter:
        for recorded in source:
            found.append((_without_states(recorded), replay(drafter, head, recorded, depth, sampling)))
            meter.advance(1)
    return found, _notes(off_policy, [one for _, one in found], depth)


def replay_decoded(
    verifier: TransformersVerifier,
    drafter: Drafter,
    store: StoreReader | None,
    items: Sequence[Item],
    answers: Sequence[Answer],
    depth: int,
    sampling: Sampling,
) -> Agreement:
    """Replay what was decoded, greedily, and compare pass by pass.

    Args:
        verifier, drafter: the pair.
        store: stored states of the items' rows; used where the decoded answer is the recorded one. None: the verifier
            computes all states anew.
        items, answers: what was decoded.
        depth: drafted tokens per pass.
        sampling: greedy.
    """
    stored = [
        place
        for place, (item, answer) in enumerate(zip(items, answers))
        if store is not None and item.recorded_ids == answer.ids and len(item.tail_ids) >= depth - 1
    ]
    fresh = sorted(set(range(len(items))) - set(stored))
    tailed = with_tails([items[i] for i in fresh], [answers[i] for i in fresh], verifier, depth, _TAIL_BATCH)
    layers = drafter.config.aux_layer_ids
    sources: list[tuple[list[int], Iterable[Recorded]]] = [
        (fresh, on_the_spot(verifier, layers, tailed, None, True, OffPolicy()))
    ]
    if store is not None and stored:
        head = load_head(verifier.facts).to(verifier.device, verifier.dtype)
        sources.append((stored, from_store(store, [items[i] for i in stored], head, True, OffPolicy())))
    found: list[Disagreement] = []
    num_passes = 0
    with log.progress("replay what was decoded", len(items), "answers") as meter:
        for places, records in sources:
            for place, recorded in zip(places, records):
                replayed = replay(drafter, None, recorded, depth, sampling)
                num_passes += len(replayed.passes)
                differing = disagreement(recorded, replayed, answers[place], drafter.fc.weight.dtype)
                if differing is not None:
                    found.append(differing)
                meter.advance(1)
    return Agreement(is_equal(found, len(items)), len(items), num_passes, found)


def _without_states(recorded: Recorded) -> Recorded:
    """Only what counting needs: the states of thousands of answers are not kept."""
    nothing = recorded.aux_states[:0].clone()
    return Recorded(recorded.row_id, recorded.source, recorded.ids, recorded.start, recorded.end, nothing, None, None)


def _notes(off_policy: OffPolicy, replayed: Sequence[Replayed], depth: int) -> list[str]:
    notes = [] if off_policy.note is None else [off_policy.note]
    unjudged = sum(one.num_unjudged for one in replayed)
    if unjudged:
        notes.append(
            f"{unjudged} passes are left out, because their drafts run past the recorded answer's end: regenerate with "
            f"--tail-tokens {depth} to count them"
        )
    return notes
