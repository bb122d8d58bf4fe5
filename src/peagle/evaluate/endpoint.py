"""Acceptance of a drafter that a vLLM server runs: its own counters, as differences around our prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.errors import EndpointError
from peagle.evaluate.counts import Counts, pool
from peagle.evaluate.metrics import Reading, difference, read_metrics
from peagle.verifier.answers import Answered, Prompt
from peagle.verifier.facts import VerifierFacts
from peagle.verifier.generation import Generation, GenerationSettings
from peagle.verifier.vllm_answer_source import AnswerEndpoints, EndpointAnswers
from peagle.verifier.vllm_client import Endpoint

logger = logging.getLogger(__name__)

_SETTLE_PAUSE_S, _SETTLE_S = 0.2, 10.0


@dataclass(frozen=True)
class ServedRun:
    """What a server made of some prompts."""

    counts: Counts
    """From its counters, all engines and all endpoints together."""
    generations: dict[str, Generation]
    """By row id; prompts that the server refused are not in it."""
    refused: dict[str, str]
    """Row id -> the server's words."""
    seconds: float
    """From the first prompt to the last answer."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, over all requests under way."""
        return self.counts.num_generated_tokens / self.seconds


class ServedDrafter:
    """Servers that run a verifier with a drafter.

    Args:
        facts: the verifier.
        generation: how answers are written; its tail must be 0, a tail would be counted.
        endpoints: where, and how many prompts at once.

    Raises:
        EndpointError: see `EndpointAnswers`; or a server without speculative decoding.
    """

    def __init__(self, facts: VerifierFacts, generation: GenerationSettings, endpoints: AnswerEndpoints) -> None:
        if generation.tail_tokens:
            raise ValueError("a tail would be counted")
        self._source = EndpointAnswers(facts, generation, endpoints)
        try:
            for endpoint in self._source.endpoints:
                difference(Reading({}), _read(endpoint))
        except BaseException:
            self.close()
            raise

    @property
    def max_tokens(self) -> int:
        """The servers' limit of prompt and answer together."""
        return self._source.max_tokens

    def run(self, prompts: Sequence[Prompt]) -> ServedRun:
        """Answer the prompts and count what was drafted and accepted meanwhile.

        Raises:
            EndpointError: a server was restarted meanwhile, or the run cannot go on.
        """
        before = [_settled(endpoint) for endpoint in self._source.endpoints]
        started_s = time.monotonic()
        generations: dict[str, Generation] = {}
        refused: dict[str, str] = {}
        for found in self._source.answers(prompts, {prompt.row_id for prompt in prompts}):
            if isinstance(found, Answered):
                generations[found.row_id] = found.generation
            else:
                refused[found.row_id] = found.detail
        seconds = time.monotonic() - started_s
        after = [_settled(endpoint) for endpoint in self._source.endpoints]
        parts = [difference(b, a) for b, a in zip(before, after)]
        depth = max(part.num_speculative_tokens for part in parts)
        if any(part.num_speculative_tokens not in (0, depth) for part in parts):
            raise EndpointError("the endpoints draft different numbers of tokens per pass; measure them one by one")
        counts = pool([part for part in parts if part.num_speculative_tokens], depth)
        ours = sum(len(generation.ids) for generation in generations.values())
        if counts.num_generated_tokens != ours:
            logger.warning(
                "the server counted %d generated tokens, our answers have %d: somebody else used it meanwhile, and is "
                "in the figures",
                counts.num_generated_tokens,
                ours,
            )
        return ServedRun(counts, generations, refused, seconds)

    def close(self) -> None:
        """Drop connections."""
        self._source.close()


def _read(endpoint: Endpoint) -> Reading:
    return read_metrics(endpoint.get_text("/metrics"), endpoint.served_name)


def _settled(endpoint: Endpoint) -> Reading:
    """A reading once the counters stand still: vLLM answers a request before it counts its last step."""
    deadline_s = time.monotonic() + _SETTLE_S
    last = _read(endpoint)
    while True:
        time.sleep(_SETTLE_PAUSE_S)
        now = _read(endpoint)
        if now == last:
            return now
        if time.monotonic() > deadline_s:
            raise EndpointError(f"{endpoint.root_url}: its counters do not stand still; somebody else is using it")
        last = now
