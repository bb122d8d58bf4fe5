"""The verifier's tokenizer, and the tokens that end its answers."""

from __future__ import annotations

from typing import Any

from peagle.data.model import load_tokenizer, tokenizer_sha256
from peagle.verifier.facts import VerifierFacts

__all__ = ["eos_ids", "load_tokenizer", "tokenizer_sha256"]


def eos_ids(facts: VerifierFacts, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the verifier's own list and the tokenizer's eos, ascending, as vLLM stops."""
    own = tokenizer.eos_token_id
    return tuple(sorted({*facts.eos_token_ids, *([] if own is None else [int(own)])}))
