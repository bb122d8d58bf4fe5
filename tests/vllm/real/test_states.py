"""Hidden states from vLLM equal Transformers', in float32, worst token 1e-5 (measured: about 1e-6)."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from peagle.verifier.model_config import load_verifier_config
from peagle.vllm.launch import PLUGIN_FOLDER
from tests.vllm.support.engines import Engines
from tests.vllm.support.states import FAMILIES, mixed_rows, states_error, toy

TOLERANCE = 1e-5


def test_48_mixed_requests_at_once_with_chunked_prefill_and_prefix_caching(
    engines: Engines, verifier: Path, work: Path
) -> None:
    rows = mixed_rows(48, load_verifier_config(str(verifier), False).vocab_size, 600, 0)
    assert states_error(engines, verifier, rows, work / "embedded") < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(engines: Engines, work: Path, family: str) -> None:
    rows = mixed_rows(12, 260, 300, 1)
    assert states_error(engines, toy(family, work / "toys"), rows, work / f"{family}-states") < TOLERANCE


def test_rows_gathered_on_a_device_are_those_copied_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN_FOLDER))
    connector = importlib.import_module("peagle_vllm_connector")
    cache = torch.randn(9, 4, 16, 8)
    block_bytes = 16 * 4 * 8 * 4
    for num_tokens in (1, 16, 17, 70):
        block_ids = [7, 2, 8, 0, 5][: -(-num_tokens // 16)]
        copied = torch.empty(num_tokens, 4, 8)
        connector._copy_blocks(cache, block_ids, copied)
        for staging_bytes in (1, 2 * block_bytes, 1 << 20):
            monkeypatch.setattr(connector, "_STAGING_BYTES", staging_bytes)
            gathered = torch.empty(num_tokens, 4, 8)
            connector._gather_blocks(cache, block_ids, gathered)
            assert torch.equal(gathered, copied)
        for token in range(num_tokens):
            assert torch.equal(copied[token], cache[block_ids[token // 16], :, token % 16])
