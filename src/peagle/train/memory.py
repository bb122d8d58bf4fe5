"""How much to hold at a time. Users give a budget, or nothing; block and chunk sizes follow."""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK_SLOTS, MAX_BLOCK_SLOTS = 128, 1024
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 16, 1024
DEFAULT_BUDGET_BYTES = 1 << 30


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
