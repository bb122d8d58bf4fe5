"""The pruned draft vocabulary: which of the verifier's tokens a drafter can draft, and the two tables that say so.

`d2t` holds OFFSETS, as vLLM reads it: verifier id = draft id + d2t[draft id]. `t2d` is True at the verifier ids that
can be drafted. Selected ids 2, 5, 9 give d2t 2, 4, 7. All tables are sized by the verifier's embedding, never by its
tokenizer, which may have fewer tokens.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.data.prepared import Prepared
from peagle.data.template import template_text
from peagle.errors import ConfigError, TemplateError


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """The verifier's tokens that can be drafted. Draft ids count them in ascending order."""

    ids: Tensor
    """Verifier id of each draft id, ascending, int64, [draft_vocab_size]."""
    d2t: Tensor
    """Verifier id minus draft id, int64, [draft_vocab_size]."""
    t2d: Tensor
    """Whether a verifier id can be drafted, bool, [vocab_size]."""

    @property
    def size(self) -> int:
        """The draft vocabulary's size."""
        return len(self.ids)

    @property
    def is_full(self) -> bool:
        """Whether every token can be drafted; then d2t is all zeros, and a checkpoint needs no tables."""
        return len(self.ids) == len(self.t2d)

    def mass_left_out(self, frequencies: Tensor) -> float:
        """Share of the supervised tokens that cannot be drafted, 0 to 1: no drafter can be accepted there.

        Args:
            frequencies: counts of supervised ids, int64, [vocab_size].
        """
        total = int(frequencies.sum())
        return 0.0 if total == 0 else int(frequencies[~self.t2d].sum()) / total


def build_vocab(frequencies: Tensor, size: int, must_keep_ids: Collection[int], vocab_size: int) -> DraftVocab:
    """Choose the draft vocabulary: what must be kept, then the most frequent, then unseen ids from the lowest.

    Ids beyond the tokenizer (the padding of the embedding, the highest ids) are therefore taken last of all.

    Args:
        frequencies: counts of supervised ids, int64, [vocab_size].
        size: the draft vocabulary's size, 1 to vocab_size.
        must_keep_ids: ids that are in it whatever their count (see `must_keep_ids`).
        vocab_size: rows of the verifier's embedding.

    Raises:
        ConfigError: size is out of range, smaller than what must be kept, or an id is beyond the vocabulary.

    Example:
        frequencies [0, 4, 0, 9, 1], size 3, must_keep_ids {0}: ids 0, 1, 3, d2t 0, 0, 1, t2d true at 0, 1, 3.
    """
    if len(frequencies) != vocab_size:
        raise ConfigError(f"token frequencies count {len(frequencies)} ids, the verifier has {vocab_size}")
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"--draft-vocab-size {size}: expected 1 to {vocab_size}, the verifier's vocabulary")
    keep = sorted(set(must_keep_ids))
    if keep and not (keep[0] >= 0 and keep[-1] < vocab_size):
        raise ConfigError(f"ids to keep go from {keep[0]} to {keep[-1]}, the verifier has 0 to {vocab_size - 1}")
    if len(keep) > size:
        need = f"{len(keep)} end and control tokens must be kept; give at least that many"
        raise ConfigError(f"--draft-vocab-size {size}: {need}")
    rank = frequencies.to(torch.int64).clone()
    rank[torch.tensor(keep, dtype=torch.int64)] = torch.iinfo(torch.int64).max
    chosen = torch.sort(rank, descending=True, stable=True).indices[:size]
    return vocab_of_ids(chosen, vocab_size)


def vocab_of_ids(ids: Iterable[int] | Tensor, vocab_size: int) -> DraftVocab:
    """The draft vocabulary of chosen verifier ids, in any order."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.as_tensor(ids if isinstance(ids, Tensor) else list(ids), dtype=torch.int64)] = True
    ordered = torch.nonzero(t2d).flatten()
    return DraftVocab(ordered, ordered - torch.arange(len(ordered)), t2d)


def must_keep_ids(tokenizer: Any, eos_token_ids: Iterable[int], frequencies: Tensor) -> tuple[int, ...]:
    """Ids that every draft vocabulary keeps: every end token, the template's control tokens, special tokens in use.

    Control tokens are the added tokens that the chat template names; special tokens in use are those that are
    supervised somewhere. Reserved special tokens that nothing ever writes are left to their counts.

    Args:
        tokenizer: the verifier's tokenizer.
        eos_token_ids: the verifier's end tokens.
        frequencies: counts of supervised ids, int64, [vocab_size].

    Returns:
        Ids below vocab_size, ascending.
    """
    vocab_size = len(frequencies)
    keep = {int(token) for token in (*eos_token_ids, tokenizer.eos_token_id) if token is not None}
    try:
        template = template_text(tokenizer)
    except TemplateError:
        template = ""
    for token_id, token in tokenizer.added_tokens_decoder.items():
        is_named = bool(token.content) and token.content in template
        is_used = int(token_id) < vocab_size and int(frequencies[int(token_id)]) > 0
        if is_named or is_used:
            keep.add(int(token_id))
    return tuple(sorted(token for token in keep if 0 <= token < vocab_size))


def choose_vocab(prepared: Prepared, tokenizer: Any, eos_token_ids: Iterable[int], size: int | None) -> DraftVocab:
    """The draft vocabulary for prepared rows; None asks for the verifier's own.

    It is a function of its arguments and takes milliseconds, so nothing is cached and every rank finds the same one.

    Raises:
        ConfigError: see `build_vocab`.
    """
    vocab_size = int(prepared.summary["vocab_size"])
    if size is None:
        return vocab_of_ids(range(vocab_size), vocab_size)
    keep = must_keep_ids(tokenizer, eos_token_ids, prepared.frequencies)
    return build_vocab(prepared.frequencies, size, keep, vocab_size)
