"""How much to hold at a time. Users give a budget, or nothing; block and chunk sizes follow."""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch

MIN_BLOCK_SLOTS, MAX_BLOCK_SLOTS = 128, 1024
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 16, 1024
CPU_BUDGET_BYTES = 1 << 30
# Of a GPU's memory, whether free or not, so that blocks are the same from run to run: 5 GB of 80.
GPU_BUDGET_SHARE = 16
# A half of the budget for a block, an eighth for a chunk.
_BLOCK_PART, _CHUNK_PART = 2, 8
LONG_PACK = 6144
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Sizes:
    """What `StepSettings` takes."""

    block_slots: int
    chunk_rows: int


def default_budget(device: torch.device) -> int:
    """Bytes for a step's scratch memory where the user names none."""
    if device.type != "cuda":
        return CPU_BUDGET_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory) // GPU_BUDGET_SHARE


def choose_sizes(
    budget_bytes: int, hidden_size: int, intermediate_size: int, draft_vocab_size: int, num_pairs: int
) -> Sizes:
    """Block and chunk sizes that keep a step's scratch memory (beyond the base pass) within the budget.

    A head chunk holds about 2 rows of the vocabulary per row (its logits, and the verifier's of its label), a block the
    activations of its slots in every layer at once and its attention scores against up to `num_pairs` keys.

    Args:
        budget_bytes: too small for the smallest block or chunk, it gets these all the same.
        hidden_size, intermediate_size, draft_vocab_size: of the drafter.
        num_pairs: pair slots of the longest batch.
    """
    chunk = budget_bytes // _CHUNK_PART // _row_bytes(draft_vocab_size)
    block = budget_bytes // _BLOCK_PART // _slot_bytes(hidden_size, intermediate_size, num_pairs)
    return Sizes(max(MIN_BLOCK_SLOTS, min(MAX_BLOCK_SLOTS, block)), max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS, chunk)))


def least_budget(hidden_size: int, intermediate_size: int, draft_vocab_size: int, num_pairs: int) -> int:
    """The bytes that the smallest block and chunk take; arguments as of `choose_sizes`."""
    block = MIN_BLOCK_SLOTS * _BLOCK_PART * _slot_bytes(hidden_size, intermediate_size, num_pairs)
    return max(block, MIN_CHUNK_ROWS * _CHUNK_PART * _row_bytes(draft_vocab_size))


def _row_bytes(draft_vocab_size: int) -> int:
    return 4 * 2 * draft_vocab_size


def _slot_bytes(hidden_size: int, intermediate_size: int, num_pairs: int) -> int:
    return 4 * (24 * hidden_size + 6 * intermediate_size) * 4 + 5 * num_pairs


@functools.cache
def keep_pages() -> bool:
    """Have this process keep the memory that it frees, rather than give it back and ask for it again.

    By itself glibc's allocator maps each tensor of 32 MB or less anew once it was given back, and the system clears its
    pages: 3 to 6 % of a step on a CPU. The peak stays the same. Returns whether the allocator took it (glibc only).
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    most = (1 << 31) - 1
    # Older releases take no threshold above 32 MB.
    mapped = mallopt(_M_MMAP_THRESHOLD, 1 << 30) or mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    return bool(mallopt(_M_TRIM_THRESHOLD, most) and mapped)


def give_back(num_pairs: int, device: torch.device) -> None:
    """Between the parts of a step on a long pack: give the system the pages that no tensor lies in.

    One part's tensors leave holes that the next one's do not fit into, 0.36 of 2.1 GB at 8,192 tokens. It costs some
    tenths of a second: nothing beside a long pack, too much beside a short one.
    """
    if num_pairs >= LONG_PACK and device.type == "cpu":
        trim = _of_glibc("malloc_trim")
        if trim is not None:
            trim(0)


def _of_glibc(name: str) -> Any:
    """A function of the C library's allocator; None on other systems and with other libraries."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
