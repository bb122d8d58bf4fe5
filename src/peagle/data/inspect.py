"""Showing prepared rows to a person: what is supervised, what is not, and why rows are missing."""

import itertools
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from peagle.data.config import InspectConfig
from peagle.data.prepared import Prepared, load_prepared
from peagle.data.records import TokenRow
from peagle.data.tokenizer import load_tokenizer
from peagle.embedded import name_of
from peagle.errors import DataError

PROMPT, SUPERVISED, TAIL = "prompt", "supervised", "tail"
_STYLES = {PROMPT: "dim", SUPERVISED: "bold black on green", TAIL: "black on yellow"}
_MARKS = {PROMPT: ("", ""), SUPERVISED: ("[[", "]]"), TAIL: ("{{", "}}")}


def inspect(config: InspectConfig) -> int:
    """Print rows with the supervised tokens highlighted; plain marks `[[ ]]` where the output is no terminal.

    Raises:
        PeagleError: not a prepared folder, or no such row.
    """
    prepared = load_prepared(config.folder)
    tokenizer = load_tokenizer(config.model or prepared.summary["model"], config.trust_remote_code)
    console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    console.print(_header(prepared))
    for index in _chosen(prepared, config):
        row = prepared.row(index)
        console.print(f"\nrow {index}  {describe(row)}")
        console.print(highlighted(tokenizer, row, console.is_terminal))
        if config.ids:
            console.print("ids " + " ".join(map(str, row.input_ids)))
    return 0


def _header(prepared: Prepared) -> str:
    summary = prepared.summary
    share = 100 * summary["supervised_tokens"] / summary["tokens"]
    lines = [
        f"{prepared.folder}: {summary['rows']} rows of {summary['kept']} conversations for {name_of(summary['model'])}",
        f"{summary['tokens']} tokens, {share:.1f} % supervised; read {summary['read']}, "
        f"dropped {sum(summary['dropped'].values())}, cut {summary['rows_cut']} at {summary['seq_length']}",
    ]
    for key, word in (("dropped", "dropped"), ("repaired", "repaired"), ("notes", "noted")):
        lines += [f"  {word} {number}: {text}" for text, number in summary[key].items()]
    lines += [f"  {number} rows of {source}" for source, number in summary["sources"].items()]
    return "\n".join(lines)


def _chosen(prepared: Prepared, config: InspectConfig) -> list[int]:
    if config.row_id is not None:
        index = prepared.index_of().get(config.row_id)
        if index is None:
            raise DataError(f"{config.folder}: no row with the id {config.row_id!r}")
        return [index]
    places = (i for i, source in enumerate(prepared.table["source"]) if config.source in (None, source))
    chosen = list(itertools.islice(places, config.start, config.start + config.rows))
    if not chosen:
        wanted = f" of source {config.source!r}" if config.source else ""
        raise DataError(f"{config.folder}: no row{wanted} from {config.start} on; there are {len(prepared)} rows")
    return chosen


def describe(row: TokenRow) -> str:
    """One line about a row: its id, source and counts."""
    parts = [row.row_id, f"source {row.source}", f"{len(row.input_ids)} tokens", f"{sum(row.loss_mask)} supervised"]
    if row.tail_length:
        parts.append(f"tail {row.tail_length}")
    if row.next_is_supervised:
        parts.append("cut inside a reply")
    return "  ".join(parts)


def runs(row: TokenRow) -> list[tuple[str, list[int]]]:
    """The row as maximal runs of prompt, supervised and tail tokens."""
    ends = len(row.input_ids) - row.tail_length

    def part_of(place: int) -> str:
        return TAIL if place >= ends else SUPERVISED if row.loss_mask[place] else PROMPT

    places = itertools.groupby(range(len(row.input_ids)), key=part_of)
    return [(part, [row.input_ids[place] for place in run]) for part, run in places]


def highlighted(tokenizer: Any, row: TokenRow, is_terminal: bool) -> Text:
    """The row's text, each run in its colour or between its marks; control characters are shown as escapes."""
    out = Text()
    for part, ids in runs(row):
        text = visible(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        before, behind = ("", "") if is_terminal else _MARKS[part]
        out.append(before + text + behind, style=_STYLES[part] if is_terminal else None)
    return out


def visible(text: str) -> str:
    """Text that cannot play tricks on a terminal: control characters but newline and tab as escapes."""
    return "".join(c if c in "\n\t\u200c\u200d" or c.isprintable() else ascii(c)[1:-1] for c in text)
