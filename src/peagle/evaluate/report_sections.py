"""The report's sections, each made from records, each absent where nothing was measured for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from peagle.drafter.card import public_name
from peagle.evaluate.best_k import best
from peagle.evaluate.charts import NUM_COLOURS, Axis, Series, line_chart, percent, plain
from peagle.evaluate.counts import CONVENTION
from peagle.evaluate.page import MISSING, Card, Chart, Grid, Line, Section, in_percent, number, ratio
from peagle.evaluate.report_data import Record
from peagle.evaluate.report_speed import expected_of, speedup, told
from peagle.evaluate.training_curves import Curve, training_curves

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
