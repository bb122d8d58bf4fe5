"""`peagle extract`: prepared rows and a verifier to a store of hidden states."""

from __future__ import annotations

from peagle.states.config import ExtractConfig


def extract(config: ExtractConfig) -> int:
    """Fill the store; see `verifier/source.py` for the seam behind which the verifier runs."""
    raise NotImplementedError
