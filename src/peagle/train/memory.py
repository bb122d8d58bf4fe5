"""How much to hold at a time. Users give a budget, or nothing; block and chunk sizes follow."""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass

MIN_BLOCK_SLOTS, MAX_BLOCK_SLOTS = 128, 1024
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 16, 1024
DEFAULT_BUDGET_BYTES = 1 << 30
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Sizes:
    """What `StepSettings` takes."""

    block_slots: int
    chunk_rows: int


def choose_sizes(
    budget_bytes: int | None, hidden_size: int, intermediate_size: int, draft_vocab_size: int, num_pairs: int
) -> Sizes:
    """Block and chunk sizes that keep a step's scratch memory (beyond the base pass) within the budget.

    A head chunk holds about 2 rows of the vocabulary per row (its logits, and the verifier's of its label), a block the
    activations of its slots in every layer at once and its attention scores against up to `num_pairs` keys.

    Args:
        budget_bytes: None takes one GiB.
        hidden_size, intermediate_size, draft_vocab_size: of the drafter.
        num_pairs: pair slots of the longest batch.
    """
    budget = budget_bytes or DEFAULT_BUDGET_BYTES
    chunk = budget // 8 // (4 * 2 * draft_vocab_size)
    per_slot = 4 * (24 * hidden_size + 6 * intermediate_size) * 4 + 5 * num_pairs
    block = budget // 2 // per_slot
    return Sizes(max(MIN_BLOCK_SLOTS, min(MAX_BLOCK_SLOTS, block)), max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS, chunk)))


@functools.cache
def keep_pages() -> bool:
    """Have this process keep the memory that it frees, rather than give it back and ask for it again.

    By itself glibc's allocator maps each tensor of 32 MB or less anew once it was given back, and the system clears its
    pages: 3 to 6 % of a step on a CPU. The peak stays the same. Returns whether the allocator took it (glibc only).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    most = (1 << 31) - 1
    # Older releases take no threshold above 32 MB.
    mapped = mallopt(_M_MMAP_THRESHOLD, 1 << 30) or mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    return bool(mallopt(_M_TRIM_THRESHOLD, most) and mapped)
