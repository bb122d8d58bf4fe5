"""Answers of a verifier in this process, by the engine without a drafter: what `peagle regenerate` uses by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from peagle.config import Sampling
from peagle.engine import Engine, Request
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.source import Generation, GenerationSettings, Prompt, RowAnswer, RowRefused


class EngineAnswers:
    """Answers prompts of like length together. An `AnswerSource`.

    The groups depend on the whole job: a resumed greedy job gives the bits of an uninterrupted one. Sampled answers
    depend on their prompt's seed, not on their group.

    Args:
        verifier: the model.
        settings: how answers are written.
        batch_size: prompts of one group.
    """

    def __init__(self, verifier: TransformersVerifier, settings: GenerationSettings, batch_size: int) -> None:
        sampling = Sampling(temperature=settings.temperature, top_p=settings.top_p)
        self._engine = Engine(verifier.model, None, 0, settings.eos_ids, sampling, batch_size)
        self._past_the_end = Engine(verifier.model, None, 0, (), sampling, batch_size)
        self._settings, self._batch_size = settings, batch_size
        self._max_tokens = verifier.verifier_config.max_position_embeddings

    @property
    def max_tokens(self) -> int:
        """The verifier's own limit."""
        return self._max_tokens

    def answers(self, prompts: Sequence[Prompt], wanted: AbstractSet[str]) -> Iterator[RowAnswer | RowRefused]:
        """See `AnswerSource.answers`; refuses no row."""
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].input_ids), i))
        for start in range(0, len(order), self._batch_size):
            group = [prompts[i] for i in order[start : start + self._batch_size]]
            if wanted.isdisjoint(prompt.row_id for prompt in group):
                continue
            for answer in self._with_tails(group) if self._settings.tail_tokens else self._without_tails(group):
                if answer.row_id in wanted:
                    yield answer

    def close(self) -> None:
        """Nothing to release."""

    def _without_tails(self, group: Sequence[Prompt]) -> Iterator[RowAnswer]:
        for place, answer in self._engine.stream(self._requests(group)):
            yield RowAnswer(group[place].row_id, Generation(answer.ids, answer.finish_reason, []))

    def _with_tails(self, group: Sequence[Prompt]) -> Iterator[RowAnswer]:
        """A tail is the answer to prompt and answer, without end tokens; so servers are asked for it too."""
        answers = self._engine.generate(self._requests(group))
        further = {}
        for place, (prompt, answer) in enumerate(zip(group, answers)):
            context = [*prompt.input_ids, *answer.ids]
            length = min(self._settings.tail_tokens, self._max_tokens - len(context))
            if length > 0:
                further[place] = Request(context, length, prompt.seed + 1)
        tails = dict(zip(further, self._past_the_end.generate(list(further.values()))))
        for place, (prompt, answer) in enumerate(zip(group, answers)):
            tail_ids = tails[place].ids if place in tails else []
            yield RowAnswer(prompt.row_id, Generation(answer.ids, answer.finish_reason, tail_ids))

    def _requests(self, group: Sequence[Prompt]) -> list[Request]:
        limit = self._settings.max_new_tokens
        return [
            Request(prompt.input_ids, min(limit, self._max_tokens - len(prompt.input_ids)), prompt.seed)
            for prompt in group
        ]
