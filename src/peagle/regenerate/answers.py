"""The seam between whatever lets a verifier answer prompts (Transformers, a server) and `regenerate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from peagle.data import Conversation
from peagle.regenerate.generation import Generation, GenerationSettings
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.source import RowRefused


@dataclass(frozen=True)
class Prompt:
    """One prompt, rendered."""

    row_id: str
    input_ids: list[int]
    seed: int
    """For sampling; a function of the run's seed and the row's id."""
    conversation: Conversation | None = None
    """What was rendered, for servers that render it themselves."""


@dataclass(frozen=True)
class Answered:
    """A prompt's answer."""

    row_id: str
    generation: Generation
    prompt_ids: list[int] | None = None
    """What the server rendered; None if the prompt's own ids were sent."""


class AnswerSource(Protocol):
    """Something that answers prompts. The settings (lengths, eos, sampling, tail) were given when it was made."""

    @property
    def max_tokens(self) -> int:
        """Longest prompt and answer together; a prompt of this length or more is never handed over."""
        ...

    def answers(self, prompts: Sequence[Prompt], wanted: AbstractSet[str]) -> Iterator[Answered | RowRefused]:
        """Yield each wanted prompt's answer once, in any order, as soon as it is there.

        Args:
            prompts: the whole job, whether or not it resumes, so that groups can be the same each time.
            wanted: ids of the rows that are asked for.

        Raises:
            PeagleError: the job cannot go on. What was yielded before stays.
        """
        ...

    def close(self) -> None:
        """Release what is held. Called once, also after an error."""
        ...


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

    def answers(self, prompts: Sequence[Prompt], wanted: AbstractSet[str]) -> Iterator[Answered | RowRefused]:
        """See `AnswerSource.answers`; refuses no row."""
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].input_ids), i))
        for start in range(0, len(order), self._batch_size):
            group = [prompts[i] for i in order[start : start + self._batch_size]]
            if wanted.isdisjoint(prompt.row_id for prompt in group):
                continue
            ids, seeds = [prompt.input_ids for prompt in group], [prompt.seed for prompt in group]
            for place, generation in self._verifier.generate(ids, self._settings, seeds, self._batch_size):
                if group[place].row_id in wanted:
                    yield Answered(group[place].row_id, generation)

    def close(self) -> None:
        """Nothing to release."""
