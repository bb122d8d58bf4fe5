"""The verifier's tokenizer, or one line that says why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peagle.errors import VerifierError
from peagle.verifier.facts import VerifierFacts, first_line, looks_like_path

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")


def load_tokenizer(name_or_path: str, trust_remote_code: bool) -> Any:
    """Load a tokenizer with its chat template.

    Args:
        name_or_path: a model folder or a hub id.
        trust_remote_code: let the model's own tokenizer code run.

    Raises:
        VerifierError: no such model, or a model without a tokenizer.
    """
    from transformers import AutoTokenizer

    path = Path(name_or_path)
    if path.is_dir():
        if not any((path / name).exists() for name in _FILES):
            raise VerifierError(
                f"{name_or_path}: no tokenizer in this folder (none of {', '.join(_FILES[:3])}); copy the model's "
                "tokenizer files into it"
            )
    elif looks_like_path(name_or_path) or path.exists():
        raise VerifierError(f"{name_or_path}: no such folder")
    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raise bare Exception for a broken tokenizer.json
        raise VerifierError(f"{name_or_path}: its tokenizer cannot be loaded: {first_line(error)}") from None


def eos_ids(facts: VerifierFacts, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the verifier's own list and the tokenizer's eos, ascending, as vLLM stops."""
    own = tokenizer.eos_token_id
    return tuple(sorted({*facts.eos_token_ids, *([] if own is None else [int(own)])}))
