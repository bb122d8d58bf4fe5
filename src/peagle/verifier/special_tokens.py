"""Tokens with a role: those that end the verifier's answers, and the one that stands for what a slot does not know."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from peagle.errors import VerifierError
from peagle.verifier.model_config import VerifierConfig

NEW_TOKEN = "<|MASK|>"


@dataclass(frozen=True)
class MaskToken:
    """The mask token and how it was chosen, so that a run can record both."""

    id: int
    how: str
    """"asked", "tokenizer's mask token", "unused embedding row", or the name of the special token it shares."""
    warning: str | None
    """What may be wrong with it, for the log and the run's record; None when nothing is."""


def resolve_mask_token(tokenizer: Any, vocab_size: int, given: int | None, seen_ids: Collection[int]) -> MaskToken:
    """Choose the mask token id: a real row of the verifier's embedding, which is never resized.

    In order: `given`; the tokenizer's own mask token; a `<|MASK|>` token, existing or new, in an embedding row that the
    tokenizer does not use (Qwen3-8B: 151669); then pad, eos, unk, each with a warning, because the drafter then cannot
    tell a slot it must guess from a real such token. `vocab_size` counts the embedding's rows; an unused one is looked
    for outside `seen_ids`, which occur in the data.

    Raises:
        VerifierError: `given` is no row of the embedding, or nothing is left; says what to set.

    Example:
        100 tokens in 128 rows, no mask token: id 100, "unused embedding row", no warning.
    """
    if given is not None:
        return _given(tokenizer, vocab_size, given, seen_ids)
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own < vocab_size:
        return MaskToken(int(own), "tokenizer's mask token", None)
    vocabulary = tokenizer.get_vocab()
    named = vocabulary.get(NEW_TOKEN)
    if named is not None and named < vocab_size:
        return MaskToken(int(named), f"tokenizer's {NEW_TOKEN}", None)
    taken = {*vocabulary.values(), *seen_ids}
    after_last = max(vocabulary.values(), default=-1) + 1
    for candidate in (*range(after_last, vocab_size), *range(min(after_last, vocab_size))):
        if candidate not in taken:
            return MaskToken(candidate, "unused embedding row", None)
    full = f"the tokenizer fills all {vocab_size} rows of the verifier's embedding, which is not resized"
    for name in ("pad", "eos", "unk"):
        shared = getattr(tokenizer, f"{name}_token_id", None)
        if shared is not None and shared < vocab_size:
            warning = (
                f"no mask token: {full}, so the {name} token {shared} ({tokenizer.convert_ids_to_tokens(shared)!r}) "
                "stands for it. The drafter cannot tell the two apart; set --mask-token-id to a token that your text "
                "never has."
            )
            return MaskToken(int(shared), f"{name} token", warning)
    raise VerifierError(
        f"no mask token: {full}, and there is no mask, pad, eos or unk token. Set --mask-token-id to a token that your "
        "text never has."
    )


def _given(tokenizer: Any, vocab_size: int, given: int, seen_ids: Collection[int]) -> MaskToken:
    if not 0 <= given < vocab_size:
        raise VerifierError(
            f"--mask-token-id {given} is no row of the verifier's embedding, which has {vocab_size} (0 to "
            f"{vocab_size - 1}) and is not resized"
        )
    roles = [name for name in ("pad", "eos", "bos", "unk") if getattr(tokenizer, f"{name}_token_id", None) == given]
    if roles:
        trouble = f"is also the {' and '.join(roles)} token"
    elif given in seen_ids:
        trouble = f"({tokenizer.convert_ids_to_tokens(given)!r}) occurs in the data"
    else:
        return MaskToken(given, "asked", None)
    warning = f"--mask-token-id {given} {trouble}: the drafter cannot tell a slot it must guess from that token"
    return MaskToken(given, "asked", warning)


def eos_ids(verifier: VerifierConfig, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the verifier's own list and the tokenizer's eos, ascending, as vLLM stops."""
    own = tokenizer.eos_token_id
    return tuple(sorted({*verifier.eos_token_ids, *([] if own is None else [int(own)])}))
