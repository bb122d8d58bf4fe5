"""The file that `regenerate` writes: one answer a line, appended as answers come, whole after any kill."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import TracebackType
from typing import Any

from peagle.data.records import Conversation
from peagle.errors import DataError, DiskError
from peagle.files import is_disk_full, lock_file, whole_file, write_json
from peagle.verifier.source import Generation

logger = logging.getLogger(__name__)


def answer_record(
    row_id: str, conversation: Conversation, prompt_ids: list[int], generation: Generation, text: str
) -> dict[str, Any]:
    """One line: a token row that `prepare` takes as it is, and the conversation for people.

    The mask is 1 on the answer, its end token included; the tail past the end is kept for replay and not supervised.
    An answer that the length limit cut is marked `finish_reason: "length"`, and without a tail also
    `next_is_supervised`: its next token would have been the verifier's too.
    """
    answer, tail = generation.ids, generation.tail_ids
    reply = {"role": "assistant", "content": text}
    return {
        "id": row_id,
        "source": conversation.source,
        "input_ids": [*prompt_ids, *answer, *tail],
        "loss_mask": [0] * len(prompt_ids) + [1] * len(answer) + [0] * len(tail),
        "tail_length": len(tail),
        "next_is_supervised": generation.finish_reason == "length" and not tail,
        "finish_reason": generation.finish_reason,
        "messages": [*conversation.messages, reply],
    }


class AnswerFile:
    """Answers by row id; what an earlier run wrote is there when it is opened.

    Args:
        path: the .jsonl file; settings, rejected rows and the run's record lie in `NAME.run` beside it.
        settings: what decides an answer (verifier, template, sampling); a file made with others is refused.
        overwrite: start anew instead of refusing.

    Raises:
        DataError: answers made with other settings, or a line that is no answer (other than a last one cut by a kill).
    """

    def __init__(self, path: Path, settings: dict[str, Any], overwrite: bool) -> None:
        self.path, self.side = path, path.with_suffix(".run")
        self.records: dict[str, dict[str, Any]] = {}
        self._lock = lock_file(self.side / ".lock", f"writing answers to {path}")
        if path.exists() and self._is_other(settings, overwrite):
            path.unlink()
        if path.exists():
            self._read()
        write_json(self.side / "settings.json", settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed on leaving)

    def add(self, record: dict[str, Any]) -> None:
        """Append an answer.

        Raises:
            DiskError: no space; the answers before it are whole.
        """
        self.records[record["id"]] = record
        try:
            self._handle.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._handle.flush()
        except OSError as error:
            if is_disk_full(error):
                raise DiskError(f"{self.path}: no space left on the disk; free some and run it again") from None
            raise

    def finish(self, order: list[str]) -> int:
        """Rewrite the file in the order of the input, so that it does not depend on batches or interruptions.

        Args:
            order: row ids; answers to other rows (an earlier run with more data) stay behind them.

        Returns:
            Number of answers in the file.
        """
        self._handle.close()
        place = {row_id: i for i, row_id in enumerate(order)}
        ids = sorted(self.records, key=lambda row_id: place.get(row_id, len(place)))
        with whole_file(self.path) as temporary, open(temporary, "w", encoding="utf-8") as handle:
            for row_id in ids:
                handle.write(json.dumps(self.records[row_id], ensure_ascii=False) + "\n")
        return len(ids)

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()
        self._lock.close()

    def _is_other(self, settings: dict[str, Any], overwrite: bool) -> bool:
        """Whether the file is to be made anew."""
        try:
            found = json.loads((self.side / "settings.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if found == settings:
            return False
        if overwrite:
            return True
        if not isinstance(found, dict):
            raise DataError(f"{self.path}: exists, and is not an output of `peagle regenerate`; give --overwrite")
        odd = [key for key in settings if found.get(key) != settings[key]]
        raise DataError(
            f"{self.path}: holds answers made otherwise (differs: {', '.join(odd)}). Give --overwrite to replace them, "
            "or another --output."
        )

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        whole_bytes = 0
        for number, line in enumerate(lines, start=1):
            if not line:
                whole_bytes += 1
                continue
            try:
                record = json.loads(line)
                self.records[record["id"]] = record
            except (ValueError, KeyError, TypeError):
                if number < len(lines):
                    raise DataError(f"{self.path}:{number}: not an answer; remove the line or the file") from None
                logger.warning("%s: the last line was cut by a kill and is made again", self.path)
                with open(self.path, "rb+") as handle:
                    handle.truncate(whole_bytes)
                return
            whole_bytes += len(line) + 1
        if lines[-1]:  # whole, but its newline is missing
            with open(self.path, "ab") as handle:
                handle.write(b"\n")
