"""Tokens per second with the drafter beside plain decoding, and the proof that the answers are the same.

Three decoders (the engine with its drafter, the engine without, Transformers' `generate`) take turns on the same
prompts in the same batches on the same threads, each first as often as the others, after a warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from peagle import log
from peagle.engine import Answer, Engine, Laps, Request, Sampling, common_prefix

TIE_GAP = 1e-4
"""Two logits closer than this are a tie: a pass over several tokens may round it another way than one over a single."""
_WARM_UP_TOKENS = 8
_LAP_BATCHES = 2
_HALF_ROUNDING = {torch.bfloat16: 0.02, torch.float16: 0.003}
"""Two to three units in the last place of the largest logit."""


@dataclass(frozen=True)
class LogitGap:
    """Two tokens of which a network chose one in one pass and the other in another: how far apart their logits are."""

    value: float | None
    """Logit of the one minus that of the other; None where there are no such two logits: never excused."""
    largest: float
    """The largest logit there."""
    dtype: torch.dtype
    """In which the network computes."""

    @property
    def is_tie(self) -> bool:
        """Whether the two are level: the one excuse that counts."""
        return self.value is not None and abs(self.value) < TIE_GAP

    @property
    def is_within_rounding(self) -> bool:
        """Whether a half-precision network cannot tell the two apart; it then differs from itself as well, from one
        batch or pass length to another. Never so in float32."""
        return self.value is not None and (
            self.is_tie or abs(self.value) <= _HALF_ROUNDING.get(self.dtype, 0.0) * abs(self.largest)
        )


def dtype_name(dtype: torch.dtype) -> str:
    """As --dtype takes it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An answer that is not the verifier's own."""

    index: int
    position: int
    """In the answer."""
    token: int
    """Ours; -1 where our answer has ended."""
    own_token: int
    """The verifier's; -1 where its answer has ended."""
    gap: LogitGap
    """The verifier's logit of its own token minus that of ours, from one plain pass."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was measured over the compared prompts."""

    answers: list[Answer]
    """The drafting engine's, in order."""
    own_ids: list[list[int]]
    """Transformers' own answers."""
    tokens_per_s: dict[str, float | None]
    """Prefill included, by decoder: "drafter", "engine" (without a drafter), "transformers"."""
    laps: Laps


def compare(
    drafting: Engine, plain: Engine, own: TransformersBaseline, requests: Sequence[Request], batch_size: int
) -> Comparison:
    """Let the engine with its drafter, the one without and Transformers answer the same prompts, a batch per turn."""
    decoders: dict[str, Callable[[Sequence[Request]], list[Any]]] = {
        "drafter": drafting.generate,
        "engine": plain.generate,
        "transformers": own.generate,
    }
    warm_up = [
        Request(request.prompt_ids, min(request.max_new_tokens, _WARM_UP_TOKENS)) for request in requests[:batch_size]
    ]
    for decode in decoders.values():
        decode(warm_up)
    seconds = dict.fromkeys(decoders, 0.0)
    answers: dict[str, list[Any]] = {name: [] for name in decoders}
    names = list(decoders)
    batches = [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    with log.progress("compare with plain decoding", len(requests), "prompts") as meter:
        for turn, batch in enumerate(batches):
            for name in names[turn % 3 :] + names[: turn % 3]:
                began_s = _now_s()
                answers[name] += decoders[name](batch)
                seconds[name] += _now_s() - began_s
            meter.advance(len(batch))
    laps = Laps()
    for batch in batches[:_LAP_BATCHES]:
        drafting.generate(batch, laps)
    ids = {name: [one if name == "transformers" else one.ids for one in some] for name, some in answers.items()}
    rates = {name: sum(map(len, ids[name])) / seconds[name] if seconds[name] > 0 else None for name in names}
    return Comparison(answers=answers["drafter"], own_ids=ids["transformers"], tokens_per_s=rates, laps=laps)


def differences(
    model: Any, requests: Sequence[Request], answer_ids: Sequence[list[int]], own_ids: Sequence[list[int]]
) -> list[Difference]:
    """Compare greedy answers with the verifier's own, and show the logit gap wherever one differs."""
    differing = []
    for index, (request, ours, own) in enumerate(zip(requests, answer_ids, own_ids)):
        if ours == own:
            continue
        place = common_prefix(ours, own)
        token, own_token = ([*ids, -1][place] for ids in (ours, own))
        logits = next_logits(model, [*request.prompt_ids, *own[:place]])
        gap = None if -1 in (token, own_token) else float(logits[own_token] - logits[token])
        differing.append(
            Difference(
                index=index,
                position=place,
                token=token,
                own_token=own_token,
                gap=LogitGap(gap, float(logits.max()), model.dtype),
            )
        )
    return differing


def next_logits(model: Any, ids: list[int]) -> Tensor:
    """The verifier's logits of the token after `ids`, from one pass without a cache, [vocab_size]."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
    return output.logits[0, -1].float()


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class TransformersBaseline:
    """The verifier's answers by Transformers' own cached `generate`, without its generation defaults, prompts padded on
    the left."""

    def __init__(self, model: PreTrainedModel, eos_token_ids: Sequence[int], sampling: Sampling) -> None:
        self._model: Any = model
        self._eos, self._sampling = list(eos_token_ids), sampling

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Ids of each answer, an end-of-sequence token included; the requests run as one batch."""
        device = self._model.device
        width = max(len(request.prompt_ids) for request in requests)
        pad = self._eos[0] if self._eos else 0
        ids = torch.full((len(requests), width), pad)
        seen = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(list(request.prompt_ids))
            seen[row, width - len(request.prompt_ids) :] = 1
        settings: dict[str, Any] = {}
        if not self._sampling.is_greedy:
            settings = {"temperature": self._sampling.temperature, "top_p": self._sampling.top_p, "top_k": 0}
        config = GenerationConfig(
            max_new_tokens=max(request.max_new_tokens for request in requests),
            eos_token_id=self._eos or None,
            pad_token_id=pad,
            use_cache=True,
            do_sample=not self._sampling.is_greedy,
            **settings,
        )
        # The model's own generation_config (a repetition penalty, top-k ...) fills what ours leaves open: take it away.
        own, self._model.generation_config = self._model.generation_config, GenerationConfig()
        try:
            with torch.inference_mode():
                out = self._model.generate(ids.to(device), attention_mask=seen.to(device), generation_config=config)
        finally:
            self._model.generation_config = own
        answers = [line[: request.max_new_tokens] for line, request in zip(out[:, width:].tolist(), requests)]
        return [ids[: next((i + 1 for i, token in enumerate(ids) if token in self._eos), None)] for ids in answers]
