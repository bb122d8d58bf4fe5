"""The field's table: a row per data set, acceptance in % at positions 1..K, acceptance length, then Average and Pooled.

`figures` is the same as JSON: what `evaluation.json` holds for `pooled`, `average` and each data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from peagle.evaluate.counts import CONVENTION, Counts, DatasetCounts, pool, pool_contexts


@dataclass(frozen=True)
class TableRow:
    """One printed row; None where nothing was drafted."""

    name: str
    per_position: tuple[float, ...] | None
    """Share of passes in which each position was accepted, 0..1."""
    length: float | None
    num_drafts: float | None
    """None in the Average row: a mean of rows has no passes of its own."""


def rows(datasets: Mapping[str, Counts]) -> list[TableRow]:
    """Lay out the table.

    Args:
        datasets: counts per data set, all with the same number of drafted tokens; at least one.

    Returns:
        A row per data set in the given order, then `Average` (plain mean of the rows that drafted, as published) and
        `Pooled` (all passes of all data sets; the figure to rank by).
    """
    found = [
        TableRow(name, counts.acceptance_per_position, counts.acceptance_length, counts.num_drafts)
        for name, counts in datasets.items()
    ]
    pooled = _pooled(datasets)
    drafted = [row for row in found if row.length is not None and row.per_position is not None]
    if drafted:
        columns = zip(*(row.per_position for row in drafted if row.per_position is not None))
        mean = tuple(sum(column) / len(drafted) for column in columns)
        average = TableRow("Average", mean, sum(row.length or 0.0 for row in drafted) / len(drafted), None)
    else:
        average = TableRow("Average", None, None, None)
    last = TableRow("Pooled", pooled.acceptance_per_position, pooled.acceptance_length, pooled.num_drafts)
    return [*found, average, last]


def markdown(datasets: Mapping[str, Counts], notes: list[str]) -> str:
    """The table in Markdown, `notes` (warnings, conditions of the run) above it and the convention below."""
    depth = _pooled(datasets).num_speculative_tokens
    head = ["dataset", "pos 1", *(str(k) for k in range(2, depth + 1)), "length", "passes"]
    lines = [f"> {note}" for note in notes] + ([""] if notes else [])
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows(datasets):
        lines.append("| " + " | ".join(_cells(row, depth)) + " |")
    pooled = _pooled(datasets)
    conditional = pooled.conditional_per_position or (None,) * depth
    lines += ["", CONVENTION, ""]
    lines.append(
        "Pooled, given that all earlier positions were accepted: " + ", ".join(map(_percent, conditional)) + "."
    )
    return "\n".join(lines) + "\n"


def terminal(datasets: Mapping[str, Counts], title: str) -> Table:
    """The table for a terminal (`rich`)."""
    depth = _pooled(datasets).num_speculative_tokens
    table = Table(title=title, title_justify="left", caption=CONVENTION, caption_justify="left")
    table.add_column("dataset")
    for k in range(1, depth + 1):
        table.add_column(f"pos {k}" if k == 1 else str(k), justify="right")
    table.add_column("length", justify="right")
    table.add_column("passes", justify="right")
    laid = rows(datasets)
    for index, row in enumerate(laid):
        table.add_row(
            *_cells(row, depth), end_section=index == len(laid) - 3, style="bold" if index == len(laid) - 1 else ""
        )
    return table


def figures(counts: Counts) -> dict[str, Any]:
    """One data set's figures as JSON: null, never 0 or NaN, where nothing was drafted."""
    per_position = counts.acceptance_per_position
    conditional = counts.conditional_per_position
    return {
        "acceptance_length": counts.acceptance_length,
        "acceptance_per_position": None if per_position is None else list(per_position),
        "conditional_acceptance_per_position": None if conditional is None else list(conditional),
        "accepted_per_pass": counts.accepted_per_pass,
        "verifier_passes": _whole(counts.num_drafts),
        "drafted_tokens": _whole(counts.num_draft_tokens),
        "accepted_tokens": _whole(counts.num_accepted),
        "accepted_tokens_per_position": [_whole(accepted) for accepted in counts.accepted_per_position],
        "passes_by_accepted_tokens": [_whole(passes) for passes in counts.histogram],
        "generated_tokens": counts.num_generated_tokens,
    }


def report(datasets: Mapping[str, DatasetCounts]) -> dict[str, Any]:
    """The acceptance part of `evaluation.json`: convention, pooled, average, data sets, contexts."""
    totals = {name: dataset.total for name, dataset in datasets.items()}
    pooled = _pooled(totals)
    average = rows(totals)[-2]
    contexts = pool_contexts(list(datasets.values()), pooled.num_speculative_tokens)
    return {
        "convention": CONVENTION,
        "num_speculative_tokens": pooled.num_speculative_tokens,
        "pooled": figures(pooled),
        "average": {
            "acceptance_length": average.length,
            "acceptance_per_position": None if average.per_position is None else list(average.per_position),
            "is_mean_of_datasets": True,
        },
        "datasets": {name: figures(counts) for name, counts in totals.items()},
        "by_context_length": {name: figures(counts) for name, counts in contexts.items()},
    }


def verdict(pooled: Counts, num_training_rows: int | None) -> str | None:
    """One honest sentence where the figures call for it: nothing drafted, or hardly anything accepted; else None."""
    if not pooled.num_drafts:
        return "nothing was drafted, so there is no acceptance to report: no prompt got past its first token"
    length = pooled.acceptance_length
    if length is not None and length < 1.1:
        trained = "" if num_training_rows is None else f" The drafter was trained on {num_training_rows} rows."
        return (
            f"{_whole(pooled.num_accepted)}/{_whole(pooled.num_draft_tokens)} drafted tokens were accepted.{trained} "
            "A drafter needs thousands of its verifier's own answers: check how many it had, and whose they were."
        )
    return None


def _pooled(datasets: Mapping[str, Counts]) -> Counts:
    first = next(iter(datasets.values()), None)
    return pool(datasets.values(), 0 if first is None else first.num_speculative_tokens)


def _cells(row: TableRow, depth: int) -> list[str]:
    shares = row.per_position or (None,) * depth
    passes = "" if row.num_drafts is None else f"{row.num_drafts:,.0f}"
    length = "-" if row.length is None else f"{row.length:.3f}"
    return [row.name, *(_percent(share) for share in shares), length, passes]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value
