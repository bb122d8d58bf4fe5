"""What is decoded or replayed: prompts, each with its data set and, where there is one, the answer on record."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.data import Conversation, ReadyRow, Rejected, TokenRow, UnusableRow, load_prepared, read_rows, render_prompt
from peagle.drafter.model_config import DrafterConfig
from peagle.errors import CheckpointError, ConfigError, PeagleError
from peagle.evaluate.config import EvaluateConfig
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.special_tokens import load_tokenizer

logger = logging.getLogger(__name__)
DEFAULT_LIMIT = 512
_NAMED = 5
_BLANK_BYTES = 4096


@dataclass(frozen=True)
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


@dataclass
class Read:
    """Items, and what became of what was read."""

    items: list[Item] = field(default_factory=list)
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

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
    """Read prompts.

    Args:
        config: which, and how many.
        tokenizer: the verifier's, with its chat template.
        max_tokens: longest prompt and answer together; longer prompts are dropped, answers limited.

    Raises:
        DataError: what was named cannot be read at all.
    """
    found = Read()
    rows = _prepared_rows(config, found) if config.data_path is not None else _data_rows(config, tokenizer, found)
    for row, prompt_ids in rows:
        items = [_prompt_item(row, prompt_ids, config)] if prompt_ids is not None else replies(row, config)
        if not items:
            found.drop(row.row_id, "no reply to measure")
        for item in items:
            room = max_tokens - item.start
            if room < 1:
                found.drop(item.row_id, f"prompt longer than the verifier takes ({max_tokens} tokens, one of them new)")
            else:
                found.items.append(item if item.limit <= room else _limited(item, room))
    return found


def replies(row: TokenRow, config: EvaluateConfig) -> list[Item]:
    """The items of a row with a loss mask: one for each reply that has something before it."""
    items = []
    ends_at = len(row.input_ids) - row.tail_length
    for start, end in reply_spans(row.loss_mask):
        if start == 0:
            continue  # the verifier never answered nothing
        recorded = row.input_ids[start:end]
        tail = row.input_ids[end:] if end == ends_at else []
        limit = len(recorded) if config.max_new_tokens is None else config.max_new_tokens
        # What follows a cut is known: it is the rest of the answer.
        kept, rest = recorded[:limit], recorded[limit:] + tail
        items.append(Item(row.row_id, row.source, row.input_ids[:start], kept, rest, limit))
    return items


def reply_spans(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of each maximal run of ones.

    Example:
        0 1 1 0 1 gives (1, 3) and (4, 5).
    """
    spans, start = [], None
    for place, value in enumerate([*loss_mask, 0]):
        if value and start is None:
            start = place
        elif not value and start is not None:
            spans.append((start, place))
            start = None
    return spans


def by_source(items: Sequence[Item]) -> dict[str, list[int]]:
    """Indices of the items of each data set, in the order of first appearance."""
    found: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(item.source, []).append(index)
    return found


def _prompt_item(row: TokenRow, prompt_ids: list[int], config: EvaluateConfig) -> Item:
    return Item(row.row_id, row.source, prompt_ids, None, [], config.max_new_tokens or DEFAULT_LIMIT)


def _limited(item: Item, room: int) -> Item:
    recorded, tail = item.recorded_ids, item.tail_ids
    if recorded is not None and len(recorded) > room:
        recorded, tail = recorded[:room], recorded[room:] + tail
    return Item(item.row_id, item.source, item.prompt_ids, recorded, tail, room)


def _prepared_rows(config: EvaluateConfig, found: Read) -> Iterator[tuple[TokenRow, list[int] | None]]:
    assert config.data_path is not None
    prepared = load_prepared(config.data_path)
    places = list(range(len(prepared)))
    if config.max_samples is not None:
        places = in_turn([str(source) for source in prepared.table["source"]])[: config.max_samples]
    for place in places:
        found.read += 1
        yield prepared.row(place), None


def in_turn(sources: Sequence[str]) -> list[int]:
    """Indices, one of each source in turn."""
    seen: Counter[str] = Counter()
    ranks = []
    for index, source in enumerate(sources):
        ranks.append((seen[source], index))
        seen[source] += 1
    return [index for _, index in sorted(ranks)]


def _is_empty_file(spec: str) -> bool:
    """An empty file of prompts measures nothing, which is said in the report; it is no error of its own."""
    path = Path(spec)
    if not path.exists() and "=" in spec:
        path = Path(spec.partition("=")[2])
    return path.is_file() and path.stat().st_size < _BLANK_BYTES and not path.read_bytes().strip()


def _data_rows(config: EvaluateConfig, tokenizer: Any, found: Read) -> Iterator[tuple[TokenRow, list[int] | None]]:
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = config.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {config.chat_template}: cannot be read ({error})") from None
    specs = []
    for spec in config.data:
        if _is_empty_file(spec):
            found.drop(spec, "the file is empty")
        else:
            specs.append(spec)
    for item in read_rows(specs, config.max_samples, "chat"):
        found.read += 1
        where = f"{item.origin}:{item.line}"
        if isinstance(item, Rejected):
            found.drop(where, item.reason)
        elif isinstance(item, ReadyRow):
            row = TokenRow(
                item.row_id, item.source, item.input_ids, item.loss_mask, item.next_is_supervised, item.tail_length
            )
            yield row, None
        elif isinstance(item, Conversation) and item.opening().is_prompt:
            try:
                prompt_ids = render_prompt(tokenizer, item.opening())
            except UnusableRow as problem:
                found.drop(where, problem.reason)
                continue
            yield TokenRow(item.row_id, item.source, prompt_ids, [0] * len(prompt_ids), False, 0), prompt_ids
        else:
            found.drop(where, "no user turn to answer")


# ---- Do a drafter and a verifier belong together? Sizes, layers, and the tokens behind the ids.


def check_pair(config: DrafterConfig, verifier_config: VerifierConfig, tokenizer: Any) -> str | None:
    """Refuse a drafter that was made for another verifier.

    Args:
        config: the drafter's.
        verifier_config: the verifier that is to be used.
        tokenizer: its tokenizer.

    Returns:
        A warning where the two could not be compared fully, else None.

    Raises:
        CheckpointError: another vocabulary, width or depth, or other tokens behind the same ids.
    """
    for label, ours, theirs in (
        ("vocabulary", config.vocab_size, verifier_config.vocab_size),
        ("hidden size", config.hidden_size, verifier_config.hidden_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"the drafter is made for a verifier of {label} {ours}, {verifier_config.name_or_path} has {theirs}; "
                f"it was trained for {config.verifier}"
            )
    if config.aux_layer_ids[-1] > verifier_config.num_layers:
        raise CheckpointError(
            f"the drafter reads layer {config.aux_layer_ids[-1]}, {verifier_config.name_or_path} has {verifier_config.num_layers} layers"
        )
    if config.verifier == verifier_config.name_or_path:
        return None
    try:
        trained_with = load_tokenizer(config.verifier, verifier_config.trust_remote_code)
    except PeagleError:
        return f"the drafter was trained for {config.verifier}, which is not here: its tokens were not compared"
    difference = token_difference(trained_with, tokenizer)
    if difference is not None:
        raise CheckpointError(
            f"the drafter was trained for {config.verifier}, whose tokens are not those of {verifier_config.name_or_path}: "
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
