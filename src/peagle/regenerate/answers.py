"""Answers of a verifier in this process: the source behind `peagle regenerate` by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from peagle.regenerate.generation import generate
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.source import GenerationSettings, Prompt, RowAnswer, RowRefused


class TransformersAnswers:
    """Answers prompts of like length together, in this process.

    The groups depend on the whole job: a resumed greedy job gives the bits of an uninterrupted one.

    Args:
        verifier: the model.
        settings: how answers are written.
        batch_size: prompts of one group.
    """

    def __init__(self, verifier: TransformersVerifier, settings: GenerationSettings, batch_size: int) -> None:
        self._verifier, self._settings, self._batch_size = verifier, settings, batch_size

    @property
    def max_tokens(self) -> int:
        """The verifier's own limit."""
        return self._verifier.verifier_config.max_position_embeddings

    def answers(self, prompts: Sequence[Prompt], wanted: AbstractSet[str]) -> Iterator[RowAnswer | RowRefused]:
        """See `AnswerSource.answers`; refuses no row."""
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].input_ids), i))
        for start in range(0, len(order), self._batch_size):
            group = [prompts[i] for i in order[start : start + self._batch_size]]
            if wanted.isdisjoint(prompt.row_id for prompt in group):
                continue
            ids, seeds = [prompt.input_ids for prompt in group], [prompt.seed for prompt in group]
            for place, generation in generate(self._verifier, ids, self._settings, seeds, self._batch_size):
                if group[place].row_id in wanted:
                    yield RowAnswer(group[place].row_id, generation)

    def close(self) -> None:
        """Nothing to release."""
