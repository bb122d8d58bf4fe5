"""`peagle regenerate`: the verifier writes its own replies, since a drafter learns to predict ITS verifier."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from peagle import log
from peagle.data import Conversation, Rejected, UnusableRow, read_conversations, render_prompt
from peagle.data.template import template_text, use_template_file
from peagle.errors import DataError
from peagle.files import whole_file
from peagle.regenerate.answer_file import AnswerFile, answer_record
from peagle.regenerate.answers import TransformersAnswers
from peagle.regenerate.config import RegenerateConfig
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.source import AnswerSource, GenerationSettings, Prompt, RowRefused
from peagle.verifier.special_tokens import eos_ids, load_tokenizer, tokenizer_sha256
from peagle.verifier.weights import fingerprint

logger = logging.getLogger(__name__)
_NAMED = 5
_HARMONY_FINAL = "<|channel|>final<|message|>"


@dataclass
class _Task:
    """One user turn to be answered."""

    row_id: str
    conversation: Conversation
    """Ends with that turn."""
    turn: int
    prompt_ids: list[int]


@dataclass
class _Outcome:
    """What became of what was read."""

    read: int = 0
    written: int = 0
    tokens: int = 0
    cut: int = 0
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Row id -> (number of its conversation in the input, turn)."""
    rejected: list[dict[str, Any]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def reject(self, where: str, row_id: str | None, reason: str, detail: str) -> None:
        """Count a row, or a turn, that gets no answer, and name it (the first few of each reason)."""
        self.rejected.append({"where": where, "id": row_id, "reason": reason, "detail": detail})
        self.reasons[reason] += 1
        if self.reasons[reason] <= _NAMED:
            logger.warning("%s%s", f"{where}: {reason}", f" ({detail})" if detail else "")


def regenerate(config: RegenerateConfig) -> int:
    """Answer every prompt, a user turn of every conversation at a time, and write the answers.

    Returns:
        0 when the job ran to its end and the file holds answers.

    Raises:
        PeagleError: data, verifier, template or disk cannot be used; or there is nothing to answer.
    """
    started_s = time.monotonic()
    verifier_config = load_verifier_config(config.model, config.trust_remote_code)
    tokenizer = load_tokenizer(config.model, config.trust_remote_code)
    use_template_file(tokenizer, config.chat_template)
    template_text(tokenizer)  # fail before the model loads
    outcome = _Outcome()
    conversations = _read(config, outcome)
    if not conversations:
        raise DataError(f"no prompt to answer in {', '.join(config.data)} ({_reasons(outcome)})")
    numbers = {conversation.row_id: number for number, conversation in enumerate(conversations)}
    settings = GenerationSettings(
        max_new_tokens=config.max_new_tokens,
        eos_ids=eos_ids(verifier_config, tokenizer),
        temperature=config.temperature,
        top_p=config.top_p,
        tail_tokens=config.tail_tokens,
    )
    with AnswerFile(config.output, _identity(config, verifier_config, tokenizer, settings), config.overwrite) as file:
        kept_before = len(file.records)
        source = _open(config, verifier_config, settings, tokenizer, conversations[0])
        try:
            turn = 1
            while conversations:
                tasks = _tasks(conversations, numbers, turn, tokenizer, source.max_tokens, outcome)
                _answer(tasks, turn, source, config, tokenizer, settings, file, outcome)
                conversations = _continued(tasks, turn, config, file, outcome)
                turn += 1
        finally:
            source.close()
        total = file.finish(sorted(outcome.places, key=outcome.places.__getitem__))
    _report(config, outcome, kept_before, total, started_s)
    return 0


def _read(config: RegenerateConfig, outcome: _Outcome) -> list[Conversation]:
    found = []
    for item in read_conversations(config.data, config.max_samples):
        outcome.read += 1
        if isinstance(item, Rejected):
            outcome.reject(f"{item.origin}:{item.line}", item.row_id, item.reason, item.detail)
            continue
        opening = item.opening()
        if opening.is_prompt:
            found.append(opening)
        else:
            outcome.reject(f"{item.origin}:{item.line}", item.row_id, "no user turn to answer", "")
    return found


def _tasks(
    conversations: list[Conversation],
    numbers: dict[str, int],
    turn: int,
    tokenizer: Any,
    max_tokens: int,
    outcome: _Outcome,
) -> list[_Task]:
    tasks = []
    for conversation in conversations:
        where = f"{conversation.origin}:{conversation.line}"
        has_more = turn > 1 or bool(conversation.next_turns)
        row_id = f"{conversation.row_id}/{turn}" if has_more else conversation.row_id
        try:
            prompt_ids = render_prompt(tokenizer, conversation)
        except UnusableRow as problem:
            outcome.reject(where, row_id, problem.reason, problem.detail)
            continue
        if len(prompt_ids) >= max_tokens:
            reason = f"longer than the verifier takes ({max_tokens} tokens, one of them new)"
            outcome.reject(where, row_id, reason, f"row {row_id} has {len(prompt_ids)} tokens")
            continue
        tasks.append(_Task(row_id, conversation, turn, prompt_ids))
        outcome.places[row_id] = (numbers[conversation.row_id], turn)
    return tasks


def _answer(
    tasks: list[_Task],
    turn: int,
    source: AnswerSource,
    config: RegenerateConfig,
    tokenizer: Any,
    settings: GenerationSettings,
    file: AnswerFile,
    outcome: _Outcome,
) -> None:
    by_id = {task.row_id: task for task in tasks}
    wanted = {row_id for row_id in by_id if row_id not in file.records}
    prompts = [
        Prompt(task.row_id, task.prompt_ids, _seed(config.seed, task.row_id), task.conversation) for task in tasks
    ]
    label = "regenerate" if turn == 1 else f"regenerate turn {turn}"
    started_s = time.monotonic()
    tokens = 0
    with log.progress(label, len(wanted), "answers") as meter:
        for found in source.answers(prompts, wanted) if wanted else _nothing():
            task = by_id[found.row_id]
            if isinstance(found, RowRefused):
                where = f"{task.conversation.origin}:{task.conversation.line}"
                outcome.reject(where, found.row_id, found.reason, found.detail)
                meter.advance(1)
                continue
            generation = found.generation
            text = reply_text(tokenizer, generation.ids, settings.eos_ids)
            prompt_ids = found.prompt_ids or task.prompt_ids
            file.add(answer_record(task.row_id, task.conversation, prompt_ids, generation, text))
            outcome.written += 1
            outcome.cut += generation.finish_reason == "length"
            tokens += len(generation.ids) + len(generation.tail_ids)
            meter.advance(1, f"{tokens / max(time.monotonic() - started_s, 1e-9):.0f} tokens/s")
    outcome.tokens += tokens


def _continued(
    tasks: list[_Task], turn: int, config: RegenerateConfig, file: AnswerFile, outcome: _Outcome
) -> list[Conversation]:
    """The conversations that have a further user turn, with their answers in place."""
    if config.max_turns is not None and turn >= config.max_turns:
        return []
    found = []
    for task in tasks:
        record = file.records.get(task.row_id)
        if record is None or not task.conversation.next_turns:
            continue
        if record["finish_reason"] == "length":
            where = f"{task.conversation.origin}:{task.conversation.line}"
            outcome.reject(where, task.row_id, "later turns left out: the answer before them was cut", "")
            continue
        found.append(task.conversation.answered(record["messages"][-1]))
    return found


def reply_text(tokenizer: Any, ids: list[int], ends: tuple[int, ...]) -> str:
    """An answer as text for people and for the history of later turns: without its end token; of a GPT-OSS answer, the
    final channel."""
    said = ids[:-1] if ids and ids[-1] in ends else ids
    raw = str(tokenizer.decode(said, skip_special_tokens=False))
    if _HARMONY_FINAL in raw:
        return raw.rpartition(_HARMONY_FINAL)[2]
    return str(tokenizer.decode(said, skip_special_tokens=True))


def _identity(
    config: RegenerateConfig, verifier_config: VerifierConfig, tokenizer: Any, settings: GenerationSettings
) -> dict[str, Any]:
    """What decides an answer."""
    return {
        "verifier": verifier_config.name_or_path if config.endpoint else fingerprint(verifier_config),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": hashlib.sha256(template_text(tokenizer).encode()).hexdigest(),
        "dtype": config.dtype,
        "seed": config.seed,
        **({"rendered_by": "server"} if config.chat else {}),
        **json.loads(json.dumps(asdict(settings))),
    }


def _open(
    config: RegenerateConfig,
    verifier_config: VerifierConfig,
    settings: GenerationSettings,
    tokenizer: Any,
    first: Conversation,
) -> AnswerSource:
    if config.endpoint:
        from peagle.vllm.answers import AnswerEndpoints, EndpointAnswers
        from peagle.vllm.client import RetryPolicy

        policy = RetryPolicy(config.request_timeout_s, config.max_retries, config.restart_wait_s)
        endpoints = AnswerEndpoints(
            config.endpoint, config.api_key, config.served_model_name, config.concurrency, policy, config.chat
        )
        source = EndpointAnswers(verifier_config, settings, endpoints)
        if config.chat:
            return source
        with contextlib.suppress(UnusableRow):  # said later, with its line
            source.compare_template(first, render_prompt(tokenizer, first))
        return source
    verifier = TransformersVerifier(verifier_config, config.dtype, config.device)
    return TransformersAnswers(verifier, settings, config.batch_size)


def _seed(seed: int, row_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {row_id}".encode()).digest()[:8], "big") >> 1


def _nothing() -> Iterator[Any]:
    return iter(())


def _reasons(outcome: _Outcome) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in outcome.reasons.most_common()) or "nothing was read"


def _report(config: RegenerateConfig, outcome: _Outcome, kept_before: int, total: int, started_s: float) -> None:
    seconds = round(time.monotonic() - started_s, 2)
    side = config.output.with_suffix(".run")
    with whole_file(side / "rejected.jsonl") as temporary:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in outcome.rejected]
        temporary.write_text("".join(lines), encoding="utf-8")
    record = {
        "read": outcome.read,
        "written": outcome.written,
        "kept_from_before": kept_before,
        "answers": total,
        "tokens": outcome.tokens,
        "cut_by_limit": outcome.cut,
        "dropped": dict(outcome.reasons),
        "seconds": seconds,
    }
    log.write_run(side, "regenerate", config, record)
    if total == 0:
        raise DataError(f"{config.output}: no answer could be written ({_reasons(outcome)})")
    logger.info(
        "read %d conversations, wrote %d answers (%d tokens, %d cut by the limit) to %s, %d were there, dropped %d%s, "
        "in %s",
        outcome.read, outcome.written, outcome.tokens, outcome.cut, config.output, kept_before,
        len(outcome.rejected), f" ({_reasons(outcome)})" if outcome.rejected else "", log.duration(seconds),
    )  # fmt: skip
