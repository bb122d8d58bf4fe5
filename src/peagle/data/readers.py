"""From what `--data` names to rows in one layout: files, folders and hub sets, read in a fixed order.

`parts_of` looks up what there is, `read_file` and `read_hub` yield raw rows with their line numbers, and `read_parts`
makes a `Conversation`, `TextRow`, `ReadyRow` or `Rejected` of each. One bad row harms no other.
"""

import gzip
import json
import logging
import re
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from peagle.data.formats import clean, conversation_of, given_id, ready_tokens, shown
from peagle.data.records import Conversation, ReadyRow, Rejected, RowIds, TextRow, TokenRow, UnusableRow, rejected
from peagle.errors import DataError, one_line

logger = logging.getLogger(__name__)
_SHOWN = 5
Mode = Literal["chat", "text"]
Row = Conversation | TextRow | ReadyRow
SPLIT_NAMES = ("train", "test", "validation", "valid", "dev", "data")
"""File names that say nothing: `gsm8k/test.jsonl` is the source gsm8k."""
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".json.gz", ".jsonl.gz")
Numbered = tuple[int, "dict[str, Any] | UnusableRow"]
"""Line (or row) number from 1, and the record or what is wrong with it."""


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
            yield number, _record_of(raw)


def _record_of(raw: bytes) -> dict[str, Any] | UnusableRow:
    try:
        return _object(json.loads(raw.decode("utf-8")))
    except UnicodeDecodeError as error:
        return UnusableRow("not UTF-8", f"byte {error.start} is {raw[error.start]:#x}")
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
        where = f"{path}: not UTF-8: byte {error.start} is {raw[error.start]:#x}"
        raise DataError(f"{where}; save the file as UTF-8") from None
    if not text or text.isspace():
        raise DataError(f"{path}: the file is empty")
    if text.lstrip().startswith("["):
        yield from _array(path, text, text.index("["))
        return
    try:
        whole = json.loads(text)
    except RecursionError:
        raise DataError(f"{path}: nested too deeply") from None
    except ValueError:
        yield from _lines(raw.splitlines(keepends=True) if b"\n" not in raw else raw.split(b"\n"))
        return
    tables = [whole.get(key) for key in ("data", "rows", "train", "instances")] if isinstance(whole, dict) else []
    filled = (rows for rows in tables if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows))
    for number, row in enumerate(next(filled, [whole]), start=1):
        yield number, _object(row)


