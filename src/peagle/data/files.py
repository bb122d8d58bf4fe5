"""Data files on this machine, row by row: JSON lines, JSON arrays, Parquet, gzipped or not."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peagle.data.conversation import UnusableRow
from peagle.errors import DataError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".json.gz", ".jsonl.gz")
Numbered = tuple[int, "dict[str, Any] | UnusableRow"]
"""Line (or row) number from 1, and the record or what is wrong with it."""


def is_data_file(path: Path) -> bool:
    """Whether the name ends as a data file's does."""
    return path.name.lower().endswith(SUFFIXES)


def read_file(path: Path) -> Iterator[Numbered]:
    """Yield the rows of a data file one by one, so that one odd row (or a field that changes type) harms no other.

    Raises:
        DataError: the file cannot be read at all: missing, empty, of another kind, or a JSON array that breaks off.
    """
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file; expected one of {', '.join(SUFFIXES)}")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
        if name.endswith(".parquet"):
            yield from _read_parquet(path)
        elif name.endswith((".json", ".json.gz")):
            yield from _read_json(path)
        else:
            with _open(path) as handle:
                yield from _lines(handle)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")


def _lines(handle: Any) -> Iterator[Numbered]:
    """JSON lines, split at line feeds only: U+2028 and lone carriage returns are text."""
    for number, raw in enumerate(handle, start=1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            yield number, record_of(raw)


def record_of(raw: bytes) -> dict[str, Any] | UnusableRow:
    """Parse one JSON line."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return UnusableRow("not UTF-8", f"byte {error.start} is {raw[error.start]:#x}")
    try:
        return _object(json.loads(text))
    except RecursionError:
        return UnusableRow("broken JSON", "nested too deeply")
    except ValueError as error:
        return UnusableRow("broken JSON", str(error).split(": line")[0])


def _object(value: Any) -> dict[str, Any] | UnusableRow:
    if isinstance(value, dict):
        return value
    return UnusableRow("not an object", f"found a {type(value).__name__}, expected an object")


def _read_json(path: Path) -> Iterator[Numbered]:
    """A JSON array of objects, one object that holds such an array, one row alone, or JSON lines under this name."""
    with _open(path) as handle:
        raw = handle.read()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8: byte {error.start} is {raw[error.start]:#x}; save the file as UTF-8"
        ) from None
    start = len(text) - len(text.lstrip())
    if start == len(text):
        raise DataError(f"{path}: the file is empty")
    if text[start] == "[":
        yield from _array(path, text, start)
        return
    try:
        whole = json.loads(text)
    except RecursionError:
        raise DataError(f"{path}: nested too deeply") from None
    except ValueError:
        yield from _lines(raw.splitlines(keepends=True) if b"\n" not in raw else raw.split(b"\n"))
        return
    rows = None
    if isinstance(whole, dict):
        rows = next((whole[k] for k in ("data", "rows", "train", "instances") if _is_table(whole.get(k))), None)
    for number, row in enumerate([whole] if rows is None else rows, start=1):
        yield number, _object(row)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _array(path: Path, text: str, start: int) -> Iterator[Numbered]:
    """The elements of a JSON array with the line each begins at; a broken array is refused, not half read."""
    decoder = json.JSONDecoder()
    place, line, counted = start + 1, 1 + text.count("\n", 0, start), start
    first = True
    while True:
        place = _skip_space(text, place)
        if place < len(text) and text[place] == "]":
            return
        if not first:
            if place >= len(text) or text[place] != ",":
                raise DataError(_broken(path, text, place, "expected , or ]"))
            place = _skip_space(text, place + 1)
        line += text.count("\n", counted, place)
        counted = place
        try:
            value, place = decoder.raw_decode(text, place)
        except RecursionError:
            raise DataError(_broken(path, text, place, "nested too deeply")) from None
        except ValueError as error:
            raise DataError(
                _broken(path, text, getattr(error, "pos", place), getattr(error, "msg", str(error)))
            ) from None
        first = False
        yield line, _object(value)


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _broken(path: Path, text: str, place: int, what: str) -> str:
    line = 1 + text.count("\n", 0, place)
    return f"{path}:{line}: the JSON array breaks off here ({what}); the rows behind it cannot be read. Mend the file."


def _read_parquet(path: Path) -> Iterator[Numbered]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield number, without_nulls(row)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def without_nulls(value: Any) -> Any:
    """Leave out null fields: a columnar file gives each struct the fields of all others, empty."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def guess_rows(path: Path) -> int:
    """About how many rows a file has, quickly: its lines, a Parquet footer's count, or the columns an array names."""
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(path).num_rows)
        if name.endswith(".gz"):
            return path.stat().st_size // 1000
        marks = (b"\n",) if not name.endswith(".json") else (b'"conversations"', b'"messages"', b'"prompt"')
        counts = dict.fromkeys(marks, 0)
        with open(path, "rb") as handle:
            while block := handle.read(1 << 20):
                for mark in marks:
                    counts[mark] += block.count(mark)
        return max(counts.values())
    except (OSError, ValueError):  # the reader will say what is wrong
        return 0
