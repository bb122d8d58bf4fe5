"""A folder of prepared rows: read by later stages, written row by row as an Arrow dataset with its counts and lists."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.data.records import Rejected, TokenRow
from peagle.errors import DataError, one_line
from peagle.files import lock_file, whole_file, write_json

if TYPE_CHECKING:
    from torch import Tensor

SUMMARY, REJECTED, REPAIRED = "summary.json", "rejected.jsonl", "repaired.jsonl"
WORK = ".prepare.tmp"
FREQUENCIES = "token_frequencies.safetensors"
_OWN = ("data-*.arrow", "state.json", "dataset_info.json", FREQUENCIES, REJECTED, REPAIRED, SUMMARY)
_BATCH_ROWS = 256


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

    @property
    def has_conversations(self) -> bool:
        """Whether rows say which conversation they are of; those that earlier versions prepared do not."""
        return "conversation" in self.table.column_names

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
        raise DataError(f"{folder}: damaged ({one_line(error)}); run `peagle prepare --overwrite` again") from None
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


class RowsWriter:
    """Collects rows in a work folder inside `output`; `finish` moves them in place; other files stay."""

    def __init__(self, output: Path, vocab_size: int) -> None:
        import datasets
        import numpy as np
        import pyarrow as pa

        self.output, self.work = output, output / WORK
        self.frequencies = np.zeros(vocab_size, dtype=np.int64)
        self.num_rows = self.num_tokens = self.num_supervised = 0
        self.sources: Counter[str] = Counter()
        self.digest = hashlib.sha256()  # of all rows in order: the identity of the prepared data
        self._lock_path = output / ".prepare.lock"
        self._lock = lock_file(self._lock_path, f"preparing into {output}")
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        features = datasets.Features(
            {
                "row_id": datasets.Value("string"),
                "source": datasets.Value("string"),
                "input_ids": datasets.List(datasets.Value("int32")),
                "loss_mask": datasets.List(datasets.Value("int8")),
                "next_is_supervised": datasets.Value("bool"),
                "tail_length": datasets.Value("int32"),
                "conversation": datasets.Value("string"),
            }
        )
        self._schema = features.arrow_schema
        self._stream = pa.ipc.new_stream(str(self.work / "rows.arrow"), self._schema)
        self._rejected = open(self.work / REJECTED, "w", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        self._repaired = open(self.work / REPAIRED, "w", encoding="utf-8")  # noqa: SIM115
        self._batch: list[TokenRow] = []

    def __enter__(self) -> RowsWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._close()
        except OSError:  # a full disk refuses the last bytes too; the error that brought us here is the one to tell
            if error is None:
                raise
        finally:
            shutil.rmtree(self.work, ignore_errors=True)
            self._lock_path.unlink(missing_ok=True)
            self._lock.close()

    def add(self, row: TokenRow) -> None:
        """Append one row."""
        import numpy as np

        ids = np.asarray(row.input_ids, dtype=np.int64)
        mask = np.asarray(row.loss_mask, dtype=bool)
        supervised = ids[mask]
        np.add.at(self.frequencies, supervised, 1)
        self.num_rows += 1
        self.num_tokens += len(ids)
        self.num_supervised += len(supervised)
        self.sources[row.source] += 1
        for part in (row.row_id.encode(), ids.tobytes(), mask.tobytes()):
            self.digest.update(len(part).to_bytes(8, "little") + part)
        self.digest.update(bytes([row.next_is_supervised]) + row.tail_length.to_bytes(4, "little"))
        self._batch.append(row)
        if len(self._batch) == _BATCH_ROWS:
            self._flush()

    def reject(self, rejected: Rejected) -> None:
        """List a row that gave nothing."""
        self._rejected.write(json.dumps(vars(rejected)) + "\n")

    def repaired(self, origin: str, line: int, row_id: str, repairs: tuple[str, ...]) -> None:
        """List a row that was kept after repairs."""
        self._repaired.write(json.dumps({"origin": origin, "line": line, "row_id": row_id, "repairs": repairs}) + "\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Save the dataset and everything beside it; the summary, written last, says that all of it is there."""
        import datasets
        from datasets.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled
        from safetensors.numpy import save_file

        self._flush()
        self._close()
        done = self.work / "done"
        was_on = is_progress_bar_enabled()
        disable_progress_bar()  # `datasets` would draw its own into ours
        try:
            datasets.Dataset.from_file(str(self.work / "rows.arrow")).save_to_disk(str(done))
        finally:
            if was_on:
                enable_progress_bar()
        with whole_file(done / FREQUENCIES) as temporary:
            save_file({"frequencies": self.frequencies}, str(temporary))
        for name in (REJECTED, REPAIRED):
            (self.work / name).rename(done / name)
        # What an earlier preparation left goes, the summary first, so that half a dataset never passes for a whole.
        for pattern in (SUMMARY, *_OWN):
            for path in self.output.glob(pattern):
                path.unlink()
        for path in sorted(done.iterdir(), key=lambda path: (path.name != FREQUENCIES, path.name)):
            path.rename(self.output / path.name)
        write_json(self.output / SUMMARY, summary)

    def finish_empty(self) -> None:
        """Nothing was kept: leave only the list of rejected rows."""
        self._close()
        with whole_file(self.output / REJECTED) as temporary:
            shutil.copyfile(self.work / REJECTED, temporary)

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._batch:
            return
        columns = [[getattr(row, name) for row in self._batch] for name in self._schema.names]
        arrays = [pa.array(column, type=kind) for column, kind in zip(columns, self._schema.types)]
        self._stream.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._batch = []

    def _close(self) -> None:
        self._stream.close()
        self._rejected.close()
        self._repaired.close()


def refuse_foreign(folder: Path) -> None:
    """Raise `DataError` if preparing into `folder` would replace somebody else's Arrow dataset.

    Ours has the token frequencies (they arrive first and go last) or, after a kill, the work folder beside them.
    """
    if any((folder / name).exists() for name in (SUMMARY, FREQUENCIES, WORK)):
        return
    for path in (path for pattern in _OWN[:3] for path in sorted(folder.glob(pattern))):
        raise DataError(
            f"{path}: a data set that `peagle prepare` did not make would be replaced. Give another --output, or "
            "--overwrite to replace it."
        )
