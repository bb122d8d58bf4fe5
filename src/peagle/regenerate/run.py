"""`peagle regenerate`: the verifier writes its own replies, since a drafter learns to predict ITS verifier."""

import contextlib
import hashlib
import json
import logging
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from peagle import log
from peagle.data.readers import read_conversations
from peagle.data.records import Conversation, Rejected, UnusableRow
from peagle.data.template import render_prompt, template_text, use_template_file
from peagle.data.tokenizer import load_tokenizer, tokenizer_sha256
from peagle.errors import DataError
from peagle.files import whole_file
from peagle.regenerate.answers import AnswerFile, EngineAnswers, answer_record
from peagle.regenerate.config import RegenerateConfig
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.source import AnswerSource, GenerationSettings, Prompt, RowRefused
from peagle.verifier.special_tokens import eos_ids
from peagle.verifier.weights import fingerprint

logger = logging.getLogger(__name__)
_NAMED = 5
_HARMONY_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True)
class _Task:
    """One user turn to be answered."""

    row_id: str
    conversation: Conversation
    """Ends with that turn."""
    prompt_ids: list[int]

    @property
    def where(self) -> str:
        """Its place in the data."""
        return f"{self.conversation.origin}:{self.conversation.line}"


def regenerate(config: RegenerateConfig) -> int:
    """Answer every prompt, a user turn of every conversation at a time, and write the answers.

    Returns:
        0 when the job ran to its end and the file holds answers.

    Raises:
        PeagleError: data, verifier, template or disk cannot be used; or there is nothing to answer.
    """
    began_s = time.monotonic()
    verifier = load_verifier_config(config.model, config.trust_remote_code)
    tokenizer = load_tokenizer(config.model, config.trust_remote_code)
    use_template_file(tokenizer, config.chat_template)
    template_text(tokenizer)  # fail before the model loads
    job = _Job(config, tokenizer, eos_ids(verifier, tokenizer))
    conversations = job.read()
    if not conversations:
        raise DataError(f"no prompt to answer in {', '.join(config.data)} ({job.reasons_text})")
    settings = GenerationSettings(
        max_new_tokens=config.max_new_tokens,
        eos_ids=job.eos_ids,
        temperature=config.temperature,
        top_p=config.top_p,
        tail_tokens=config.tail_tokens,
    )
    with AnswerFile(config.output, _identity(config, verifier, tokenizer, settings), config.overwrite) as file:
        num_before = len(file.records)
        source = _open(config, verifier, settings, tokenizer, conversations[0])
        try:
            turn = 1
            while conversations:
                tasks = job.tasks(conversations, turn, source.max_tokens)
                job.answer(tasks, turn, source, file)
                conversations = job.continued(tasks, turn, file)
                turn += 1
        finally:
            source.close()
        num_answers = file.finish(sorted(job.places, key=job.places.__getitem__))
    job.report(num_before, num_answers, time.monotonic() - began_s)
    return 0