def _array(path: Path, text: str, start: int) -> Iterator[Numbered]:
    """The elements of a JSON array with the line each begins at; a broken array is refused, not half read."""

    def broken(place: int, what: str) -> DataError:
        line = 1 + text.count("\n", 0, place)
        detail = f"the JSON array breaks off here ({what}); the rows after it cannot be read. Repair the file."
        return DataError(f"{path}:{line}: {detail}")

    decoder = json.JSONDecoder()
    line, counted, place = 1, 0, _skip_space(text, start + 1)
    if text[place : place + 1] == "]":
        return
    while True:
        line += text.count("\n", counted, place)
        counted = place
        try:
            value, place = decoder.raw_decode(text, place)
        except RecursionError:
            raise broken(place, "nested too deeply") from None
        except ValueError as error:
            raise broken(getattr(error, "pos", place), getattr(error, "msg", str(error))) from None
        yield line, _object(value)
        place = _skip_space(text, place)
        if text[place : place + 1] == "]":
            return
        if text[place : place + 1] != ",":
            raise broken(place, "expected , or ]")
        place = _skip_space(text, place + 1)


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _read_parquet(path: Path) -> Iterator[Numbered]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256)
        yield from rows_of(row for batch in batches for row in batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file ({one_line(error)})") from None


def rows_of(table: Iterable[Any]) -> Iterator[Numbered]:
    """The rows of a columnar table, numbered from 1, null fields left out."""
    for number, row in enumerate(table, start=1):
        yield number, without_nulls(row)


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
        counts: Counter[bytes] = Counter()
        with open(path, "rb") as handle:
            while block := handle.read(1 << 20):
                counts.update({mark: block.count(mark) for mark in marks})
        return max(counts.values())
    except (OSError, ValueError):  # the reader will say what is wrong
        return 0


@dataclass(frozen=True, kw_only=True)
class HubPart:
    """What one call of `datasets.load_dataset` loads; its rows go through the same normaliser as local files."""

    source: str
    hub_id: str
    config: str | None = None
    split: str = "train"
    file: str | None = None
    """One file of the set alone; such a part is a row of its own in the evaluation table."""


BENCHMARK_PARTS = (
    "HumanEval", "math_reasoning", "qa", "question", "rag", "summarization", "tool_call", "translation", "writing",
)  # fmt: skip
"""The nine tasks of the published acceptance table; each file has a `prompt` column."""
SPEC_BENCH_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
_BENCHMARKS = "RedHatAI/speculator_benchmarks"
HUB_SETS: dict[str, tuple[HubPart, ...]] = {
    "sharegpt": (HubPart(source="sharegpt", hub_id="Aeala/ShareGPT_Vicuna_unfiltered"),),
    "ultrachat": (HubPart(source="ultrachat", hub_id="HuggingFaceH4/ultrachat_200k", split="train_sft"),),
    "gsm8k": (HubPart(source="gsm8k", hub_id="openai/gsm8k", config="main"),),
    "humaneval": (HubPart(source="humaneval", hub_id="openai/openai_humaneval", split="test"),),
    "mt-bench": (HubPart(source="mt-bench", hub_id="HuggingFaceH4/mt_bench_prompts"),),
    "spec-bench": (HubPart(source="spec-bench", hub_id=SPEC_BENCH_URL),),
    "speculator-benchmarks": tuple(
        HubPart(source=part, hub_id=_BENCHMARKS, file=f"{part}.jsonl") for part in BENCHMARK_PARTS
    ),
}
"""Where the field's training and evaluation sets live on the Hugging Face hub."""
ALIASES = {parts[0].hub_id.lower(): name for name, parts in HUB_SETS.items()} | {"specbench": "spec-bench"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def hub_parts(name: str) -> list[HubPart] | None:
    """The parts of `sharegpt`, `gsm8k:test`, `speculator-benchmarks:qa`, `hf:org/set` or `org/set:split`; else None.

    Raises:
        DataError: a named set has no such part.
    """
    wanted, _, choice = name.removeprefix("hf:").partition(":")
    key = wanted.lower()
    known = HUB_SETS.get(ALIASES.get(key, key.replace("_", "-")))
    if known is None:
        if not HUB_ID.fullmatch(wanted):
            return None
        return [HubPart(source=wanted.split("/")[1], hub_id=wanted, split=choice or "train")]
    if not choice:
        return list(known)
    if len(known) == 1:
        return [replace(known[0], split=choice)]
    chosen = {part.source: part for part in known}
    if choice not in chosen:
        raise DataError(f"--data {name}: no part {choice!r}; {wanted} has {', '.join(chosen)}")
    return [chosen[choice]]


def read_hub(part: HubPart) -> Iterator[Numbered]:
    """Yield the rows of a hub data set; a local folder of the same name stands in for the hub.

    Raises:
        DataError: it cannot be loaded.
    """
    import datasets

    is_url = part.hub_id.startswith("https://")
    files: Any = part.hub_id if is_url else {part.split: part.file} if part.file is not None else None
    try:
        table = datasets.load_dataset(
            "json" if is_url else part.hub_id, part.config, data_files=files, split=part.split
        )
    except Exception as error:  # the hub client raises dozens of kinds: no network, no such set, no such split
        raise DataError(
            f"--data {part.hub_id}: cannot be loaded from the hub ({type(error).__name__}: {one_line(error)}). "
            "Check the name and the network, or give a downloaded .jsonl or .parquet file."
        ) from None
    yield from rows_of(table)


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
            problem = UnusableRow("tokenized already", "it has input_ids; regenerate needs messages or prompts")
            yield rejected(problem, row.source, row.origin, row.line, row.row_id)


def read_rows(specs: Sequence[str], max_samples: int | None, mode: Mode) -> Iterator[Row | Rejected]:
    """Like `read_conversations`, with token rows (and in text mode, rendered text) too."""
    yield from read_parts([part for spec in specs for part in parts_of(spec)], max_samples, mode)


def read_parts(parts: Sequence[Part], max_samples: int | None, mode: Mode) -> Iterator[Row | Rejected]:
    """Like `read_rows`, from parts that were looked up before."""
    row_ids = RowIds()
    for part, line, record in _in_order(parts, max_samples):
        place: dict[str, Any] = {"source": part.source, "origin": part.origin, "line": line}
        own_id = None
        try:
            if isinstance(record, UnusableRow):
                raise record
            place["source"], own_id = _source(record, part), given_id(record)
            yield _row(record, mode, own_id, row_ids, place)
        except UnusableRow as problem:
            yield rejected(problem, **place, row_id=own_id)
        except RecursionError:
            yield rejected(UnusableRow("broken JSON", "nested too deeply"), **place, row_id=own_id)


def parts_of(spec: str) -> list[Part]:
    """What one `--data` names, in a fixed order.

    Raises:
        DataError: no file, folder or data set of that name.
    """
    name = None
    if not Path(spec).exists() and "=" in spec:
        name, _, spec = spec.partition("=")
    path = Path(spec)
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
        known = f"known names are {', '.join(sorted(HUB_SETS))}"
        raise DataError(f"--data {spec}: neither a file, nor a folder, nor a data set; {known}")
    return [Part(name or part.source, spec, lambda part=part: read_hub(part), None) for part in parts]


def _file_part(path: Path, name: str | None) -> Part:
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), "")
    stem = path.name[: len(path.name) - len(suffix)]
    if name is None and stem.lower() in SPLIT_NAMES:
        stem = path.resolve().parent.name or stem
    return Part(name or stem, str(path), lambda: read_file(path), path)


