"""`--mode decode`: the engine answers all prompts, some of them beside plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle import log
from peagle.drafter.network import Drafter
from peagle.engine import Answer, Engine, Request
from peagle.evaluate.compare import Comparison, Difference, TransformersBaseline, compare, differences
from peagle.evaluate.config import EvaluateConfig
from peagle.evaluate.prompts import Item, in_turn
from peagle.verifier.local import TransformersVerifier

_CHECK_BATCH = 32


@dataclass(frozen=True)
class Decoded:
    """What the engine made of the items."""

    answers: list[Answer]
    """In the order of the items."""
    comparison: Comparison | None
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
    config: EvaluateConfig,
) -> Decoded:
    """Decode the items, drafting `depth` tokens per pass; time and check as many of them as the settings say."""
    # 1. which items are timed beside plain decoding, and which are checked
    requests = [Request(item.prompt_ids, item.limit) for item in items]
    order = in_turn([item.source for item in items])
    timed = order[: config.compare_samples]
    checked = order[: max(config.compare_samples, config.check_samples)] if config.is_greedy else []
    engine = Engine(
        model=verifier.model,
        drafter=drafter,
        num_speculative_tokens=depth,
        eos_token_ids=eos_token_ids,
        sampling=config,
        batch_size=config.batch_size,
    )
    baseline = TransformersBaseline(verifier.model, eos_token_ids, config)
    answers: dict[int, Answer] = {}
    own_ids: dict[int, list[int]] = {}

    # 2. the timed ones, in turns with plain decoding
    comparison = None
    if timed:
        plain = Engine.plain(verifier.model, eos_token_ids, config, config.batch_size)
        comparison = compare(engine, plain, baseline, [requests[i] for i in timed], config.batch_size)
        answers.update(zip(timed, comparison.answers))
        own_ids.update(zip(timed, comparison.own_ids))

    # 3. all others
    rest = [place for place in range(len(items)) if place not in answers]
    if rest:
        with log.progress("decode", len(rest), "prompts") as meter:
            for index, answer in engine.stream([requests[place] for place in rest]):
                answers[rest[index]] = answer
                meter.advance(1)

    # 4. the verifier's own greedy answers to the checked ones, prompts of like length together
    places = [place for place in checked if place not in own_ids]
    places.sort(key=lambda place: len(requests[place].prompt_ids))
    if places:
        with log.progress("the verifier's own answers", len(places), "prompts") as meter:
            for some in (places[i : i + _CHECK_BATCH] for i in range(0, len(places), _CHECK_BATCH)):
                own_ids.update(zip(some, baseline.generate([requests[place] for place in some])))
                meter.advance(len(some))
    differing = differences(
        verifier.model,
        [requests[place] for place in checked],
        [answers[place].ids for place in checked],
        [own_ids[place] for place in checked],
    )
    return Decoded([answers[place] for place in range(len(items))], comparison, checked, differing)
