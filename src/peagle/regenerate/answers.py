"""Answers: written by the engine without a drafter, and the file they go to, one a line, whole after any kill."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from peagle.config import Sampling
from peagle.data.records import Conversation
from peagle.engine import Engine, Request
from peagle.errors import DataError, DiskError
from peagle.files import is_disk_full, lock_file, whole_file, write_json
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.source import Generation, GenerationSettings, Prompt, RowAnswer, RowRefused

logger = logging.getLogger(__name__)


class EngineAnswers:
    """Answers prompts of like length together. An `AnswerSource`.

    The groups depend on the whole job: a resumed greedy job gives the bits of an uninterrupted one. Sampled answers
    depend on their prompt's seed, not on their group.

    Args:
        verifier: the model.
        settings: how answers are written.
        batch_size: prompts of one group.
    """

    def __init__(self, verifier: TransformersVerifier, settings: GenerationSettings, batch_size: int) -> None:
        sampling = Sampling(temperature=settings.temperature, top_p=settings.top_p)
        self._engine = Engine.plain(verifier.model, settings.eos_ids, sampling, batch_size)
        self._past_the_end = Engine.plain(verifier.model, (), sampling, batch_size)
        self._settings, self._batch_size = settings, batch_size
        self.max_tokens = verifier.verifier_config.max_position_embeddings

    def answers(self, prompts: Sequence[Prompt], wanted: AbstractSet[str]) -> Iterator[RowAnswer | RowRefused]:
        """See `AnswerSource.answers`; refuses no row."""
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].input_ids), i))
        for start in range(0, len(order), self._batch_size):
            group = [prompts[i] for i in order[start : start + self._batch_size]]
            if wanted.isdisjoint(prompt.row_id for prompt in group):
                continue
            limit = self._settings.max_new_tokens
            requests = [
                Request(prompt.input_ids, min(limit, self.max_tokens - len(prompt.input_ids)), prompt.seed)
                for prompt in group
            ]
            if self._settings.tail_tokens:
                generations = self._with_tails(group, requests)
            else:
                stream = self._engine.stream(requests)
                generations = ((i, Generation(answer.ids, answer.finish_reason, [])) for i, answer in stream)
            for i, generation in generations:
                if group[i].row_id in wanted:
                    yield RowAnswer(group[i].row_id, generation)

    def close(self) -> None:
        """Nothing to release."""

    def _with_tails(self, group: Sequence[Prompt], requests: list[Request]) -> Iterator[tuple[int, Generation]]:
        """A tail is the answer to prompt and answer, without end tokens; so servers are asked for it too."""
        answers = self._engine.generate(requests)
        further = {}
        for i, (prompt, answer) in enumerate(zip(group, answers)):
            context = [*prompt.input_ids, *answer.ids]
            length = min(self._settings.tail_tokens, self.max_tokens - len(context))
            if length > 0:
                further[i] = Request(context, length, prompt.seed + 1)
        tails = dict(zip(further, self._past_the_end.generate(list(further.values()))))
        for i, answer in enumerate(answers):
            yield i, Generation(answer.ids, answer.finish_reason, tails[i].ids if i in tails else [])


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
        "conversation": conversation.conversation or conversation.row_id,
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

    def __exit__(self, *error: object) -> None:
        self._handle.close()
        self._lock.close()

    def _is_other(self, settings: dict[str, Any], overwrite: bool) -> bool:
        """Whether the file is to be made anew."""
        try:
            former = json.loads((self.side / "settings.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            former = None
        if former == settings or overwrite:
            return bool(former != settings)
        if not isinstance(former, dict):
            raise DataError(f"{self.path}: exists, and is not an output of `peagle regenerate`; give --overwrite")
        odd = [key for key in settings if former.get(key) != settings[key]]
        raise DataError(
            f"{self.path}: holds answers made otherwise (differs: {', '.join(odd)}). Give --overwrite to replace them, "
            "or another --output."
        )

    def _read(self) -> None:
        """Take over an earlier run's answers; of the last line a kill may have cut a part, or only its newline."""
        *lines, last = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if line and not self._take(line):
                raise DataError(f"{self.path}:{number}: not an answer; remove the line or the file")
        if last and self._take(last):
            with open(self.path, "ab") as handle:
                handle.write(b"\n")
        elif last:
            logger.warning("%s: the last line was cut by a kill and is made again", self.path)
            with open(self.path, "rb+") as handle:
                handle.truncate(self.path.stat().st_size - len(last))

    def _take(self, line: bytes) -> bool:
        try:
            record = json.loads(line)
            self.records[record["id"]] = record
        except (ValueError, KeyError, TypeError):
            return False
        return True
