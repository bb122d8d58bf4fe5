"""Plain decoding to compare with: Transformers' own cached `generate`, without a model's generation defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from peagle.engine import Request, Sampling


class TransformersBaseline:
    """Answers by `model.generate`, prompts padded on the left.

    Args:
        model: the verifier.
        eos_token_ids: tokens that end an answer.
        sampling: as the engine's.
    """

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
        settings: dict[str, Any] = {"do_sample": False}
        if not self._sampling.is_greedy:
            settings = {
                "do_sample": True,
                "temperature": self._sampling.temperature,
                "top_p": self._sampling.top_p,
                "top_k": 0,
            }
        config = GenerationConfig(
            max_new_tokens=max(request.max_new_tokens for request in requests),
            eos_token_id=self._eos or None,
            pad_token_id=pad,
            use_cache=True,
            **settings,
        )
        with torch.inference_mode(), _no_defaults(self._model):
            out = self._model.generate(ids.to(device), attention_mask=seen.to(device), generation_config=config)
        lines = out[:, width:].tolist()
        return [self._cut(line[: request.max_new_tokens]) for line, request in zip(lines, requests)]

    def _cut(self, ids: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(ids) if token in self._eos), len(ids) - 1)
        return ids[: end + 1]


@contextmanager
def _no_defaults(model: Any) -> Iterator[None]:
    """A model's generation_config (a repetition penalty, top-k ...) fills what ours leaves open: take it away."""
    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept
