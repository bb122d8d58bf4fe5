"""Row identity: the same for the same content, whatever the order of the input or the number of workers."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def content_hash(content: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a JSON value, keys sorted."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


class RowIds:
    """Hands out row ids: `<own id>.<hash>` or `<hash>`, then `#2`, `#3`, ... when the very same row comes again.

    Two rows with the same id differ in nothing but their place, so it does not matter which of them is `#2`.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def of_content(self, own_id: str | None, content: Any) -> str:
        """The id of a row that is known by its content."""
        digest = content_hash(content)
        return self.unique(f"{own_id}.{digest}" if own_id else digest)

    def unique(self, wanted: str) -> str:
        """`wanted`, with a counter behind it if it was handed out before."""
        count = self._seen.get(wanted, 0) + 1
        self._seen[wanted] = count
        return wanted if count == 1 else self.unique(f"{wanted}#{count}")
