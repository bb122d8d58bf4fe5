"""Tokens per second with the drafter beside plain decoding, and the proof that the answers are the same.

Three contestants (the engine with its drafter, the engine without, Transformers' `generate`) take turns on the same
prompts in the same batches on the same threads, each first as often as the others, after a warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle import log
from peagle.engine import Answer, Engine, Laps, Request
from peagle.evaluate.baseline import TransformersBaseline

TIE_GAP = 1e-4
"""Two logits closer than this are a tie: a pass over several tokens may round it another way than one over a single."""
_WARM_UP_TOKENS = 8
_LAP_BATCHES = 2
_HALF_ROUNDING = {torch.bfloat16: 0.02, torch.float16: 0.003}
"""Two to three units in the last place of the largest logit."""


def within_rounding(gap: float, largest: float, dtype: torch.dtype) -> bool:
    """Whether a half-precision network cannot tell two logits apart, of which one is the largest. Never in float32."""
    return abs(gap) <= _HALF_ROUNDING.get(dtype, 0.0) * abs(largest)


@dataclass(frozen=True)
class Difference:
    """An answer that is not the verifier's own."""

    index: int
    position: int
    """In the answer."""
    token: int
    """Ours; -1 where our answer has ended."""
    own_token: int
    """The verifier's; -1 where its answer has ended."""
    gap: float
    """The verifier's logit of its own token minus that of ours, from one plain pass."""
    largest: float
    """The largest logit there."""
    dtype: torch.dtype
    """In which the verifier computes."""

    @property
    def is_tie(self) -> bool:
        """Whether the two tokens are level: the one excuse that counts."""
        return abs(self.gap) < TIE_GAP

    @property
    def is_within_rounding(self) -> bool:
        """Whether a half-precision verifier cannot tell the two apart; it then differs from itself as well, from one
        batch or pass length to another. Never so in float32."""
        return self.is_tie or within_rounding(self.gap, self.largest, self.dtype)


@dataclass(frozen=True)
class Contest:
    """What was measured over the compared prompts."""

    answers: list[Answer]
    """The drafting engine's, in order."""
    own_ids: list[list[int]]
    """Transformers' own answers."""
    plain_ids: list[list[int]]
    """Of the engine without a drafter."""
    seconds: dict[str, float]
    """By contestant: "drafter", "engine", "transformers"."""
    laps: Laps

    def tokens_per_s(self, name: str) -> float | None:
        """Generated tokens of a contestant over its seconds, prefill included."""
        ids = {
            "drafter": [answer.ids for answer in self.answers],
            "engine": self.plain_ids,
            "transformers": self.own_ids,
        }
        tokens = sum(map(len, ids[name]))
        return tokens / self.seconds[name] if self.seconds[name] > 0 and tokens else None


def contest(
    drafting: Engine, plain: Engine, own: TransformersBaseline, requests: Sequence[Request], batch_size: int
) -> Contest:
    """Let the three answer the same prompts in turns.

    Args:
        drafting, plain, own: the contestants.
        requests: the prompts.
        batch_size: prompts per turn.
    """
    runs: dict[str, Callable[[Sequence[Request]], list[Any]]] = {
        "drafter": lambda batch: drafting.generate(batch),
        "engine": lambda batch: [answer.ids for answer in plain.generate(batch)],
        "transformers": own.generate,
    }
    warm_up = [
        Request(request.prompt_ids, min(request.max_new_tokens, _WARM_UP_TOKENS)) for request in requests[:batch_size]
    ]
    for run in runs.values():
        if warm_up:
            run(warm_up)
    seconds = dict.fromkeys(runs, 0.0)
    found: dict[str, list[Any]] = {name: [] for name in runs}
    names = list(runs)
    batches = [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    with log.progress("compare with plain decoding", len(requests), "prompts") as meter:
        for turn, batch in enumerate(batches):
            for name in names[turn % 3 :] + names[: turn % 3]:
                began_s = _now_s()
                found[name] += runs[name](batch)
                seconds[name] += _now_s() - began_s
            meter.advance(len(batch))
    laps = Laps()
    for batch in batches[:_LAP_BATCHES]:
        drafting.generate(batch, None, laps)
    return Contest(found["drafter"], found["transformers"], found["engine"], seconds, laps)


def differences(
    model: Any, requests: Sequence[Request], ids: Sequence[list[int]], own_ids: Sequence[list[int]]
) -> list[Difference]:
    """Compare greedy answers with the verifier's own, and show the logit gap wherever one differs."""
    found = []
    for index, (request, ours, own) in enumerate(zip(requests, ids, own_ids)):
        place = next((i for i, (a, b) in enumerate(zip(ours, own)) if a != b), None)
        if place is None and len(ours) != len(own):
            place = min(len(ours), len(own))
        if place is None:
            continue
        token = ours[place] if place < len(ours) else -1
        own_token = own[place] if place < len(own) else -1
        logits = next_logits(model, [*request.prompt_ids, *own[:place]])
        is_shorter = token < 0 or own_token < 0
        gap = float("inf") if is_shorter else float(logits[own_token] - logits[token])
        found.append(Difference(index, place, token, own_token, gap, float(logits.max()), model.dtype))
    return found


def next_logits(model: Any, ids: list[int]) -> Tensor:
    """The verifier's logits of the token after `ids`, from one pass without a cache, [vocab_size]."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
    return output.logits[0, -1].float()


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