class _Job:
    """A run over all conversations, a turn at a time, and what became of what was read."""

    def __init__(self, config: RegenerateConfig, tokenizer: Any, eos_ids: tuple[int, ...]) -> None:
        self.config, self.tokenizer, self.eos_ids = config, tokenizer, eos_ids
        self.num_read = self.num_written = self.num_tokens = self.num_cut = 0
        self.rejected: list[dict[str, Any]] = []
        self.reasons: Counter[str] = Counter()
        self._numbers: dict[str, int] = {}  # id of a conversation -> its number in the input
        self.places: dict[str, tuple[int, int]] = {}  # row id -> (number of its conversation, turn)

    @property
    def reasons_text(self) -> str:
        """Why rows were rejected, with counts."""
        return ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common()) or "nothing was read"

    def reject(self, where: str, row_id: str | None, reason: str, detail: str) -> None:
        """Count a row, or a turn, that gets no answer, and name the first few of each reason."""
        self.rejected.append({"where": where, "id": row_id, "reason": reason, "detail": detail})
        self.reasons[reason] += 1
        if self.reasons[reason] <= _NAMED:
            logger.warning("%s%s", f"{where}: {reason}", f" ({detail})" if detail else "")

    def read(self) -> list[Conversation]:
        """The conversations, each up to its first user turn."""
        openings = []
        for item in read_conversations(self.config.data, self.config.max_samples):
            self.num_read += 1
            where = f"{item.origin}:{item.line}"
            if isinstance(item, Rejected):
                self.reject(where, item.row_id, item.reason, item.detail)
            elif (opening := item.opening()).is_prompt:
                openings.append(opening)
            else:
                self.reject(where, item.row_id, "no user turn to answer", "")
        self._numbers = {conversation.row_id: number for number, conversation in enumerate(openings)}
        return openings

    def tasks(self, conversations: list[Conversation], turn: int, max_tokens: int) -> list[_Task]:
        """Render the conversations, each of which ends with the user turn of this number."""
        tasks = []
        for conversation in conversations:
            has_more = turn > 1 or bool(conversation.next_turns)
            row_id = f"{conversation.row_id}/{turn}" if has_more else conversation.row_id
            try:
                prompt_ids = render_prompt(self.tokenizer, conversation)
                if len(prompt_ids) >= max_tokens:
                    reason = f"longer than the verifier takes ({max_tokens} tokens, one of them new)"
                    raise UnusableRow(reason, f"row {row_id} has {len(prompt_ids)} tokens")
            except UnusableRow as problem:
                where = f"{conversation.origin}:{conversation.line}"
                self.reject(where, row_id, problem.reason, problem.detail)
                continue
            tasks.append(_Task(row_id, conversation, prompt_ids))
            self.places[row_id] = (self._numbers[conversation.row_id], turn)
        return tasks

    def answer(self, tasks: list[_Task], turn: int, source: AnswerSource, file: AnswerFile) -> None:
        """Write the answers that the file has not yet."""
        by_id = {task.row_id: task for task in tasks}
        wanted = {row_id for row_id in by_id if row_id not in file.records}
        if not wanted:
            return
        prompts = []
        for task in tasks:
            digest = hashlib.sha256(f"{self.config.seed} {task.row_id}".encode()).digest()
            seed = int.from_bytes(digest[:8], "big") >> 1
            prompts.append(Prompt(task.row_id, task.prompt_ids, seed, task.conversation))
        began_s, before = time.monotonic(), self.num_tokens
        with log.progress("regenerate" if turn == 1 else f"regenerate turn {turn}", len(wanted), "answers") as meter:
            for result in source.answers(prompts, wanted):
                task = by_id[result.row_id]
                if isinstance(result, RowRefused):
                    self.reject(task.where, result.row_id, result.reason, result.detail)
                    meter.advance(1)
                    continue
                generation = result.generation
                text = reply_text(self.tokenizer, generation.ids, self.eos_ids)
                prompt_ids = result.prompt_ids or task.prompt_ids
                file.add(answer_record(task.row_id, task.conversation, prompt_ids, generation, text))
                self.num_written += 1
                self.num_cut += generation.finish_reason == "length"
                self.num_tokens += len(generation.ids) + len(generation.tail_ids)
                rate = (self.num_tokens - before) / max(time.monotonic() - began_s, 1e-9)
                meter.advance(1, f"{rate:.0f} tokens/s")

    def continued(self, tasks: list[_Task], turn: int, file: AnswerFile) -> list[Conversation]:
        """The conversations that have a further user turn, with their answers in place."""
        if self.config.max_turns is not None and turn >= self.config.max_turns:
            return []
        conversations = []
        for task in tasks:
            record = file.records.get(task.row_id)
            if record is None or not task.conversation.next_turns:
                continue
            if record["finish_reason"] == "length":
                self.reject(task.where, task.row_id, "later turns left out: the answer before them was cut", "")
                continue
            conversations.append(task.conversation.answered(record["messages"][-1]))
        return conversations

    def report(self, num_before: int, num_answers: int, seconds: float) -> None:
        """Write the rejected rows and the manifest beside the answers.

        Raises:
            DataError: there is no answer at all.
        """
        side = self.config.output.with_suffix(".run")
        with whole_file(side / "rejected.jsonl") as temporary:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self.rejected]
            temporary.write_text("".join(lines), encoding="utf-8")
        record = {
            "read": self.num_read,
            "written": self.num_written,
            "kept_from_before": num_before,
            "answers": num_answers,
            "tokens": self.num_tokens,
            "cut_by_limit": self.num_cut,
            "dropped": dict(self.reasons),
            "seconds": round(seconds, 2),
        }
        log.write_run(side, "regenerate", self.config, record)
        if num_answers == 0:
            raise DataError(f"{self.config.output}: no answer could be written ({self.reasons_text})")
        logger.info(
            "read %d conversations, wrote %d answers (%d tokens, %d cut by the limit) to %s, %d were there, dropped "
            "%d%s, in %s",
            self.num_read, self.num_written, self.num_tokens, self.num_cut, self.config.output, num_before,
            len(self.rejected), f" ({self.reasons_text})" if self.rejected else "", log.duration(seconds),
        )  # fmt: skip


def reply_text(tokenizer: Any, ids: list[int], ends: tuple[int, ...]) -> str:
    """An answer as text for people and for the history of later turns: without its end token; of a GPT-OSS answer, the
    final channel."""
    ids = ids[:-1] if ids and ids[-1] in ends else ids
    raw = str(tokenizer.decode(ids, skip_special_tokens=False))
    if _HARMONY_FINAL in raw:
        return raw.rpartition(_HARMONY_FINAL)[2]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _identity(
    config: RegenerateConfig, verifier: VerifierConfig, tokenizer: Any, settings: GenerationSettings
) -> dict[str, Any]:
    """What decides an answer."""
    return {
        "verifier": verifier.name_or_path if config.endpoint else fingerprint(verifier),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": hashlib.sha256(template_text(tokenizer).encode()).hexdigest(),
        "dtype": config.dtype,
        "seed": config.seed,
        **({"rendered_by": "server"} if config.chat else {}),
        **json.loads(json.dumps(asdict(settings))),
    }


def _open(
    config: RegenerateConfig,
    verifier: VerifierConfig,
    settings: GenerationSettings,
    tokenizer: Any,
    first: Conversation,
) -> AnswerSource:
    if config.endpoint:
        from peagle.vllm.answers import EndpointAnswers

        source = EndpointAnswers(verifier, settings, config, config.chat)
        if not config.chat:
            with contextlib.suppress(UnusableRow):  # said later, with its line
                source.compare_template(first, render_prompt(tokenizer, first))
        return source
    return EngineAnswers(TransformersVerifier(verifier, config.dtype, config.device), settings, config.batch_size)
