"""Drafters for engine and evaluation tests: random ones, and one that knows the answer."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch

from peagle.drafter.network import Drafter
from peagle.engine.drafting import Drafting, Proposal
from tests.fakes import drafter_config


def random_drafter(
    model: Any, kind: str = "peagle", seed: int = 0, depth: int = 4, scale: float = 4.0, **changes: Any
) -> Drafter:
    """A random two-layer drafter that fits `model`; `changes` override config fields."""
    config = model.config.get_text_config()
    values = {
        "speculators_model_type": kind,
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "head_dim": 16,
        "vocab_size": config.vocab_size,
        "aux_layer_ids": (0, config.num_hidden_layers // 2, config.num_hidden_layers),
        "mask_token_id": 3 if kind == "peagle" else None,
        "num_speculative_tokens": depth,
        "verifier_architectures": (),
    }
    drafter = Drafter(drafter_config(**{**values, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name == "mask_hidden":
                parameter.normal_(generator=generator)
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 * scale)
        if drafter.config.is_pruned:
            ids = (
                torch.randperm(config.vocab_size, generator=generator)[: drafter.config.draft_vocab_size].sort().values
            )
            drafter.d2t.copy_(ids - torch.arange(len(ids)))
            drafter.t2d[ids] = True
    return drafter.eval()


class Oracle(Drafting):
    """Runs the real drafter, so that its cache lives through deep acceptance, but proposes the known answer up to a
    random place. Set `answers` (prompt ids -> answer ids) and `rng`; `real` collects what the drafter itself proposed.
    """

    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    rng: ClassVar[random.Random] = random.Random(0)
    real: ClassVar[list[tuple[tuple[int, ...], list[int]]]] = []

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.known: dict[int, list[int]] = {}

    def propose(self, first_row, pair_ids, aux_states, starts, counts, uniforms):
        real = super().propose(first_row, pair_ids, aux_states, starts, counts, uniforms)
        lines = []
        for place, (start, count) in enumerate(zip(starts, counts)):
            row, new = first_row + place, pair_ids[place, :count].tolist()
            if start == 0:
                self.known[row] = new  # x_1 .. x_n; x_0 is never a pair's token
            else:
                self.known[row] = self.known[row][:start] + new
            Oracle.real.append((tuple(self.known[row]), real.ids[place].tolist()))
            lines.append(self._line(self.known[row], real.ids.shape[1]))
        return Proposal(torch.tensor(lines), None)

    def move(self, source: int, target: int, length: int) -> None:
        super().move(source, target, length)
        self.known[target] = self.known[source][:length]

    def _line(self, known: list[int], depth: int) -> list[int]:
        for prompt, answer in self.answers.items():
            whole = [*prompt[1:], *answer]
            if whole[: len(known)] == known and len(known) >= len(prompt):
                coming = (whole[len(known) :] + [5] * depth)[:depth]
                cut = self.rng.randint(0, depth)
                return coming[:cut] + [(token + 1) % 17 for token in coming[cut:]]
        return [0] * depth
