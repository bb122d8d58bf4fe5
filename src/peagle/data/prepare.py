"""The stage `peagle prepare`: everything that was read is kept or listed with its reason, and the counts add up."""

import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, TypeVar

from peagle import log
from peagle._version import __version__
from peagle.data.config import PrepareConfig
from peagle.data.prepared import REJECTED, RowsWriter, read_summary, refuse_foreign
from peagle.data.readers import Part, guess_rows, parts_of, read_parts
from peagle.data.records import Rejected
from peagle.data.template import ChatTemplate, use_template_file
from peagle.data.tokenize import NO_REPLY, NO_SPAN, NO_TOKEN, Outcome, RowTokenizer, TextMarks, marks_of_template
from peagle.data.tokenizer import load_tokenizer, load_vocab_size, tokenizer_sha256
from peagle.errors import ConfigError, DataError, TemplateError
from peagle.files import sha256_file

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
_CHUNK = 32
_SMALL = 256
"""Fewer rows than this are not worth starting processes for."""
_function: Callable[[Any], Any] | None = None
_SHOWN = 3


@dataclass
class Counts:
    """What happened to the rows that were read. Always: read = kept + the sum of dropped."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_turns: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    mask_from: Counter[str] = field(default_factory=Counter)
    rows_cut: int = 0
    unsupervised_tokens: int = 0
    examples: dict[str, list[Rejected]] = field(default_factory=dict)
    """The first few rejected rows of each reason."""
    example_ids: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one row that was read."""
        self.read += 1
        self.unsupervised_tokens += outcome.num_unsupervised
        if outcome.rejected is None:
            self.kept += 1
            self.mask_from[outcome.method] += 1
            self.dropped_turns.update(outcome.dropped_turns)
            self.repaired.update(outcome.repairs)
            self.notes.update(outcome.notes)
            self.rows_cut += outcome.num_cut
            return
        self.dropped[outcome.rejected.reason] += 1
        first = self.examples.setdefault(outcome.rejected.reason, [])
        if len(first) < _SHOWN:
            first.append(outcome.rejected)
        self.example_ids = self.example_ids or outcome.example

    def log(self) -> None:
        """Log what was dropped and repaired, each reason with its count and the first places."""
        for reason, number in self.dropped.most_common():
            shown = "; ".join(f"{row.origin}:{row.line} ({row.detail})" for row in self.examples[reason])
            more = f"; ... all in {REJECTED}" if number > _SHOWN else ""
            logger.warning("dropped %d: %s: %s%s", number, reason, shown, more)
        for level, line, counter in (
            (logging.WARNING, "dropped %d replies of conversations that were kept: %s", self.dropped_turns),
            (logging.INFO, "repaired %d: %s", self.repaired),
            (logging.INFO, "noted %d: %s", self.notes),
        ):
            for text, number in counter.most_common():
                logger.log(level, line, number, text)
        if self.rows_cut:
            logger.info("cut %d rows at --seq-length", self.rows_cut)


