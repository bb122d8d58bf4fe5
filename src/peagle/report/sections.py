"""The report's sections, each made from records, each absent where nothing was measured for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.drafter.card import public_name
from peagle.evaluate.counts import CONVENTION, Expected, PassCost, best, expected_speedups
from peagle.report.charts import NUM_COLOURS, Axis, Series, bar_chart, line_chart, percent, plain
from peagle.report.data import Record
from peagle.report.page import MISSING, Card, Chart, Grid, Line, Section, in_percent, number, ratio

# what an evaluation says about how it was made
FACTS = (
    *("checkpoint", "verifier", "mode", "temperature", "top_p", "num_speculative_tokens", "max_new_tokens"),
    *("batch_size", "dtype", "device", "seed", "data", "versions", "hardware", "replay"),
)


def subtitle(records: Sequence[Record]) -> str:
    """Verifier and kind of the drafters, in one line."""
    found = []
    for record in records:
        verifier = record.checkpoint.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
        kind = record.checkpoint.get("speculators_model_type")
        layers = record.checkpoint.get("transformer_layer_config", {}).get("num_hidden_layers")
        words = [kind and {"peagle": "P-EAGLE", "eagle3": "EAGLE-3"}.get(kind, kind), layers and f"{layers} layers"]
        about = ", ".join(str(word) for word in words if word)
        if verifier:
            about = f"{about} for {public_name(verifier)}".strip()
        if about:
            found.append(about)
    return "; ".join(dict.fromkeys(found)) or "Acceptance and speed of drafters for speculative decoding."


def cards(record: Record) -> Iterator[Card]:
    """The figures that a reader looks for first."""
    pooled = record.evaluation["pooled"]
    k = record.evaluation.get("num_speculative_tokens")
    yield Card(number(pooled.get("acceptance_length"), 2), f"tokens per verifier pass (K = {k})")
    gain = speedup(record.evaluation.get("speed") or {})
    if gain is not None:
        yield Card(ratio(gain), "tokens per second, over plain decoding", "good" if gain > 1 else "bad")
    lossless = record.evaluation.get("lossless") or {}
    if lossless.get("checked"):
        same = lossless.get("identical") == lossless["checked"] or lossless.get("identical") is True
        yield Card(
            f"{_count(lossless.get('identical'), lossless['checked'])}/{lossless['checked']}",
            "answers identical to the verifier's own",
            "good" if same else "bad",
        )
    yield Card(number(pooled.get("verifier_passes"), 0), "verifier passes counted")
    choice = best(expected_of(record))
    if choice is not None:
        pays = choice.speedup > 1
        yield Card(f"K = {choice.k}" if pays else "none", f"{told(choice)}, {choice.speedup:.2f}x expected")


def notes(records: Sequence[Record]) -> Iterator[str]:
    """Warnings that an evaluation recorded, and figures that must not be compared."""
    for record in records:
        for note in record.evaluation.get("notes") or record.evaluation.get("warnings") or ():
            yield f"{record.name}: {note}"
    depths = {record.evaluation.get("num_speculative_tokens") for record in records}
    if len(depths) > 1:
        shown = ", ".join(map(str, sorted(depths, key=str)))
        yield f"The drafters were measured at different numbers of drafted tokens ({shown})."


def side_by_side(records: Sequence[Record]) -> Section | None:
    """Acceptance length of several drafters on each data set, the best of each row marked."""
    if len(records) < 2:
        return None
    datasets = list(dict.fromkeys(name for record in records for name in record.evaluation["datasets"]))
    lines = []
    for name in (*datasets, "Average", "Pooled"):
        values = [_group(record, name).get("acceptance_length") for record in records]
        lines.append(_compared(name, values, 3, name in ("Average", "Pooled")))
    ratios = [speedup(record.evaluation.get("speed") or {}) for record in records]
    if any(gain is not None for gain in ratios):
        lines.append(_compared("Speed-up over plain decoding", ratios, 2, True))
    checked = [record.evaluation.get("lossless") or {} for record in records]
    if any(one.get("checked") for one in checked):
        shares = [
            f"{_count(o.get('identical'), o['checked'])}/{o['checked']}" if o.get("checked") else MISSING
            for o in checked
        ]
        lines.append(Line(("Answers identical to the verifier's own", *shares), True))
    head = ("acceptance length", *(record.name for record in records))
    series = [_position_series(record.evaluation["pooled"], record.name, i) for i, record in enumerate(records)]
    return Section(
        "Side by side",
        "Tokens per verifier pass on each data set; the best of a row is marked.",
        (Grid(head, tuple(lines)),),
        (_position_chart("Pooled acceptance by position", [s for s in series if s]),),
        CONVENTION,
    )


def acceptance(record: Record, is_one_of_many: bool) -> Section:
    """The published kind of table: a row per data set, positions, length."""
    evaluation = record.evaluation
    depth = int(
        evaluation.get("num_speculative_tokens") or len(evaluation["pooled"].get("acceptance_per_position") or ())
    )
    head = ("dataset", "pos 1", *(str(k) for k in range(2, depth + 1)), "length", "passes")[: depth + 3]
    lines = [_table_line(name, figures, depth, False) for name, figures in evaluation["datasets"].items()]
    if evaluation.get("average"):
        lines.append(_table_line("Average", evaluation["average"], depth, True))
    lines.append(_table_line("Pooled", evaluation["pooled"], depth, True))
    conditional = evaluation["pooled"].get("conditional_acceptance_per_position")
    if conditional:
        cells = ("Pooled, given all before", *(in_percent(share) for share in conditional), MISSING, "")
        lines.append(Line(cells, True))
    return Section(
        f"Acceptance: {record.name}" if is_one_of_many else "Acceptance",
        "Share of verifier passes, in %, in which the drafted token at each position was accepted.",
        (Grid(head, tuple(lines)),),
        footnote=CONVENTION,
    )


def curves(records: Sequence[Record]) -> Section | None:
    """Acceptance by position, a line per data set, a chart per drafter; given all before, beside it."""
    charts = []
    for record in records:
        suffix = f": {record.name}" if len(records) > 1 else ""
        for title, key in (
            ("Accepted at each position", "acceptance_per_position"),
            ("Accepted, given that all before were", "conditional_acceptance_per_position"),
        ):
            pooled = _position_series(record.evaluation["pooled"], "Pooled", NUM_COLOURS - 2, key, True)
            series = [
                _position_series(figures, name, i, key)
                for i, (name, figures) in enumerate(record.evaluation["datasets"].items())
            ]
            lines = [s for s in series if s] if len(series) > 1 else []
            charts.append(_position_chart(title + suffix, [*lines, *([pooled] if pooled else [])]))
    found = tuple(chart for chart in charts if chart.svg)
    return Section("Acceptance by position", charts=found) if found else None


def contexts(records: Sequence[Record]) -> Section | None:
    """Acceptance by the number of tokens known before a pass."""
    series, lines = [], []
    names = list(dict.fromkeys(n for r in records for n in r.evaluation.get("by_context_length") or {}))
    names.sort(key=lambda name: int(name.split("-")[0]))
    for i, record in enumerate(records):
        buckets = record.evaluation.get("by_context_length") or {}
        points = tuple(
            (float(name.split("-")[1]), (buckets.get(name) or {}).get("acceptance_length")) for name in names
        )
        if any(y is not None for _, y in points):
            series.append(Series(record.name, points, i % NUM_COLOURS))
    for name in names:
        figures = [(r.evaluation.get("by_context_length") or {}).get(name) or {} for r in records]
        cells = [number(f.get("acceptance_length"), 3) for f in figures]
        passes = sum(f.get("verifier_passes") or 0 for f in figures)
        lines.append(Line((name.replace("-", " to "), *cells, number(passes, 0))))
    if not series:
        return None
    ends = tuple(float(name.split("-")[1]) for name in names)
    chart = line_chart(
        "Acceptance length by context length",
        series,
        Axis("tokens known before the pass, at most", plain, ends, is_log=True),
        Axis("acceptance length", plain, floor=1.0),
    )
    head = ("context, tokens", *(r.name if len(records) > 1 else "acceptance length" for r in records), "passes")
    return Section(
        "Acceptance by context length",
        tables=(Grid(head, tuple(lines)),),
        charts=(Chart("Acceptance length by context length", chart),) if len(names) > 1 else (),
    )


def training(records: Sequence[Record]) -> Section | None:
    """Loss, accuracy per depth and expected acceptance length over the training."""
    runs: list[tuple[Sequence[Any], list[str]]] = []
    for record in records:
        known = next((names for metrics, names in runs if metrics == record.metrics), None)
        if known is not None:
            known.append(record.name)  # one training, measured twice
        elif record.metrics:
            runs.append((record.metrics, [record.name]))
    charts = []
    for metrics, names in runs:
        for curve in training_curves(metrics):
            charts.append(_curve_chart(curve, f": {', '.join(names)}" if len(names) < len(records) else ""))
    found = tuple(chart for chart in charts if chart.svg)
    return Section("Training", charts=found) if found else None


def what_was_run(records: Sequence[Record]) -> Section | None:
    """Versions, commit, hashes and hardware, from the manifests."""
    grids = []
    for record in records:
        rows = [
            Line((f"{stage}: {key}", _told(value)))
            for stage, manifest in (*record.manifests, ("evaluation", _facts_of(record)))
            for key, value in manifest.items()
            if key != "stage" and value not in (None, {}, [], "")
        ]
        if rows:
            grids.append(Grid((), tuple(rows), record.name if len(records) > 1 else "", is_facts=True))
    return Section("What was run", tables=tuple(grids)) if grids else None


def _facts_of(record: Record) -> dict[str, Any]:
    """What an evaluation says about how it was made; neither figures nor versions that a manifest has told."""
    found = {key: record.evaluation[key] for key in FACTS if key in record.evaluation}
    if any(manifest.get("versions") == found.get("versions") for _, manifest in record.manifests):
        found.pop("versions", None)
    replay = found.get("replay") or {}
    if "replay" in found:
        found["replay"] = None if replay.get("equal") is None else _replayed(replay)
    if "verifier" in found:
        found["verifier"] = public_name(str(found["verifier"]))
    return found


def _replayed(replay: dict[str, Any]) -> str:
    """Whether replay and decoding counted alike, in words."""
    over = f"{number(replay.get('passes'), 0)} passes of {number(replay.get('answers'), 0)} answers"
    if not replay["equal"]:
        apart = replay.get("differing", len(replay.get("differences") or ()))
        how = "as decoding does but for rounding" if replay.get("is_within_rounding") else "otherwise than decoding"
        return f"counts {how} in {apart} answers (gaps in evaluation.json), {over}"
    ties = f", {replay['excused']} ties excused" if replay.get("excused") else ""
    return f"counts as decoding does, {over}{ties}"


def _group(record: Record, name: str) -> dict[str, Any]:
    if name in ("Average", "Pooled"):
        return record.evaluation.get(name.lower()) or {}
    return record.evaluation["datasets"].get(name) or {}


def _compared(name: str, values: Sequence[float | None], digits: int, is_sum: bool) -> Line:
    known = [value for value in values if value is not None]
    winners = tuple(i + 1 for i, value in enumerate(values) if known and value == max(known))
    return Line((name, *(number(value, digits) for value in values)), is_sum, winners)


def _table_line(name: str, figures: dict[str, Any], depth: int, is_sum: bool) -> Line:
    shares = figures.get("acceptance_per_position") or [None] * depth
    cells = (number(figures.get("acceptance_length"), 3), number(figures.get("verifier_passes"), 0, ""))
    return Line((name, *(in_percent(share) for share in shares), *cells), is_sum)


def _position_series(
    figures: dict[str, Any], name: str, colour: int, key: str = "acceptance_per_position", is_strong: bool = False
) -> Series | None:
    shares = figures.get(key)
    if not shares:
        return None
    return Series(name, tuple((float(k), share) for k, share in enumerate(shares, 1)), colour % NUM_COLOURS, is_strong)


def _position_chart(title: str, series: Sequence[Series]) -> Chart:
    depth = max((len(s.points) for s in series), default=1)
    ticks = tuple(float(k) for k in range(1, depth + 1))
    y_axis = Axis("accepted", percent, ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    return Chart(title, line_chart(title, series, Axis("position in the draft", plain, ticks), y_axis))


def _curve_chart(curve: Curve, suffix: str) -> Chart:
    y_axis = Axis(curve.y_label, percent if curve.is_share else plain, floor=curve.floor)
    return Chart(
        curve.title + suffix,
        line_chart(curve.title, curve.series, Axis("optimizer step", plain, is_whole=True), y_axis),
    )


def _count(identical: Any, checked: int) -> int:
    return checked if identical is True else 0 if identical is False else int(identical or 0)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_told(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_told, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- The report's sections about speed: with and without the drafter, against concurrency, and which K pays.


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


# ---- Training metrics as curves for the report.


MAX_POINTS = 240


@dataclass(frozen=True)
class Curve:
    """One chart over optimizer steps."""

    title: str
    y_label: str
    series: tuple[Series, ...]
    is_share: bool = False
    """Values are 0..1, shown in %."""
    floor: float | None = None
    """Lowest value shown."""


def training_curves(rows: Sequence[dict[str, Any]]) -> list[Curve]:
    """Loss, accuracy per depth and expected acceptance length, each absent where it was not recorded.

    Args:
        rows: lines of `metrics.jsonl`: `kind` "train" or "validation", `step`, `loss`, `accuracy` per depth, and for
            validation `acceptance_length`.
    """
    train = [row for row in rows if row.get("kind") == "train" and "step" in row]
    held_out = [row for row in rows if row.get("kind") == "validation" and "step" in row]
    found = []
    losses = [_series("training", train, "loss", 0, False), _series("held out", held_out, "loss", 1, True)]
    known = tuple(s for s in losses if s.known)
    if known:
        found.append(Curve("Loss", "loss per slot", known))
    source, words = (held_out, "Held-out") if len(held_out) > 1 else (train, "Training")
    depths = max((len(row.get("accuracy") or ()) for row in source), default=0)
    if depths:
        series = tuple(
            Series(f"depth {depth}", thinned(_accuracies(source, depth)), depth % NUM_COLOURS)
            for depth in range(depths)
        )
        found.append(Curve(f"{words} accuracy per depth", "share equal to the verifier's choice", series, True, 0.0))
    lengths = _series("expected acceptance length", held_out, "acceptance_length", 0, True)
    if lengths.known:
        found.append(Curve("Expected acceptance length, held out", "tokens per verifier pass", (lengths,), floor=1.0))
    return found


def thinned(points: Sequence[tuple[float, float | None]]) -> tuple[tuple[float, float | None], ...]:
    """At most `MAX_POINTS` points: neighbours are averaged, so that a long, noisy curve stays readable."""
    if len(points) <= MAX_POINTS:
        return tuple(points)
    out: list[tuple[float, float | None]] = []
    for i in range(MAX_POINTS):
        part = points[i * len(points) // MAX_POINTS : (i + 1) * len(points) // MAX_POINTS]
        known = [y for _, y in part if y is not None]
        out.append((part[-1][0], sum(known) / len(known) if known else None))
    return tuple(out)


def _series(name: str, rows: Sequence[dict[str, Any]], key: str, colour: int, is_strong: bool) -> Series:
    points = [(float(row["step"]), row.get(key)) for row in rows]
    return Series(name, thinned(points), colour, is_strong)


def _accuracies(rows: Sequence[dict[str, Any]], depth: int) -> list[tuple[float, float | None]]:
    found = []
    for row in rows:
        accuracy = row.get("accuracy") or []
        found.append((float(row["step"]), accuracy[depth] if depth < len(accuracy) else None))
    return found
