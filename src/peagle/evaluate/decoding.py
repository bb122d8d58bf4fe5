"""`--mode decode`: the engine answers all prompts, some of them beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peagle import log
from peagle.drafter import Drafter
from peagle.engine import Answer, Engine, Pass, Request, Sampling
from peagle.evaluate.baseline import TransformersBaseline
from peagle.evaluate.contest import Contest, Difference, contest, differences
from peagle.evaluate.counts import Counts, DatasetCounts, context_bucket
from peagle.evaluate.items import Item, by_source, in_turn
from peagle.verifier.transformers import TransformersVerifier


@dataclass(frozen=True)
class Decoded:
    """What the engine made of the items."""

    answers: list[Answer]
    """In the order of the items."""
    compared: list[int]
    """Items that were decoded plainly too."""
    contest: Contest | None
    differences: list[Difference] | None
    """Answers that are not the verifier's own, by place in `compared`; None in sampling, where none can be."""


def decode(
    verifier: TransformersVerifier,
    drafter: Drafter,
    items: Sequence[Item],
    depth: int,
    eos_token_ids: Sequence[int],
    sampling: Sampling,
    batch_size: int,
    num_compared: int,
) -> Decoded:
    """Decode the items.

    Args:
        verifier, drafter: the pair.
        items: prompts and limits.
        depth: drafted tokens per pass.
        eos_token_ids: tokens that end an answer.
        sampling: how tokens are chosen.
        batch_size: prompts side by side.
        num_compared: so many items, of each data set in turn, are decoded plainly too.
    """
    requests = [Request(item.prompt_ids, item.limit) for item in items]
    engine = Engine(verifier.model, drafter, depth, eos_token_ids, sampling, batch_size)
    compared = in_turn([item.source for item in items])[:num_compared]
    answers: list[Answer | None] = [None] * len(items)
    run = None
    if compared:
        plain = Engine(verifier.model, None, 0, eos_token_ids, sampling, batch_size)
        own = TransformersBaseline(verifier.model, eos_token_ids, sampling)
        run = contest(engine, plain, own, [requests[i] for i in compared], batch_size)
        for place, answer in zip(compared, run.answers):
            answers[place] = answer
    rest = [place for place, answer in enumerate(answers) if answer is None]
    if rest:
        with log.progress("decode", len(rest), "prompts") as meter:
            found = engine.generate([requests[place] for place in rest], lambda _, __: meter.advance(1))
        for place, answer in zip(rest, found):
            answers[place] = answer
    differing = None
    if run is not None and sampling.is_greedy:
        ids = [answer.ids for answer in run.answers]
        differing = differences(verifier.model, [requests[i] for i in compared], ids, run.own_ids)
    return Decoded([answer for answer in answers if answer is not None], compared, run, differing)


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
