"""What an evaluation says: evaluation.json, Markdown, and the lines on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle import log
from peagle.evaluate.compare import Difference
from peagle.evaluate.counts import CONVENTION, Counts, DatasetCounts, pool, pool_contexts
from peagle.evaluate.decode import Decoded
from peagle.evaluate.replay_check import Agreement

_SHOWN = 10


@dataclass(frozen=True)
class Served:
    """Speed of a server."""

    tokens_per_s: float | None
    """Over all its requests under way."""
    by_concurrency: Sequence[Mapping[str, Any]]
    """See `latency.under_load`."""


@dataclass(frozen=True)
class Outcome:
    """Everything that was found."""

    depth: int
    """Drafted tokens per pass."""
    datasets: Mapping[str, DatasetCounts]
    decoded: Decoded | None
    agreement: Agreement | None
    served: Served | None
    notes: Sequence[str]

    def figures(self) -> dict[str, Any]:
        """The measured part of evaluation.json; what was not measured is null."""
        return {
            **report(self.datasets),
            "num_speculative_tokens": self.depth,
            "lossless": self._lossless(),
            "replay": self._replay(),
            "speed": self._speed(),
            "notes": list(self.notes),
            "threads": torch.get_num_threads(),
            "versions": log.versions(),
        }

    def markdown(self) -> str:
        """The table with its notes, and the other figures as lines."""
        totals = {name: dataset.total for name, dataset in self.datasets.items()}
        text = markdown(totals, list(self.notes)) if totals else "Nothing was measured.\n"
        return text + "".join(f"\n{line}\n" for line in self.lines())

    def show(self, title: str, console: Console) -> None:
        """Print the warnings, the table, and the other figures."""
        for note in self.notes:
            whole = not console.is_terminal
            console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False, soft_wrap=whole)
        if self.datasets:
            console.print(terminal({name: dataset.total for name, dataset in self.datasets.items()}, title))
        for line in self.lines():
            console.print(escape(line), highlight=False, soft_wrap=not console.is_terminal)

    def lines(self) -> list[str]:
        """Losslessness, replay and speed, a sentence each."""
        found = []
        lossless, replayed, speed = self._lossless(), self._replay(), self._speed()
        if lossless["checked"]:
            ties = f", {lossless['excused']} more but for a tie (shown in the JSON)" if lossless["excused"] else ""
            same = f"{lossless['identical']} of {lossless['checked']}"
            found.append(f"lossless: {same} answers identical to the verifier's own{ties}")
        if self.agreement is not None and self.agreement.equal is not None:
            verdict = "gives the same counts"
            if not self.agreement.equal:
                near = f"counts as decoding does but for rounding in {len(self.agreement.found)} answers"
                verdict = near if self.agreement.is_within_rounding else "COUNTS OTHERWISE THAN DECODING"
            found.append(f"replay: {verdict} ({self.agreement.num_answers} answers, {replayed['passes']} passes)")
        if speed["tokens_per_s"] and speed["plain_tokens_per_s"]:
            found.append(
                f"speed: {speed['tokens_per_s']:.1f} tokens/s, plain decoding {speed['plain_tokens_per_s']:.1f} "
                f"({speed['plain_by']}): {speed['speedup']:.2f} times"
            )
            if speed["draft_ms_per_pass"]:
                found.append(
                    f"time per pass: drafting {speed['draft_ms_per_pass']:.2f} ms, verifying "
                    f"{speed['verify_ms_per_pass']:.2f} ms; plainly decoded, a token takes "
                    f"{speed['plain_ms_per_token']:.2f} ms"
                )
        elif speed["tokens_per_s"]:
            found.append(f"speed: {speed['tokens_per_s']:.1f} tokens/s over all requests under way")
        return found + [_under_load(point) for point in speed.get("by_concurrency", ())]

    @property
    def is_sound(self) -> bool:
        """Something was drafted, every compared answer is the verifier's own, and replay counts as decoding does; a
        half-precision pair is excused where its logits are within rounding."""
        drafted = pool((dataset.total for dataset in self.datasets.values()), self.depth).num_drafts > 0
        wrong = [one for one in self._differences() if not one.is_within_rounding]
        return drafted and not wrong and (self.agreement is None or self.agreement.is_within_rounding)

    def rounding_note(self) -> str | None:
        """Said where half precision gives answers that differ, or drafts that replay counts otherwise."""
        rounded = [one for one in self._differences() if one.is_within_rounding and not one.is_tie]
        if not rounded:
            agreement = self.agreement
            if agreement is None or agreement.equal is not False or not agreement.is_within_rounding:
                return None
            dtype = str(agreement.found[0].dtype).removeprefix("torch.")
            return (
                f"in {len(agreement.found)} answers replay and decoding draft differently where the drafter's best "
                f"logits are within the rounding of {dtype}. --dtype float32 compares exactly"
            )
        dtype = str(rounded[0].dtype).removeprefix("torch.")
        return (
            f"{len(rounded)} answers differ from the verifier's own where its best logits are within the rounding of "
            f"{dtype} (largest gap {max(abs(one.gap) for one in rounded):.2g}): it differs from itself there too, from "
            "one batch to another. --dtype float32 compares exactly"
        )

    def _differences(self) -> list[Difference]:
        return [] if self.decoded is None else self.decoded.differences

    def _lossless(self) -> dict[str, Any]:
        if self.decoded is None or not self.decoded.checked:
            return {"checked": None, "identical": None, "excused": None, "differences": []}
        found, checked = self._differences(), len(self.decoded.checked)
        return {
            "checked": checked,
            "identical": checked - len(found),
            "excused": sum(one.is_tie for one in found),
            "differences": [
                {
                    "prompt": self.decoded.checked[one.index],
                    "position": one.position,
                    "token": one.token,
                    "own_token": one.own_token,
                    "logit_gap": one.gap if math.isfinite(one.gap) else None,
                    "is_tie": one.is_tie,
                    "is_within_rounding": one.is_within_rounding,
                }
                for one in found[:_SHOWN]
            ],
        }

    def _replay(self) -> dict[str, Any]:
        if self.agreement is None:
            return {"equal": None, "answers": None, "passes": None, "excused": None, "differences": []}
        found = self.agreement.found
        return {
            "equal": self.agreement.equal,
            "answers": self.agreement.num_answers,
            "passes": self.agreement.num_passes,
            "excused": sum(one.is_tie for one in found),
            "differing": len(found),
            "is_within_rounding": self.agreement.is_within_rounding,
            "differences": [
                {
                    "row_id": one.row_id,
                    "num_known": one.num_known,
                    "decoded_ids": list(one.decoded_ids),
                    "replayed_ids": list(one.replayed_ids),
                    "logit_gap": one.gap,
                    "is_tie": one.is_tie,
                    "is_within_rounding": one.is_within_rounding,
                }
                for one in found[:_SHOWN]
            ],
        }

    def _speed(self) -> dict[str, Any]:
        run = None if self.decoded is None else self.decoded.contest
        if run is None:
            figures: dict[str, Any] = {"tokens_per_s": None, "plain_tokens_per_s": None, "speedup": None}
            if self.served is not None:
                figures["tokens_per_s"] = self.served.tokens_per_s
                figures["by_concurrency"] = [dict(point) for point in self.served.by_concurrency]
            return figures
        ours = run.tokens_per_s("drafter")
        plain = {"engine": run.tokens_per_s("engine"), "transformers": run.tokens_per_s("transformers")}
        faster = max(plain, key=lambda name: plain[name] or 0.0)
        best = plain[faster]
        steps = run.laps.num_steps
        by = {"engine": "our engine without a drafter", "transformers": "Transformers' generate"}
        return {
            "tokens_per_s": ours,
            "plain_tokens_per_s": best,
            "plain_by": by[faster],
            "speedup": ours / best if ours and best else None,
            "engine_tokens_per_s": plain["engine"],
            "transformers_tokens_per_s": plain["transformers"],
            "draft_ms_per_pass": 1e3 * run.laps.draft_s / steps if steps else None,
            "verify_ms_per_pass": 1e3 * run.laps.verify_s / steps if steps else None,
            "plain_ms_per_token": 1e3 / best if best else None,
            "compared_prompts": len(run.answers),
        }


def _under_load(point: Mapping[str, Any]) -> str:
    """One concurrency in a line, the plain server's figures in brackets."""

    def beside(key: str, unit: str) -> str:
        plain = point.get(f"plain_{key}")
        value = "-" if point[key] is None else f"{point[key]:.1f}"
        return f"{value}{unit}" + ("" if plain is None else f" ({plain:.1f})")

    rates = point["tokens_per_s"], point.get("plain_tokens_per_s")
    times = f", {rates[0] / rates[1]:.2f} times" if rates[1] else ""
    return (
        f"{point['concurrency']} at once: {beside('tokens_per_s', ' tokens/s')}{times}; first token "
        f"{beside('ttft_ms', ' ms')}, between tokens {beside('itl_ms', ' ms')}"
    )


# ---- The field's table: a row per data set, acceptance in % at positions 1..K, acceptance length, then Average and
# Pooled.


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
