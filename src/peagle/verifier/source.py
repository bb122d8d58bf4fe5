"""The seam between whatever runs a verifier (this process, a server) and those who want its states or its answers."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from peagle.data.records import Conversation, TokenRow


@dataclass(frozen=True, kw_only=True)
class RowStates:
    """What a verifier computed for one row, position by position, nothing shifted."""

    row_id: str
    input_ids: list[int]
    """The ids that the verifier really read; the receiver compares them with the row's, [num_tokens]."""
    aux_states: Tensor
    """States entering the auxiliary layers, ascending layer id, concatenated;
    [num_tokens, num_aux_layers * hidden_size]."""
    last_states: Tensor
    """States after the last layer, BEFORE the final norm, [num_tokens, hidden_size]."""
    choice_pos: list[int]
    """Positions p at which the verifier's own choice of x_{p+1} is known, for `--validate-outputs`; may be empty."""
    choice_ids: list[int]
    """That choice (the argmax of the verifier's own logits), as many as `choice_pos`."""
    fault: str | None = None
    """What the source itself found wrong with them."""
    origin: str = ""
    """Which verifier made them, of several: a server's address and how often it was lost; "" for one in this
    process."""


@dataclass(frozen=True)
class RowRefused:
    """A row whose states or answer could not be obtained. It is named, counted and tried again by the next run."""

    row_id: str
    reason: str
    """One phrase that can be counted, without the row's id or numbers of its own: "the server answered 400"."""
    detail: str
    """What exactly happened, for the log; may be empty."""


class StateSource(Protocol):
    """Something that yields a verifier's states for token rows. `hidden_states/extract.py` drives it."""

    @property
    def max_tokens(self) -> int:
        """The longest row it takes; longer ones are never handed to it."""
        ...

    def states(self, rows: Sequence[TokenRow], wanted: AbstractSet[str]) -> Iterator[RowStates | RowRefused]:
        """Yield each wanted row once, in any order, as soon as it is there.

        Args:
            rows: the whole job, whether or not it resumes: a source that computes several rows together can form the
                same groups each time, so that a resumed job gives the same bits. May be lazy: read it in order.
            wanted: ids of the rows whose states are needed; the others are never yielded.

        Raises:
            PeagleError: the job cannot go on (a dead server, three mismatches in a row). What was yielded before stays.
        """
        ...

    def close(self) -> None:
        """Release connections, files and memory. Called once, also after an error."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How answers are written."""

    max_new_tokens: int
    """Longest answer, its eos included."""
    eos_ids: tuple[int, ...]
    temperature: float
    """0 is greedy."""
    top_p: float
    """Sampling keeps the smallest set of tokens whose probabilities reach this; 1 keeps all."""
    tail_tokens: int
    """Further tokens written after the answer's end, for replay: what the verifier would have said next."""


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
class Generation:
    """What a verifier wrote after one prompt."""

    ids: list[int]
    """The eos included, if it ended by itself."""
    finish_reason: Literal["stop", "length"]
    tail_ids: list[int]
    """The verifier's continuation past the end, `tail_tokens` long unless the model's limit came first."""


@dataclass(frozen=True)
class RowAnswer:
    """The answer to one prompt."""

    row_id: str
    generation: Generation
    prompt_ids: list[int] | None = None
    """What the server rendered; None if the prompt's own ids were sent."""


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first ids that differ; where one begins with the other, the length of the shorter."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


class AnswerSource(Protocol):
    """Something that answers prompts. The settings (lengths, eos, sampling, tail) were given when it was made."""

    @property
    def max_tokens(self) -> int:
        """Longest prompt and answer together; a prompt of this length or more is never handed over."""
        ...

    def answers(self, prompts: Sequence[Prompt], wanted: AbstractSet[str]) -> Iterator[RowAnswer | RowRefused]:
        """Yield each wanted prompt's answer once, as `StateSource.states` does with rows."""
        ...

    def close(self) -> None:
        """Release what is held. Called once, also after an error."""
        ...
