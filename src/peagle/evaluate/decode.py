"""`--mode decode`: the engine answers all prompts, some of them beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peagle import log
from peagle.drafter.network import Drafter
from peagle.engine import Answer, Engine, Pass, Request, Sampling
from peagle.evaluate.compare import Contest, Difference, TransformersBaseline, contest, differences
from peagle.evaluate.counts import Counts, DatasetCounts, context_bucket
from peagle.evaluate.prompts import Item, by_source, in_turn
from peagle.verifier.local import TransformersVerifier

_CHECK_BATCH = 32


@dataclass(frozen=True)
class Decoded:
    """What the engine made of the items."""

    answers: list[Answer]
    """In the order of the items."""
    contest: Contest | None
    """Over the items that were timed."""
    checked: list[int]
    """Items whose answers were compared with the verifier's own; empty in sampling: nothing must be the same."""
    differences: list[Difference]
    """Answers that are not the verifier's own, by place in `checked`."""


def decode(
    verifier: TransformersVerifier,
    drafter: Drafter,
    items: Sequence[Item],
    depth: int,
    eos_token_ids: Sequence[int],
    sampling: Sampling,
    batch_size: int,
    num_timed: int,
    num_checked: int,
) -> Decoded:
    """Decode the items.

    Args:
        verifier, drafter: the pair.
        items: prompts and limits.
        depth: drafted tokens per pass.
        eos_token_ids: tokens that end an answer.
        sampling: how tokens are chosen.
        batch_size: prompts side by side.
        num_timed: so many items, of each data set in turn, are decoded plainly beside the drafter.
        num_checked: so many answers in all are compared with the verifier's own.
    """
    requests = [Request(item.prompt_ids, item.limit) for item in items]
    engine = Engine(verifier.model, drafter, depth, eos_token_ids, sampling, batch_size)
    order = in_turn([item.source for item in items])
    timed, checked = order[:num_timed], order[: max(num_timed, num_checked)] if sampling.is_greedy else []
    own = TransformersBaseline(verifier.model, eos_token_ids, sampling)
    answers: list[Answer | None] = [None] * len(items)
    run = None
    if timed:
        plain = Engine(verifier.model, None, 0, eos_token_ids, sampling, batch_size)
        run = contest(engine, plain, own, [requests[i] for i in timed], batch_size)
        for place, answer in zip(timed, run.answers):
            answers[place] = answer
    rest = [place for place, answer in enumerate(answers) if answer is None]
    if rest:
        with log.progress("decode", len(rest), "prompts") as meter:
            others = engine.generate([requests[place] for place in rest], lambda _, __: meter.advance(1))
        for place, answer in zip(rest, others):
            answers[place] = answer
    known = {} if run is None else dict(zip(timed, run.own_ids))
    _own_answers(own, requests, [place for place in checked if place not in known], known)
    whole = [answer for answer in answers if answer is not None]
    found = differences(
        verifier.model,
        [requests[place] for place in checked],
        [whole[place].ids for place in checked],
        [known[place] for place in checked],
    )
    return Decoded(whole, run, checked, found)


def _own_answers(
    own: TransformersBaseline, requests: Sequence[Request], places: list[int], known: dict[int, list[int]]
) -> None:
    """Add the verifier's own greedy answers, prompts of like length together."""
    places = sorted(places, key=lambda place: len(requests[place].prompt_ids))
    if not places:
        return
    with log.progress("the verifier's own answers", len(places), "prompts") as meter:
        for some in (places[i : i + _CHECK_BATCH] for i in range(0, len(places), _CHECK_BATCH)):
            known.update(zip(some, own.generate([requests[place] for place in some])))
            meter.advance(len(some))


def count(items: Sequence[Item], answers: Sequence[Answer], depth: int) -> dict[str, DatasetCounts]:
    """Add up the passes, per data set."""
    found = {}
    for source, places in by_source(items).items():
        passes = [answers[place].passes for place in places]
        generated = sum(len(answers[place].ids) for place in places)
        total = Counts.of_passes([[one.num_accepted for one in line] for line in passes], depth, generated)
        buckets: dict[str, list[Pass]] = {}
        for one in (one for line in passes for one in line):
            buckets.setdefault(context_bucket(one.num_known), []).append(one)
        contexts = {
            name: Counts.of_passes([[p.num_accepted for p in line]], depth, 0) for name, line in buckets.items()
        }
        found[source] = DatasetCounts(total, contexts)
    return found
