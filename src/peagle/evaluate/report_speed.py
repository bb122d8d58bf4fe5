"""The report's sections about speed: with and without the drafter, against concurrency, and which K pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peagle.evaluate.best_k import Expected, PassCost, best, expected_speedups
from peagle.evaluate.charts import NUM_COLOURS, Axis, Series, bar_chart, line_chart, plain
from peagle.evaluate.page import MISSING, Chart, Grid, Line, Section, number, ratio
from peagle.evaluate.report_data import Record


def speed(records: Sequence[Record]) -> Section | None:
    """Tokens per second with and without the drafter, and against concurrency where a server was measured."""
    lines, series, latency = [], [], []
    for i, record in enumerate(records):
        figures = record.evaluation.get("speed") or {}
        if figures.get("tokens_per_s"):
            lines.append(
                Line(
                    (
                        record.name,
                        number(figures["tokens_per_s"], 1),
                        number(figures.get("plain_tokens_per_s"), 1),
                        ratio(speedup(figures)),
                    )
                )
            )
        points = figures.get("by_concurrency") or []
        if points:
            name = f"{record.name}: with drafter" if len(records) > 1 else "with drafter"
            series.append(_concurrency(points, "tokens_per_s", name, 2 * i))
            series.append(_concurrency(points, "plain_tokens_per_s", name.replace("with drafter", "plain"), 2 * i + 1))
            latency += [_latency_line(record.name, point) for point in points]
    tables = []
    if lines:
        tables.append(Grid(("drafter", "tokens/s", "plain decoding", "speed-up"), tuple(lines)))
    if latency:
        pairs = ("tokens/s", "plain", "speed-up", "first token, ms", "plain", "between tokens, ms", "plain")
        tables.append(Grid(("drafter", "concurrency", *pairs), tuple(latency), "A served model, over its own API."))
    title = "Tokens per second against concurrency"
    ticks = tuple(sorted({x for s in series for x, _ in s.points}))
    chart = line_chart(
        title,
        [s for s in series if s.known],
        Axis("concurrent requests", plain, ticks, is_log=True),
        Axis("tokens/s", plain, floor=0.0),
    )
    if not tables:
        return None
    return Section("Speed", tables=tuple(tables), charts=(Chart(title, chart),))


def best_number(records: Sequence[Record]) -> Section | None:
    """Expected speed-up for each number of drafted tokens, and the best one."""
    charts, lines = [], []
    for record in records:
        expected = expected_of(record)
        choice = best(expected)
        if choice is None:
            continue
        bars = [(str(e.k), e.speedup) for e in expected]
        title = "Expected speed-up" + (f": {record.name}" if len(records) > 1 else "")
        svg = bar_chart(title, bars, choice.k - 1, "drafted tokens per pass", Axis("", ratio, floor=0.0))
        caption = f"K = {choice.k} {told(choice)}: {choice.speedup:.2f} times plain decoding."
        charts.append(Chart(title, svg, caption))
        figures = (number(choice.acceptance_length, 3), ratio(choice.speedup), _costs(record))
        lines.append(Line((record.name, f"K = {choice.k}", *figures)))
    if not charts:
        return None
    return Section(
        "Which number of drafted tokens pays",
        "Expected on the hardware of the measurement, from the measured acceptance at each position and the measured "
        "cost of drafting and verifying. The cost of verifying is taken as linear in the length of the draft.",
        (Grid(("drafter", "best", "acceptance length", "expected speed-up", "measured costs"), tuple(lines)),),
        tuple(charts),
    )


def told(choice: Expected) -> str:
    """Whether the best number of drafted tokens is worth drafting at all."""
    return "pays best here" if choice.speedup > 1 else "is the least bad; no number pays here"


def expected_of(record: Record) -> list[Expected]:
    cost = pass_cost(record)
    per_position = record.evaluation["pooled"].get("acceptance_per_position")
    if cost is None or not per_position:
        return []
    return expected_speedups(per_position, cost, record.checkpoint.get("speculators_model_type") == "eagle3")


def pass_cost(record: Record) -> PassCost | None:
    figures = record.evaluation.get("speed") or {}
    k = record.evaluation.get("num_speculative_tokens")
    values = [figures.get(name) for name in ("plain_ms_per_token", "draft_ms_per_pass", "verify_ms_per_pass")]
    if not k or any(not isinstance(value, (int, float)) for value in values):
        return None
    # A step drafts and verifies for every row of the batch; plain decoding is timed per token.
    rows = record.evaluation.get("batch_size") or 1
    plain_ms, draft_ms, verify_ms = float(values[0]) * rows, float(values[1]), float(values[2])  # type: ignore[arg-type]
    # More tokens never cost less than one: below that is noise of the measurement.
    return PassCost(plain_ms, draft_ms, max(verify_ms, plain_ms), int(k))


def speedup(figures: dict[str, Any]) -> float | None:
    ours, theirs = figures.get("tokens_per_s"), figures.get("plain_tokens_per_s")
    return ours / theirs if ours and theirs else None


def _costs(record: Record) -> str:
    cost = pass_cost(record)
    if cost is None:
        return MISSING
    return f"draft {cost.draft_ms:.1f} ms, verify {cost.verify_ms:.1f} ms, plain token {cost.plain_ms:.1f} ms"


def _concurrency(points: Sequence[dict[str, Any]], key: str, name: str, colour: int) -> Series:
    return Series(name, tuple((float(p["concurrency"]), p.get(key)) for p in points), colour % NUM_COLOURS)


def _latency_line(name: str, point: dict[str, Any]) -> Line:
    keys = ("ttft_ms", "plain_ttft_ms", "itl_ms", "plain_itl_ms")
    cells = (
        number(point.get("tokens_per_s"), 1),
        number(point.get("plain_tokens_per_s"), 1),
        ratio(speedup(point)),
    )
    return Line((name, str(point["concurrency"]), *cells, *(number(point.get(key), 1) for key in keys)))
