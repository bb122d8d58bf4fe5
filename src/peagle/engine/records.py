"""What goes into the engine and what comes out: requests, answers, and a record of every verifier pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Request:
    """One prompt."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int | None = None
    """Of this prompt's draws; None: made from the engine's seed and the prompt's place among the requests."""


@dataclass(frozen=True)
class Pass:
    """One verifier pass over a draft."""

    num_known: int
    """Tokens known before it: the prompt and what was generated so far."""
    draft_ids: tuple[int, ...]
    num_accepted: int
    """Accepted by the verifier, before an end-of-sequence token or the limit cut them."""


@dataclass(frozen=True)
class Answer:
    """What a prompt got."""

    ids: list[int]
    """Generated tokens; an end-of-sequence token is included."""
    finish_reason: Literal["stop", "length"]
    """"stop": an end-of-sequence token."""
    passes: list[Pass]
    """Passes with a draft, in order; the prefill is none."""


@dataclass
class Laps:
    """Time spent on each part of the steps, filled as the engine decodes; measuring makes a GPU wait at every part."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    """Verifier pass, acceptance and cache work."""
    num_steps: int = 0
