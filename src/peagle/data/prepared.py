"""Prepared rows as later stages read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.data.rows import TokenRow
from peagle.data.writer import FREQUENCIES, SUMMARY
from peagle.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prepared:
    """A folder that `peagle prepare` wrote."""

    folder: Path
    table: Any
    """The `datasets.Dataset` behind it."""
    frequencies: Tensor
    """How often each id is supervised, int64, [vocab_size]."""
    summary: dict[str, Any]
    """`summary.json`: counts, hashes of data, tokenizer and template, model, seq_length, vocab_size."""

    def __len__(self) -> int:
        return len(self.table)

    def row(self, index: int) -> TokenRow:
        """The row at `index`."""
        return TokenRow(**self.table[index])

    def index_of(self) -> dict[str, int]:
        """Where each row id is."""
        return {row_id: index for index, row_id in enumerate(self.table["row_id"])}


def load_prepared(folder: Path) -> Prepared:
    """Open a folder that `peagle prepare` wrote.

    Raises:
        DataError: it is not such a folder, or part of it is missing or damaged.
    """
    import datasets
    from safetensors.torch import load_file

    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected one that `peagle prepare` wrote")
    summary = read_summary(folder)
    if summary is None:
        raise DataError(f"{folder}: not prepared rows (no {SUMMARY}); run `peagle prepare` with this --output")
    try:
        table = datasets.load_from_disk(str(folder))
        frequencies = load_file(str(folder / FREQUENCIES))["frequencies"]
    except Exception as error:  # datasets, pyarrow and safetensors each have their own
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{folder}: damaged ({line[:160]}); run `peagle prepare --overwrite` again") from None
    if len(table) != summary.get("rows") or len(frequencies) != summary.get("vocab_size"):
        raise DataError(
            f"{folder}: {SUMMARY} says {summary.get('rows')} rows, the data has {len(table)}; "
            "run `peagle prepare --overwrite` again"
        )
    return Prepared(folder, table, frequencies, summary)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a prepared folder, or None if there is none.

    Raises:
        DataError: it is there but cannot be read.
    """
    path = folder / SUMMARY
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError(f"{path}: cannot be read; run `peagle prepare --overwrite` again") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected an object, found a {type(found).__name__}")
    return found
