"""Sampling at temperature 1: the distribution of a drafted answer's tokens against the verifier's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.vllm.support.engines import Engines, speculative


@dataclass(frozen=True)
class Sampled:
    """Three tokens at temperature 1, with the drafter against without."""

    p_value: float
    """With vLLM's CPU kernel repaired where it is at fault."""
    was_repaired: bool
    """Whether it was at fault, and therefore repaired for `p_value`: see `zygote.repair_cpu_sampling`."""
    p_value_as_shipped: float
    temperatures_as_shipped: list[float]
    """What the kernel makes of temperature 1, for four draft tokens, twice: it should be eight times 1."""
    control_p_value: float
    """Without the drafter against without it, other seeds: the test on two samples that cannot differ."""
    samples: int


def compare_sampling(
    engines: Engines, verifier: Path, checkpoint: Path, prompt: list[int], count: int, num_speculative_tokens: int
) -> Sampled:
    """Chi-square test: do the first three tokens at temperature 1 have one distribution with and without the drafter?

    Cells are the sequences of three tokens; those seen less than ten times in both samples together are one cell.
    """

    def task(seed: int) -> dict[str, Any]:
        return {
            "prompts": [prompt] * count,
            "max_tokens": 3,
            "temperature": 1.0,
            "eos_ids": [],
            "one_at_a_time": False,
            "seed": seed,
        }

    # Other seeds each time: the samples must be independent.
    plain, control = engines.generate(verifier, None, [task(0), task(20_000_000)], False)
    drafter = speculative(checkpoint, num_speculative_tokens)
    expected = tokens_of(plain)

    def drafted(seed: int, repair: bool) -> dict[str, Any]:
        (found,) = engines.generate(verifier, drafter, [task(seed)], False, repair)
        return found

    shipped = drafted(10_000_000, False)
    as_shipped = two_sample_p(expected, tokens_of(shipped))
    repaired = shipped["expanded"] != [1.0] * 8
    p_value = two_sample_p(expected, tokens_of(drafted(10_000_000, True))) if repaired else as_shipped
    return Sampled(
        p_value=p_value,
        was_repaired=repaired,
        p_value_as_shipped=as_shipped,
        temperatures_as_shipped=shipped["expanded"],
        control_p_value=two_sample_p(expected, tokens_of(control)),
        samples=count,
    )


def tokens_of(found: dict[str, Any]) -> Counter[Any]:
    """How often each answer came."""
    return Counter(map(tuple, found["answers"]))


def two_sample_p(a: Counter[Any], b: Counter[Any]) -> float:
    """p-value of Pearson's test that two samples of one size come from one distribution."""
    pairs = [(a[cell], b[cell]) for cell in sorted(set(a) | set(b))]
    cells = [pair for pair in pairs if sum(pair) >= 10]
    rare = [pair for pair in pairs if sum(pair) < 10]
    if rare:
        cells.append((sum(x for x, _ in rare), sum(y for _, y in rare)))
    total_a, total_b = sum(x for x, _ in cells), sum(y for _, y in cells)
    chi2 = 0.0
    for x, y in cells:
        share = (x + y) / (total_a + total_b)
        chi2 += (x - total_a * share) ** 2 / (total_a * share) + (y - total_b * share) ** 2 / (total_b * share)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(chi2 / 2, dtype=torch.float64)))