def prepare(config: PrepareConfig) -> int:
    """Read conversations, tokenize them as the verifier's server would, and write the rows that training reads.

    Returns:
        0 when rows were written, or when the folder holds the very same preparation already.

    Raises:
        PeagleError: the model, the template or a file cannot be used, or no row is left.
    """
    # 1. The tokenizer, the template and the data, before anything is written.
    started_s = time.monotonic()
    tokenizer = load_tokenizer(config.model, config.trust_remote_code)
    vocab_size = load_vocab_size(config.model, config.trust_remote_code)
    template, no_template = _template(config, tokenizer)
    marks = _marks(config, tokenizer, template)
    parts = [part for spec in config.data for part in parts_of(spec)]
    made_from = _made_from(config, tokenizer, template, vocab_size, parts)
    if _is_done(config, made_from):
        return 0
    convert = RowTokenizer(
        template=template,
        marks=marks,
        no_template=no_template,
        vocab_size=vocab_size,
        seq_length=config.seq_length,
        minimum_valid_tokens=config.minimum_valid_tokens,
    )
    # 2. Every row, in order.
    counts, rows = Counts(), read_parts(parts, config.max_samples, config.mode)
    with RowsWriter(config.output, vocab_size) as writer:
        guesses = [guess_rows(part.path) if part.path is not None else config.max_samples or 1 for part in parts]
        total = max(1, min(sum(guesses), config.max_samples or sum(guesses)))
        with log.progress("prepare", total, "conversations") as meter:
            for outcome in ordered_map(convert, rows, config.num_preprocessing_workers):
                counts.add(outcome)
                for row in outcome.rows:
                    writer.add(row)
                if outcome.rejected is not None:
                    writer.reject(outcome.rejected)
                elif outcome.repairs:
                    writer.repaired(outcome.origin, outcome.line, outcome.row_id, outcome.repairs)
                meter.advance(1)
        # 3. The counts.
        counts.log()
        if writer.num_rows == 0:
            writer.finish_empty()
            raise DataError(_why_nothing(config, counts, marks, tokenizer))
        counters = ("dropped", "dropped_turns", "repaired", "notes", "mask_from")
        summary = {
            "format": 1,
            "model": config.model,
            "seq_length": config.seq_length,
            **{key: made_from[key] for key in ("vocab_size", "tokenizer_sha256", "template_sha256")},
            "rows_sha256": writer.digest.hexdigest(),
            "read": counts.read,
            "kept": counts.kept,
            **{name: dict(getattr(counts, name).most_common()) for name in counters},
            "rows": writer.num_rows,
            "rows_cut": counts.rows_cut,
            "tokens": writer.num_tokens,
            "supervised_tokens": writer.num_supervised,
            "sources": dict(sorted(writer.sources.items())),
            "made_from": made_from,
        }
        writer.finish(summary)
    # 4. What was done.
    seconds = round(time.monotonic() - started_s, 2)
    log.write_run(config.output, "prepare", config, {**summary, "seconds": seconds})
    share = writer.num_supervised / writer.num_tokens
    logger.info(
        "read %d, wrote %d rows (%d tokens, %.1f %% supervised) of %d conversations to %s, dropped %d, in %s",
        counts.read, writer.num_rows, writer.num_tokens, 100 * share, counts.kept, config.output,
        counts.dropped.total(), log.duration(seconds),
    )  # fmt: skip
    if share < 0.01:
        logger.warning("only %.2f %% of the tokens are supervised; look at them with `peagle inspect %s`",
                       100 * share, config.output)  # fmt: skip
    return 0


def _template(config: PrepareConfig, tokenizer: Any) -> tuple[ChatTemplate | None, str]:
    """The chat template in use, or None and why there is none: rows that are tokenized already need none."""
    try:
        options = json.loads(config.chat_template_kwargs or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"--chat-template-kwargs: expected a JSON object, found {config.chat_template_kwargs!r}")
    use_template_file(tokenizer, config.chat_template)
    try:
        template = ChatTemplate(tokenizer, options)
    except TemplateError as error:
        return None, str(error)
    bos = tokenizer.bos_token
    adds_bos = bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if adds_bos and "bos_token" not in template.text and bos not in template.text:
        logger.warning("the chat template prints no %s, though the tokenizer puts one before plain text; a chat server "
                       "adds none either, so the rows have none", bos)  # fmt: skip
    return template, ""


def _marks(config: PrepareConfig, tokenizer: Any, template: ChatTemplate | None) -> TextMarks | None:
    if config.mode == "chat":
        if config.assistant_pattern is not None:
            raise ConfigError("--assistant-pattern goes with --mode text; in chat mode the template gives the replies")
        return None
    if not tokenizer.is_fast:
        raise DataError(f"{config.model}: --mode text needs a fast tokenizer (one with a tokenizer.json)")
    if config.assistant_pattern is not None:
        try:
            pattern = re.compile(config.assistant_pattern, re.DOTALL)
        except re.error as error:
            raise DataError(f"--assistant-pattern: not a regular expression ({error})") from None
        return TextMarks(tokenizer, "pattern", pattern, config.assistant_pattern)
    if template is None:
        raise TemplateError(f"{config.model}: no chat template to take markers from; give --assistant-pattern")
    return marks_of_template(template)