def _folder_parts(path: Path, name: str | None) -> list[Part]:
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        import datasets

        try:
            table: Any = datasets.load_from_disk(str(path))
        except Exception as error:
            raise DataError(f"--data {path}: not readable by `datasets` ({one_line(error)})") from None
        if isinstance(table, datasets.DatasetDict):
            splits = list(table)
            raise DataError(f"--data {path}: has the splits {', '.join(splits)}; name one, as {path}/{splits[0]}")
        return [Part(name or path.name, str(path), lambda: rows_of(table), None)]
    inside = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    files = [file for file in inside if file.is_file() and file.name.lower().endswith(SUFFIXES)]
    if not files:
        raise DataError(f"--data {path}: the folder has no {', '.join(SUFFIXES)} file")
    skipped = [file.name for file in inside if file not in files]
    if skipped:
        names = ", ".join(skipped[:_SHOWN]) + (", ..." if len(skipped) > _SHOWN else "")
        logger.info("--data %s: read %d files, skipped %d others: %s", path, len(files), len(skipped), names)
    return [_file_part(file, name) for file in files]


def _in_order(parts: Sequence[Part], limit: int | None) -> Iterator[tuple[Part, int, dict[str, Any] | UnusableRow]]:
    """All rows part by part; with a limit, one row of each part in turn, so that no part is left out."""
    if limit is None:
        yield from ((part, line, record) for part in parts for line, record in part.read())
        return
    waiting = deque((part, part.read()) for part in parts)
    while waiting and limit > 0:
        part, rows = waiting.popleft()
        if (row := next(rows, None)) is not None:
            yield part, *row
            waiting.append((part, rows))
            limit -= 1


def _source(record: dict[str, Any], part: Part) -> str:
    """A row's own `source`; the `category` of an evaluation prompt; else the part's name."""
    named = record.get("source")
    if not isinstance(named, str) and any(isinstance(record.get(key), list) for key in ("turns", "prompt")):
        named = record.get("category")
    if isinstance(named, str) and named.strip():
        return clean(" ".join(named.split()), set())[:80]
    return part.source


def _row(record: dict[str, Any], mode: Mode, own_id: str | None, row_ids: RowIds, place: dict[str, Any]) -> Row:
    """The row of a record; `place` is its source, origin and line."""
    if "input_ids" in record:
        ready = ready_tokens(record)
        if own_id:
            ids: dict[str, Any] = {"row_id": row_ids.unique(own_id), "conversation": own_id}
        else:
            ids = row_ids.of_content(None, ready["input_ids"])
        named = record.get("conversation")
        if isinstance(named, str) and named:
            ids["conversation"] = named
        return ReadyRow(row_id=ids["row_id"], **place, tokens=TokenRow(**ids, source=place["source"], **ready))
    if mode == "text":
        text = record.get("text")
        if not isinstance(text, str):
            found = "no column `text`" if "text" not in record else f"text is {shown(text)}"
            raise UnusableRow("no text", f"{found}; --mode text reads rendered text, --mode chat reads conversations")
        repairs: set[str] = set()
        text = clean(text, repairs)
        return TextRow(**row_ids.of_content(own_id, text), **place, text=text, repairs=tuple(sorted(repairs)))
    fields = conversation_of(record)
    content = [fields[name] for name in ("messages", "tools", "template_options", "next_turns")]
    return Conversation(**row_ids.of_content(own_id, content), **place, **fields)
