"""Finding, in the token ids of a rendered conversation, where a prefix of its text ends: proved, never guessed.

Text is tokenized once and whole, as a server does. A prefix of the text ends at a token boundary iff its own ids are a
prefix of the whole's. To prove that without tokenizing every prefix anew we use that added tokens (`<|im_start|>`)
split the text before anything else happens: between two of them, ids depend on nothing outside. So only the piece
behind the last added token is tokenized again, and in most templates that piece is the same few characters each time.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MAX_CACHED = 4096
_MAX_PIECE = 256
"""Longer pieces are not worth remembering: they hold a user's text, not a header."""


@dataclass(frozen=True)
class AddedTokens:
    """The added tokens of a tokenizer that split the text, and which of them can end a turn."""

    pattern: re.Pattern[str] | None
    """Finds them in text, longest first; None if there are none."""
    ids: frozenset[int]
    ending_ids: frozenset[int]
    """Special tokens and the eos token: what a verifier may write to end its turn."""

    @staticmethod
    def of(tokenizer: Any) -> AddedTokens:
        """Read them from a Transformers tokenizer."""
        added = {int(token_id): token for token_id, token in tokenizer.added_tokens_decoder.items() if token.content}
        splitting = {token_id: str(token.content) for token_id, token in added.items() if not token.single_word}
        ending = {token_id for token_id, token in added.items() if token.special}
        if tokenizer.eos_token_id is not None:
            ending.add(int(tokenizer.eos_token_id))
        ordered = sorted(splitting.values(), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        return AddedTokens(pattern, frozenset(splitting), frozenset(ending))


class Boundaries:
    """Token boundaries of one rendered text, whose ids `encode` gave.

    `pieces` holds the ids of short pieces seen before: the texts of one tokenizer share it, and it is filled here.
    """

    def __init__(
        self,
        text: str,
        ids: list[int],
        added: AddedTokens,
        encode: Callable[[str], list[int]],
        pieces: dict[str, list[int]],
    ) -> None:
        self.text, self.ids, self._encode, self._pieces = text, ids, encode, pieces
        self._added = added
        found = list(added.pattern.finditer(text)) if added.pattern else []
        self._places = [place for place, token in enumerate(ids) if token in added.ids]
        if len(found) != len(self._places):  # the tokenizer sees them otherwise: prove by whole prefixes
            found, self._places = [], []
        self._starts, self._ends = [match.start() for match in found], [match.end() for match in found]

    def at(self, num_chars: int) -> int | None:
        """The number of tokens that spell the first `num_chars` characters, or None if a token crosses that place."""
        before = bisect.bisect_right(self._ends, num_chars)
        if before < len(self._starts) and self._starts[before] < num_chars:
            return None  # inside an added token
        if before > 0:
            place = self._places[before - 1]
            text = self.text[self._starts[before - 1] : num_chars]
            piece = self._pieces.get(text)
            if piece is None:
                piece = self._encode(text)
                if len(text) <= _MAX_PIECE and len(self._pieces) < _MAX_CACHED:
                    self._pieces[text] = piece
            if self.ids[place : place + len(piece)] == piece:
                return place + len(piece)
        prefix = self._encode(self.text[:num_chars])
        return len(prefix) if self.ids[: len(prefix)] == prefix else None

    def end_of_turn(self, start_char: int, end_char: int) -> int | None:
        """The number of tokens up to and including the token that ends a turn, or None if no such place is proved.

        A turn's text in the template often goes on behind its end token (ChatML: a newline), which no verifier writes:
        it stops at the end token. Without an end token the turn ends with its last character that is not white space.

        Args:
            start_char, end_char: where the turn's reply begins and where the template's rendering of it ends.
        """
        first = bisect.bisect_left(self._starts, start_char)
        behind = bisect.bisect_right(self._ends, end_char)
        endings = (i for i in reversed(range(first, behind)) if self.ids[self._places[i]] in self._added.ending_ids)
        last = next(endings, None)
        if last is not None and not self.text[self._ends[last] : end_char].strip():
            return self._places[last] + 1
        stripped = start_char + len(self.text[start_char:end_char].rstrip())
        found = self.at(stripped) if stripped > start_char else None
        return self.at(end_char) if found is None else found