def _made_from(
    config: PrepareConfig, tokenizer: Any, template: ChatTemplate | None, vocab_size: int, parts: list[Part]
) -> dict[str, Any]:
    """Everything that decides the result: with the same values a second run would write the same rows."""
    elsewhere = {"output", "overwrite", "num_preprocessing_workers", "chat_template", "trust_remote_code"}
    return {
        "peagle": __version__,
        "settings": config.model_dump(mode="json", exclude=elsewhere),
        "inputs": {part.origin: sha256_file(part.path) if part.path else None for part in parts},
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": hashlib.sha256(template.text.encode()).hexdigest() if template is not None else None,
        "vocab_size": vocab_size,
    }


def _is_done(config: PrepareConfig, made_from: dict[str, Any]) -> bool:
    """Whether the folder holds this very preparation.

    Raises:
        DataError: it holds another one, or somebody else's data set, and --overwrite was not given.
    """
    if config.overwrite:
        return False
    summary = read_summary(config.output)
    if summary is None:
        refuse_foreign(config.output)
        return False
    found = summary.get("made_from")
    if found == made_from:
        logger.info("%s: prepared already from the same data with the same settings; nothing to do", config.output)
        return True
    odd = [key for key in made_from if not isinstance(found, dict) or found.get(key) != made_from[key]]
    raise DataError(
        f"{config.output}: holds rows that were prepared otherwise (differs: {', '.join(odd)}). "
        "Give --overwrite to replace them, or another --output."
    )


def _why_nothing(config: PrepareConfig, counts: Counts, marks: TextMarks | None, tokenizer: Any) -> str:
    """One line for a run that kept nothing: the reasons, an example as it was seen, and what to do."""
    if counts.read == 0:
        return f"{', '.join(config.data)}: no rows in it"
    reasons = ", ".join(f"{number} {reason}" for reason, number in counts.dropped.most_common(4))
    main = counts.dropped.most_common(1)[0][0]
    first = counts.examples[main][0]
    line = f"no row is left of {counts.read} read ({reasons}); first {first.origin}:{first.line}: {first.detail}."
    if main == NO_SPAN:
        line += f" 0 of {counts.unsupervised_tokens} tokens supervised."
        if marks is not None:
            line += f" Looked for {marks.shown!r}: was the text rendered for another model than {config.model}?"
    elif main == NO_TOKEN:
        line += f" Raise --seq-length (now {config.seq_length}), or use data with shorter prompts."
    elif main == NO_REPLY:
        line += f" Run `peagle regenerate --model {config.model}` on this data and prepare what it writes."
    elif main in ("unstable template", "template refuses the row", "template drops tool turns"):
        line += f" The chat template of {config.model} is at fault; another can be given with --chat-template."
    if counts.example_ids:
        line += f" Example: {tokenizer.decode(counts.example_ids, skip_special_tokens=False)[:200]!r}"
    return f"{line} All reasons: {config.output / REJECTED}"


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], num_workers: int | None) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order.

    Args:
        function: picklable where processes are spawned (macOS, Windows); it may keep caches that change no result.
        items: read lazily, a bounded number ahead of the results.
        num_workers: processes; None takes the CPUs that this process may use, at most 16, and one for few items.

    Raises:
        DataError: a process was killed (out of memory, usually).
    """
    rows = iter(items)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = min(cpus, 16) if num_workers is None else num_workers
    head = list(itertools.islice(rows, max(_SMALL, _CHUNK * wanted)))
    wanted = min(wanted, -(-len(head) // _CHUNK))  # no more processes than there is work for
    rows = itertools.chain(head, rows)
    if wanted <= 1 or (num_workers is None and len(head) < _SMALL):
        yield from map(function, rows)
        return
    # The tokenizers library warns in every forked process otherwise; processes are the parallelism here.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(wanted, mp_context=context, initializer=_start, initargs=(function,)) as pool:
        waiting: deque[Future[list[Result]]] = deque()
        try:
            while (chunk := list(itertools.islice(rows, _CHUNK))) or waiting:
                if chunk:
                    waiting.append(pool.submit(_work, chunk))
                if not chunk or len(waiting) > 3 * wanted:
                    yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError("a worker process was killed, probably for memory; try fewer --num-workers") from None
        finally:
            for future in waiting:
                future.cancel()


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    parent = os.getppid()

    def end_with_parent() -> None:  # a parent that was killed tells nobody: its workers would wait for ever
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(chunk: list[Any]) -> list[Any]:
    assert _function is not None
    return [_function(item) for item in chunk]
