"""From what `--data` names to rows of one shape: files, folders and hub sets, read in a fixed order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peagle.data.conversation import Conversation, ReadyRow, Rejected, TextRow, UnusableRow
from peagle.data.files import SUFFIXES, Numbered, is_data_file, read_file
from peagle.data.hub import HUB_SETS, hub_parts, read_hub, rows_of
from peagle.data.identity import RowIds
from peagle.data.layouts import conversation_of, given_id
from peagle.data.ready import ready_fields
from peagle.data.turns import clean, shown
from peagle.errors import DataError

logger = logging.getLogger(__name__)
_SHOWN = 5
Mode = Literal["chat", "text"]
Row = Conversation | TextRow | ReadyRow
SPLIT_NAMES = ("train", "test", "validation", "valid", "dev", "data")
"""File names that say nothing: `gsm8k/test.jsonl` is the source gsm8k."""


@dataclass(frozen=True)
class Part:
    """One file or hub split: what it is called, and how to read it."""

    source: str
    origin: str
    read: Callable[[], Iterator[Numbered]]
    path: Path | None
    """The file, if it is one on this machine."""


def read_conversations(specs: Sequence[str], max_samples: int | None) -> Iterator[Conversation | Rejected]:
    """Yield the conversations (and prompts) of data files and hub sets, and a `Rejected` for each unusable row.

    Args:
        specs: what `--data` takes: a .json, .jsonl or .parquet file, a folder of such files or one written by
            `datasets`, a hub name (`sharegpt`, `gsm8k:test`, `org/set:split`), each optionally as `NAME=...` to name
            its rows' source.
        max_samples: read at most so many rows, taken from the files in turn; None reads all.

    Raises:
        DataError: nothing of that name, or a file that cannot be read at all.
    """
    for row in read_rows(specs, max_samples, "chat"):
        if isinstance(row, (Conversation, Rejected)):
            yield row
        elif isinstance(row, ReadyRow):
            detail = "input_ids are there already; regenerate needs messages or prompts"
            yield Rejected(row.source, row.origin, row.line, row.row_id, "tokenized already", detail)


def read_rows(specs: Sequence[str], max_samples: int | None, mode: Mode) -> Iterator[Row | Rejected]:
    """Like `read_conversations`, with token rows (and in text mode, rendered text) too."""
    yield from read_parts([part for spec in specs for part in parts_of(spec)], max_samples, mode)


def read_parts(parts: Sequence[Part], max_samples: int | None, mode: Mode) -> Iterator[Row | Rejected]:
    """Like `read_rows`, from parts that were looked up before."""
    row_ids = RowIds()
    for part, line, record in _in_order(parts, max_samples):
        source, own_id = part.source, None
        try:
            if isinstance(record, UnusableRow):
                raise record
            source, own_id = _source(record, part), given_id(record)
            yield _row(record, mode, source, own_id, part.origin, line, row_ids)
        except UnusableRow as problem:
            yield Rejected(source, part.origin, line, own_id, problem.reason, problem.detail)
        except RecursionError:
            yield Rejected(source, part.origin, line, own_id, "broken JSON", "nested too deeply")


def parts_of(spec: str) -> list[Part]:
    """What one `--data` names, in a fixed order.

    Raises:
        DataError: no file, folder or data set of that name.
    """
    name, path = None, Path(spec)
    if not path.exists() and "=" in spec:
        name, _, rest = spec.partition("=")
        spec, path = rest, Path(rest)
    if not spec.strip():
        raise DataError("--data names nothing; expected a file, a folder or a data set")
    if path.is_dir():
        return _folder_parts(path, name)
    if path.exists():
        if not path.is_file():  # a pipe would be empty after its first reading, and data are read twice
            raise DataError(f"--data {path}: not a regular file; write the data into one")
        return [_file_part(path, name)]
    if spec.lower().endswith(SUFFIXES) or spec.startswith((".", "/", "~")):
        raise DataError(f"--data {spec}: no such file")
    parts = hub_parts(spec)
    if parts is None:
        known = ", ".join(sorted(HUB_SETS))
        raise DataError(f"--data {spec}: neither a file, nor a folder, nor a data set; known names are {known}")
    return [Part(name or part.source, spec, lambda part=part: read_hub(part), None) for part in parts]


def _file_part(path: Path, name: str | None) -> Part:
    stem = path.name[: -len(next(suffix for suffix in (*SUFFIXES, "") if path.name.lower().endswith(suffix))) or None]
    if name is None and stem.lower() in SPLIT_NAMES:
        stem = path.resolve().parent.name or stem
    return Part(name or stem, str(path), lambda: read_file(path), path)


def _folder_parts(path: Path, name: str | None) -> list[Part]:
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        import datasets

        try:
            table: Any = datasets.load_from_disk(str(path))
        except Exception as error:
            raise DataError(f"--data {path}: not readable by `datasets` ({str(error).splitlines()[0]})") from None
        if isinstance(table, datasets.DatasetDict):
            raise DataError(
                f"--data {path}: has the splits {', '.join(table)}; name one, as {path}/{next(iter(table))}"
            )
        return [Part(name or path.name, str(path), lambda: rows_of(table), None)]
    inside = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    files = [file for file in inside if file.is_file() and is_data_file(file)]
    if not files:
        raise DataError(f"--data {path}: the folder has no {', '.join(SUFFIXES)} file")
    passed = [file.name for file in inside if file not in files]
    if passed:
        more = ", ..." if len(passed) > _SHOWN else ""
        logger.info("--data %s: read %d files, passed over %d others: %s%s", path, len(files), len(passed),
                    ", ".join(passed[:_SHOWN]), more)  # fmt: skip
    return [_file_part(file, name) for file in files]


def _in_order(parts: Sequence[Part], limit: int | None) -> Iterator[tuple[Part, int, dict[str, Any] | UnusableRow]]:
    """All rows part by part; with a limit, one row of each part in turn, so that no part is left out."""
    if limit is None:
        for part in parts:
            for line, record in part.read():
                yield part, line, record
        return
    open_parts = [(part, part.read()) for part in parts]
    taken = 0
    while open_parts:
        still_open = []
        for part, rows in open_parts:
            if taken == limit:
                return
            found = next(rows, None)
            if found is not None:
                taken += 1
                yield part, *found
                still_open.append((part, rows))
        open_parts = still_open


def _source(record: dict[str, Any], part: Part) -> str:
    """A row's own `source`; the `category` of an evaluation prompt; else the part's name."""
    named = record.get("source")
    if not isinstance(named, str) and any(isinstance(record.get(key), list) for key in ("turns", "prompt")):
        named = record.get("category")
    if isinstance(named, str) and named.strip():
        return clean(" ".join(named.split()), set())[:80]
    return part.source


def _row(
    record: dict[str, Any], mode: Mode, source: str, own_id: str | None, origin: str, line: int, row_ids: RowIds
) -> Row:
    if "input_ids" in record:
        ready = ready_fields(record)
        row_id = row_ids.unique(own_id) if own_id else row_ids.of_content(None, ready.input_ids)
        return ReadyRow(row_id, source, origin, line, **vars(ready))
    if mode == "text":
        text = record.get("text")
        if not isinstance(text, str):
            found = "no column `text`" if "text" not in record else f"text is {shown(text)}"
            raise UnusableRow("no text", f"{found}; --mode text reads rendered text, --mode chat reads conversations")
        repairs: set[str] = set()
        text = clean(text, repairs)
        return TextRow(row_ids.of_content(own_id, text), source, origin, line, text, tuple(sorted(repairs)))
    draft = conversation_of(record)
    content = [draft.messages, draft.tools, draft.template_options, draft.next_turns]
    return Conversation(
        row_ids.of_content(own_id, content),
        source,
        origin,
        line,
        tuple(draft.messages),
        draft.tools,
        draft.template_options,
        tuple(draft.next_turns),
        tuple(sorted(draft.repairs)),
    )
