"""What `peagle prepare` needs of the verifier: its tokenizer and how many rows its embedding has; never its weights."""

import hashlib
import json
from pathlib import Path
from typing import Any

from peagle.errors import VerifierError, one_line

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


def load_tokenizer(name_or_path: str, trust_remote_code: bool) -> Any:
    """Load a verifier's tokenizer.

    Raises:
        VerifierError: there is no such model, or it has no tokenizer.
    """
    from transformers import AutoTokenizer

    path = Path(name_or_path)
    if path.is_dir() and not any((path / name).exists() for name in _TOKENIZER_FILES):
        raise VerifierError(f"{name_or_path}: the folder has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}, ...)")
    return _loaded(AutoTokenizer, name_or_path, trust_remote_code, "the tokenizer cannot be loaded")


def load_vocab_size(name_or_path: str, trust_remote_code: bool) -> int:
    """Rows of the verifier's embedding, from its config: often more than the tokenizer has tokens (bug report T05).

    Raises:
        VerifierError: there is no config, or it gives no vocabulary size.
    """
    from transformers import AutoConfig

    config = _loaded(AutoConfig, name_or_path, trust_remote_code, "config.json gives no vocabulary size")
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise VerifierError(f"{name_or_path}: config.json has vocab_size {size!r}, expected a positive number")
    return size


def tokenizer_sha256(tokenizer: Any) -> str:
    """A hash of everything that decides a tokenizer's ids: two runs with the same one may share data."""
    if tokenizer.is_fast:
        text = tokenizer.backend_tokenizer.to_str()
    else:
        vocabulary = sorted(tokenizer.get_vocab().items())
        text = json.dumps([type(tokenizer).__name__, vocabulary, sorted(tokenizer.special_tokens_map.items())])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _loaded(kind: Any, name_or_path: str, trust_remote_code: bool, problem: str) -> Any:
    looks_like_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if looks_like_path and not Path(name_or_path).is_dir():
        raise VerifierError(f"{name_or_path}: no such folder")
    try:
        return kind.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers and hub clients raise bare Exceptions
        raise VerifierError(f"{name_or_path}: {problem} ({one_line(error)})") from None
