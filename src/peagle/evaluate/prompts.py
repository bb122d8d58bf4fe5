"""What is decoded or replayed: prompts, each with its data set and, where there is one, the answer on record."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.data.prepared import load_prepared
from peagle.data.readers import read_rows
from peagle.data.records import Conversation, ReadyRow, Rejected, TokenRow, UnusableRow
from peagle.data.template import render_prompt, use_template_file
from peagle.data.tokenizer import load_tokenizer
from peagle.drafter.model_config import DrafterConfig
from peagle.engine.engine import verifier_misfit
from peagle.errors import CheckpointError, PeagleError
from peagle.evaluate.config import EvaluateConfig
from peagle.verifier.model_config import VerifierConfig

logger = logging.getLogger(__name__)
DEFAULT_LIMIT = 512
_NAMED = 5
_BLANK_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Item:
    """One prompt."""

    row_id: str
    """Of the row it came from; a row of several replies gives several items."""
    source: str
    """Data set: a row of the table."""
    prompt_ids: list[int]
    recorded_ids: list[int] | None
    """The answer on record, or None."""
    tail_ids: list[int]
    """What the verifier would have said past the recorded answer's end; may be empty."""
    limit: int
    """Longest answer."""

    @property
    def start(self) -> int:
        """Position of the answer's first token."""
        return len(self.prompt_ids)

    @property
    def ids(self) -> list[int]:
        """Prompt, answer and tail."""
        return [*self.prompt_ids, *(self.recorded_ids or []), *self.tail_ids]

    def limited(self, limit: int) -> Item:
        """The same with a shorter limit. What follows a cut is known: it is the rest of the answer."""
        recorded, tail = self.recorded_ids, self.tail_ids
        if recorded is not None:
            recorded, tail = recorded[:limit], recorded[limit:] + tail
        return replace(self, recorded_ids=recorded, tail_ids=tail, limit=limit)


@dataclass
class Read:
    """Items, and what became of what was read."""

    items: list[Item] = field(default_factory=list)
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, where: str, reason: str) -> None:
        """Count a row that is not used, and name the first few of each reason."""
        self.dropped[reason] += 1
        if self.dropped[reason] <= _NAMED:
            logger.warning("%s: %s", where, reason)

    @property
    def dropped_text(self) -> str:
        """Reasons with their counts."""
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common()) or "none"


def read_items(config: EvaluateConfig, tokenizer: Any, max_tokens: int) -> Read:
    """Read prompts; prompt and answer together may have `max_tokens`: longer prompts are dropped, answers limited.

    Raises:
        DataError: what was named cannot be read at all.
    """
    read = Read()
    rows = _prepared_rows(config, read) if config.data_path is not None else _data_rows(config, tokenizer, read)
    for row_id, items in rows:
        if not items:
            read.drop(row_id, "no reply to measure")
        for item in items:
            longest = max_tokens - item.start
            if longest < 1:
                read.drop(item.row_id, f"prompt longer than the verifier takes ({max_tokens} tokens, one of them new)")
            else:
                read.items.append(item if item.limit <= longest else item.limited(longest))
    return read


def replies(row: TokenRow, config: EvaluateConfig) -> list[Item]:
    """The items of a row with a loss mask: one for each reply that has something before it."""
    items = []
    ends_at = len(row.input_ids) - row.tail_length
    for start, end in reply_spans(row.loss_mask):
        if start == 0:
            continue  # no prompt: the verifier never answered nothing
        whole = Item(
            row_id=row.row_id,
            source=row.source,
            prompt_ids=row.input_ids[:start],
            recorded_ids=row.input_ids[start:end],
            tail_ids=row.input_ids[end:] if end == ends_at else [],
            limit=end - start,
        )
        items.append(whole.limited(whole.limit if config.max_new_tokens is None else config.max_new_tokens))
    return items


def reply_spans(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of each maximal run of ones: 0 1 1 0 1 gives (1, 3) and (4, 5)."""
    spans, place = [], 0
    for value, run in itertools.groupby(loss_mask):
        start, place = place, place + len(list(run))
        if value:
            spans.append((start, place))
    return spans


def _prepared_rows(config: EvaluateConfig, read: Read) -> Iterator[tuple[str, list[Item]]]:
    """Row ids, with the items of each row."""
    assert config.data_path is not None
    prepared = load_prepared(config.data_path)
    places = list(range(len(prepared)))
    if config.max_samples is not None:
        places = in_turn(list(map(str, prepared.table["source"])))[: config.max_samples]
    for place in places:
        read.read += 1
        row = prepared.row(place)
        yield row.row_id, replies(row, config)


def in_turn(sources: Sequence[str]) -> list[int]:
    """Indices, one of each source in turn."""
    counters: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    ranks = [next(counters[source]) for source in sources]
    return sorted(range(len(sources)), key=ranks.__getitem__)


def _data_rows(config: EvaluateConfig, tokenizer: Any, read: Read) -> Iterator[tuple[str, list[Item]]]:
    """See `_prepared_rows`."""
    use_template_file(tokenizer, config.chat_template)
    specs = []
    for spec in config.data:
        # An empty file measures nothing, which the report says; it is no error of its own.
        path = Path(spec) if Path(spec).exists() else Path(spec.partition("=")[2])
        if path.is_file() and path.stat().st_size < _BLANK_BYTES and not path.read_bytes().strip():
            read.drop(spec, "the file is empty")
        else:
            specs.append(spec)
    for item in read_rows(specs, config.max_samples, "chat"):
        read.read += 1
        where = f"{item.origin}:{item.line}"
        if isinstance(item, Rejected):
            read.drop(where, item.reason)
        elif isinstance(item, ReadyRow):
            yield item.tokens.row_id, replies(item.tokens, config)
        elif isinstance(item, Conversation) and item.opening().is_prompt:
            try:
                prompt_ids = render_prompt(tokenizer, item.opening())
            except UnusableRow as problem:
                read.drop(where, problem.reason)
                continue
            prompt = Item(
                row_id=item.row_id,
                source=item.source,
                prompt_ids=prompt_ids,
                recorded_ids=None,
                tail_ids=[],
                limit=config.max_new_tokens or DEFAULT_LIMIT,
            )
            yield item.row_id, [prompt]
        else:
            read.drop(where, "no user turn to answer")


def check_pair(config: DrafterConfig, verifier: VerifierConfig, tokenizer: Any) -> str | None:
    """Refuse a drafter that was made for another verifier: sizes, layers, and the tokens behind the ids.

    Returns:
        A warning where the two could not be compared fully, else None.

    Raises:
        CheckpointError: another vocabulary, width or depth, or other tokens behind the same ids.
    """
    misfit = verifier_misfit(config, verifier.vocab_size, verifier.hidden_size, verifier.num_layers)
    if misfit is not None:
        raise CheckpointError(f"{verifier.name_or_path}: {misfit}; it was trained for {config.verifier}")
    if config.verifier == verifier.name_or_path:
        return None
    try:
        difference = token_difference(load_tokenizer(config.verifier, verifier.trust_remote_code), tokenizer)
    except PeagleError:
        return f"the drafter was trained for {config.verifier}, which is not here: its tokens were not compared"
    if difference is not None:
        raise CheckpointError(
            f"the drafter was trained for {config.verifier}, whose tokens are not those of {verifier.name_or_path}: "
            f"{difference}"
        )
    return None


def token_difference(one: Any, other: Any) -> str | None:
    """The first id that stands for two different tokens, in words; None where all agree."""
    ours, theirs = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (one, other))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            return f"id {index} is {ours.get(index)!r} and {theirs.get(index)!r}"
    return None
