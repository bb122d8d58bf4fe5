"""Hidden states from vLLM equal Transformers', in float32, worst token 1e-5 (measured: about 1e-6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.vllm_engines import Engines
from benchmarks.vllm_states import FAMILIES, mixed_rows, states_error, toy
from peagle.verifier.facts import load_facts

TOLERANCE = 1e-5


def test_48_mixed_requests_at_once_with_chunked_prefill_and_prefix_caching(
    engines: Engines, verifier: Path, work: Path
) -> None:
    rows = mixed_rows(48, load_facts(str(verifier), False).vocab_size, 600, 0)
    assert states_error(engines, verifier, rows, work / "embedded") < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(engines: Engines, work: Path, family: str) -> None:
    rows = mixed_rows(12, 260, 300, 1)
    assert states_error(engines, toy(family, work / "toys"), rows, work / f"{family}-states") < TOLERANCE
