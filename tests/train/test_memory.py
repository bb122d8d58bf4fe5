"""Block and chunk sizes that follow from a budget."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import ConfigError
from peagle.train import memory
from peagle.train.config import FitConfig
from peagle.train.loop import step_settings
from tests.train.problem import ALONE, drafter

QWEN3_8B = (4096, 12288, 151936, 8192)


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_larger_budget_never_gives_less(one: int, more: int) -> None:
    small, large = (memory.choose_sizes(gb * 10**8, *QWEN3_8B) for gb in (one, one + more))
    assert small.block_slots <= large.block_slots
    assert small.chunk_rows <= large.chunk_rows


def test_the_least_budget_is_where_sizes_begin_to_grow() -> None:
    least = memory.least_budget(*QWEN3_8B)
    assert memory.choose_sizes(least, *QWEN3_8B).block_slots == memory.MIN_BLOCK_SLOTS
    assert memory.choose_sizes(least // 2, *QWEN3_8B).block_slots == memory.MIN_BLOCK_SLOTS
    assert memory.choose_sizes(2 * least, *QWEN3_8B).block_slots == 2 * memory.MIN_BLOCK_SLOTS


def test_a_gpu_gives_a_sixteenth_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 10**9))
    assert memory.default_budget(torch.device("cuda")) == 5 * 10**9
    assert memory.choose_sizes(5 * 10**9, *QWEN3_8B).block_slots > 850
    assert memory.default_budget(torch.device("cpu")) == 1 << 30


def test_a_budget_that_no_block_fits_into_is_refused_with_what_fits() -> None:
    made = drafter()
    with pytest.raises(
        ConfigError, match=r"--memory-budget 1e-09: .* packs of 100 tokens, need 0\.\d+ \(GB\)"
    ) as caught:
        step_settings(FitConfig.build({"memory_budget": 1e-9}), made, 100, ALONE)
    least = float(str(caught.value).split("need ")[1].split(" ")[0])
    sizes = step_settings(FitConfig.build({"memory_budget": least}), made, 100, ALONE)
    assert sizes.block_slots >= memory.MIN_BLOCK_SLOTS
    assert sizes.chunk_rows >= memory.MIN_CHUNK_ROWS


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc_trim")
def test_pages_go_back_between_the_parts_of_a_long_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=calls.append))
    cpu = torch.device("cpu")
    for num_pairs, device in [(100, cpu), (memory.LONG_PACK, torch.device("cuda")), (memory.LONG_PACK, cpu)]:
        memory.give_back(num_pairs, device)
    assert calls == [0]


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_what_is_no_budget_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"memory.budget"):
        FitConfig.build({"memory_budget": value})
