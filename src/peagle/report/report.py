"""`peagle report`: one self-contained page about one drafter, or about several side by side.

Each section is made from the records, and absent where nothing was measured for it. `evaluation.json`, metrics and
manifests come as they were written: what an older version did not write is missing, and shown as missing.
"""

import csv
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.drafter.card import KINDS, public_name
from peagle.errors import DataError
from peagle.evaluate.counts import CONVENTION, Expected, PassCost, best, expected_speedups, percent, table
from peagle.files import whole_file
from peagle.report.charts import NUM_COLOURS, Axis, Points, Series, bar_chart, line_chart, plain, whole_percent
from peagle.report.config import ReportConfig
from peagle.report.data import Record, collect
from peagle.report.page import MISSING, Card, Chart, Grid, Line, Page, Section, html, markdown, number, ratio

logger = logging.getLogger(__name__)
MAX_POINTS = 240
# what an evaluation says about how it was made
_CONDITIONS = (
    *("checkpoint", "verifier", "mode", "temperature", "top_p", "num_speculative_tokens", "max_new_tokens"),
    *("batch_size", "dtype", "device", "seed", "data", "versions", "hardware", "replay"),
)


def report(config: ReportConfig) -> int:
    """Write report.html, report.md and report.csv, and print where; returns 0.

    Raises:
        DataError: nothing to report in a folder.
    """
    if not config.folders:
        raise DataError("name at least one folder: `peagle report RUN`")
    records = collect([Path(folder) for folder in config.folders])
    names = [record.name for record in records]
    measured = [record for record in records if record.evaluation]
    parts = [
        side_by_side(measured),
        *(acceptance(record, len(measured) > 1) for record in measured),
        curves(measured),
        contexts(measured),
        speed(measured),
        best_number(measured),
        training(records),
        what_was_run(records),
    ]
    page = Page(
        title=config.title or ("Drafter " + names[0] if len(names) == 1 else "Drafters: " + ", ".join(names)),
        subtitle=subtitle(records),
        cards=tuple(cards(measured[0])) if len(measured) == 1 else (),
        notes=tuple(notes(measured)),
        sections=tuple(section for section in parts if section is not None),
    )
    texts = {"report.html": html(page), "report.md": markdown(page), "report.csv": as_csv(records)}
    for name, text in texts.items():
        with whole_file(config.output / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    shown = "1 evaluation" if len(records) == 1 else f"{len(records)} evaluations"
    logger.info("read %s, wrote %s (and .md, .csv)", shown, config.output / "report.html")
    print(config.output / "report.html")
    return 0


def as_csv(records: Sequence[Record]) -> str:
    """Every figure in long form: drafter, data set, measure, position, value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["drafter", "dataset", "measure", "position", "value"])
    for record in records:
        evaluation = record.evaluation
        groups = dict(evaluation.get("datasets", {}))
        groups |= {name.capitalize(): evaluation.get(name, {}) for name in ("average", "pooled")}
        groups |= {f"context {name}": figures for name, figures in evaluation.get("by_context_length", {}).items()}
        groups[""] = {f"speed.{measure}": value for measure, value in record.speed.items()}
        for dataset, figures in groups.items():
            for measure, value in figures.items():
                places = enumerate(value, 1) if isinstance(value, list) else [("", value)]
                writer.writerows(
                    [record.name, dataset, measure, place, one]
                    for place, one in places
                    if isinstance(one, (int, float)) and not isinstance(one, bool)
                )
    return out.getvalue()


def subtitle(records: Sequence[Record]) -> str:
    """Method, layers and verifier of the drafters, in one line."""
    drafters = []
    for record in records:
        verifier = record.checkpoint.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
        method = record.checkpoint.get("speculators_model_type")
        layers = record.checkpoint.get("transformer_layer_config", {}).get("num_hidden_layers")
        words = [method and KINDS.get(method, method), layers and f"{layers} layers"]
        about = ", ".join(str(word) for word in words if word)
        if verifier:
            about = f"{about} for {public_name(verifier)}".strip()
        if about:
            drafters.append(about)
    return "; ".join(dict.fromkeys(drafters)) or "Acceptance and speed of drafters for speculative decoding."


def cards(record: Record) -> Iterator[Card]:
    """The figures that a reader looks for first."""
    pooled = record.evaluation["pooled"]
    k = record.evaluation.get("num_speculative_tokens")
    yield Card(number(pooled.get("acceptance_length"), 2), f"tokens per verifier pass (K = {k})")
    if (gain := _speedup(record.speed)) is not None:
        yield Card(ratio(gain), "tokens per second, over plain decoding", "good" if gain > 1 else "bad")
    if (identical := _identical(record)) != MISSING:
        same, checked = identical.split("/")
        yield Card(identical, "answers identical to the verifier's own", "good" if same == checked else "bad")
    yield Card(number(pooled.get("verifier_passes"), 0), "verifier passes counted")
    if (choice := best(_expected(record))) is not None:
        shown = f"K = {choice.k}" if choice.speedup > 1 else "none"
        yield Card(shown, f"{_advice(choice)}, {choice.speedup:.2f}x expected")


def notes(records: Sequence[Record]) -> Iterator[str]:
    """Warnings that an evaluation recorded, and figures that must not be compared."""
    for record in records:
        for note in record.evaluation.get("notes") or ():
            yield f"{record.name}: {note}"
    depths = {record.evaluation.get("num_speculative_tokens") for record in records}
    if len(depths) > 1:
        shown = ", ".join(map(str, sorted(depths, key=str)))
        yield f"The drafters were measured at different numbers of drafted tokens ({shown})."


def side_by_side(records: Sequence[Record]) -> Section | None:
    """Acceptance length of several drafters on each data set, the best of each row marked."""
    if len(records) < 2:
        return None
    datasets = [record.evaluation["datasets"] for record in records]
    lines = [
        _compared(name, _lengths(datasets, name), 3, False) for name in dict.fromkeys(n for d in datasets for n in d)
    ]
    whole = [record.evaluation for record in records]
    lines += [_compared(name.capitalize(), _lengths(whole, name), 3, True) for name in ("average", "pooled")]
    ratios = [_speedup(record.speed) for record in records]
    if any(gain is not None for gain in ratios):
        lines.append(_compared("Speed-up over plain decoding", ratios, 2, True))
    identical = [_identical(record) for record in records]
    if any(share != MISSING for share in identical):
        lines.append(Line(("Answers identical to the verifier's own", *identical), True))
    series = [_by_position(record.evaluation["pooled"], record.name, i) for i, record in enumerate(records)]
    return Section(
        "Side by side",
        text="Tokens per verifier pass on each data set; the best of a row is marked.",
        tables=(Grid(("acceptance length", *(record.name for record in records)), tuple(lines)),),
        charts=(_position_chart("Pooled acceptance by position", [s for s in series if s]),),
        footnote=CONVENTION,
    )


def acceptance(record: Record, is_one_of_many: bool) -> Section:
    """The field's table, and the pooled shares given that all earlier positions were accepted."""
    head, *rows = table(record.evaluation)
    num_sums = 2 if record.evaluation.get("average") else 1
    lines = [Line(tuple(row), place >= len(rows) - num_sums) for place, row in enumerate(rows)]
    conditional = record.evaluation["pooled"].get("conditional_acceptance_per_position")
    if conditional:
        lines.append(Line(("Pooled, given all before", *map(percent, conditional), MISSING, ""), True))
    return Section(
        f"Acceptance: {record.name}" if is_one_of_many else "Acceptance",
        text="Share of verifier passes, in %, in which the drafted token at each position was accepted.",
        tables=(Grid(tuple(head), tuple(lines)),),
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
            datasets = record.evaluation["datasets"] if len(record.evaluation["datasets"]) > 1 else {}
            series = [_by_position(figures, name, i, key) for i, (name, figures) in enumerate(datasets.items())]
            series.append(_by_position(record.evaluation["pooled"], "Pooled", NUM_COLOURS - 2, key, True))
            charts.append(_position_chart(title + suffix, [s for s in series if s]))
    return _charts("Acceptance by position", charts)


def contexts(records: Sequence[Record]) -> Section | None:
    """Acceptance by the number of tokens known before a pass."""
    buckets = [record.evaluation.get("by_context_length") or {} for record in records]
    names = sorted({name for one in buckets for name in one}, key=lambda name: int(name.split("-")[0]))
    ends = tuple(float(name.split("-")[1]) for name in names)
    series = []
    for i, (record, one) in enumerate(zip(records, buckets)):
        lengths = [length for name in names for length in _lengths([one], name)]
        if any(length is not None for length in lengths):
            series.append(Series(record.name, tuple(zip(ends, lengths)), i % NUM_COLOURS))
    if not series:
        return None
    lines = []
    for name in names:
        cells = [number(length, 3) for length in _lengths(buckets, name)]
        passes = sum((one.get(name) or {}).get("verifier_passes") or 0 for one in buckets)
        lines.append(Line((name.replace("-", " to "), *cells, number(passes, 0))))
    title = "Acceptance length by context length"
    x_axis = Axis("tokens known before the pass, at most", plain, ticks=ends, is_log=True)
    svg = line_chart(title, series, x_axis, Axis("acceptance length", plain, floor=1.0))
    head = ("context, tokens", *(r.name if len(records) > 1 else "acceptance length" for r in records), "passes")
    return Section(
        "Acceptance by context length",
        tables=(Grid(head, tuple(lines)),),
        charts=(Chart(title, svg),) if len(names) > 1 else (),
    )


def speed(records: Sequence[Record]) -> Section | None:
    """Tokens per second with and without the drafter, and against concurrency where a server was measured."""
    lines, series, latency = [], [], []
    for i, record in enumerate(records):
        if record.speed.get("tokens_per_s"):
            lines.append(Line((record.name, *_rates(record.speed))))
        points = record.speed.get("by_concurrency") or []
        if points:
            prefix = f"{record.name}: " if len(records) > 1 else ""
            for place, (key, label) in enumerate((("tokens_per_s", "with drafter"), ("plain_tokens_per_s", "plain"))):
                rates = tuple((float(point["concurrency"]), point.get(key)) for point in points)
                series.append(Series(prefix + label, rates, (2 * i + place) % NUM_COLOURS))
        for point in points:
            times = (number(point.get(key), 1) for key in ("ttft_ms", "plain_ttft_ms", "itl_ms", "plain_itl_ms"))
            latency.append(Line((record.name, str(point["concurrency"]), *_rates(point), *times)))
    tables = []
    if lines:
        tables.append(Grid(("drafter", "tokens/s", "plain decoding", "speed-up"), tuple(lines)))
    if latency:
        columns = ("tokens/s", "plain", "speed-up", "first token, ms", "plain", "between tokens, ms", "plain")
        tables.append(Grid(("drafter", "concurrency", *columns), tuple(latency), "A served model, over its own API."))
    if not tables:
        return None
    title = "Tokens per second against concurrency"
    ticks = tuple(sorted({x for s in series for x, _ in s.points}))
    x_axis = Axis("concurrent requests", plain, ticks=ticks, is_log=True)
    svg = line_chart(title, series, x_axis, Axis("tokens/s", plain, floor=0.0))
    return Section("Speed", tables=tuple(tables), charts=(Chart(title, svg),))


def best_number(records: Sequence[Record]) -> Section | None:
    """Expected speed-up for each number of drafted tokens, and the best one."""
    charts, lines = [], []
    for record in records:
        expected, cost = _expected(record), _pass_cost(record)
        choice = best(expected)
        if choice is None or cost is None:
            continue
        bars = [(str(e.k), e.speedup) for e in expected]
        title = "Expected speed-up" + (f": {record.name}" if len(records) > 1 else "")
        svg = bar_chart(title, bars, choice.k - 1, "drafted tokens per pass", Axis("", ratio, floor=0.0))
        charts.append(
            Chart(title, svg, f"K = {choice.k} {_advice(choice)}: {choice.speedup:.2f} times plain decoding.")
        )
        costs = f"draft {cost.draft_ms:.1f} ms, verify {cost.verify_ms:.1f} ms, plain token {cost.plain_ms:.1f} ms"
        figures = (number(choice.acceptance_length, 3), ratio(choice.speedup), costs)
        lines.append(Line((record.name, f"K = {choice.k}", *figures)))
    if not charts:
        return None
    return Section(
        "Which number of drafted tokens pays",
        text="Expected on the hardware of the measurement, from the measured acceptance at each position and the "
        "measured cost of drafting and verifying. The cost of verifying is taken as linear in the length of the draft.",
        tables=(Grid(("drafter", "best", "acceptance length", "expected speed-up", "measured costs"), tuple(lines)),),
        charts=tuple(charts),
    )


def training(records: Sequence[Record]) -> Section | None:
    """Loss, accuracy per depth and expected acceptance length over the training."""
    runs: list[tuple[Sequence[Any], list[str]]] = []
    for record in records:
        names = next((names for metrics, names in runs if metrics == record.metrics), None)
        if names is not None:
            names.append(record.name)  # one training, measured twice
        elif record.metrics:
            runs.append((record.metrics, [record.name]))
    charts = []
    for metrics, names in runs:
        suffix = f": {', '.join(names)}" if len(names) < len(records) else ""
        charts += [replace(chart, title=chart.title + suffix) for chart in training_charts(metrics)]
    return _charts("Training", charts)


def what_was_run(records: Sequence[Record]) -> Section | None:
    """Versions, commit, hashes and hardware, from the manifests."""
    grids = []
    for record in records:
        rows = [
            Line((f"{stage}: {key}", _text(value)))
            for stage, manifest in (*record.manifests, ("evaluation", _conditions(record)))
            for key, value in manifest.items()
            if key != "stage" and value not in (None, {}, [], "")
        ]
        if rows:
            grids.append(Grid((), tuple(rows), record.name if len(records) > 1 else "", is_text=True))
    return Section("What was run", tables=tuple(grids)) if grids else None


# Training metrics as charts.


def training_charts(rows: Sequence[dict[str, Any]]) -> list[Chart]:
    """Loss, accuracy per depth and expected acceptance length, each absent where `metrics.jsonl` does not have it."""
    train = [row for row in rows if row.get("kind") == "train" and "step" in row]
    held_out = [row for row in rows if row.get("kind") == "validation" and "step" in row]
    loss = [_over_steps("training", train, "loss", 0), _over_steps("held out", held_out, "loss", 1, is_strong=True)]
    charts = [_step_chart("Loss", loss, Axis("loss per slot", plain))]
    source, words = (held_out, "Held-out") if len(held_out) > 1 else (train, "Training")
    accuracy = []
    for depth in range(max((len(row.get("accuracy") or ()) for row in source), default=0)):
        values = [dict(enumerate(row.get("accuracy") or ())).get(depth) for row in source]
        points = thinned([(float(row["step"]), value) for row, value in zip(source, values)])
        accuracy.append(Series(f"depth {depth}", points, depth % NUM_COLOURS))
    y_axis = Axis("share equal to the verifier's choice", whole_percent, floor=0.0)
    charts.append(_step_chart(f"{words} accuracy per depth", accuracy, y_axis))
    lengths = _over_steps("expected acceptance length", held_out, "acceptance_length", 0, is_strong=True)
    y_axis = Axis("tokens per verifier pass", plain, floor=1.0)
    charts.append(_step_chart("Expected acceptance length, held out", [lengths], y_axis))
    return [chart for chart in charts if chart.svg]


def thinned(points: Sequence[tuple[float, float | None]]) -> Points:
    """At most `MAX_POINTS` points: neighbours are averaged, so that a long, noisy curve stays readable."""
    if len(points) <= MAX_POINTS:
        return tuple(points)
    out: list[tuple[float, float | None]] = []
    for i in range(MAX_POINTS):
        part = points[i * len(points) // MAX_POINTS : (i + 1) * len(points) // MAX_POINTS]
        known = [y for _, y in part if y is not None]
        out.append((part[-1][0], sum(known) / len(known) if known else None))
    return tuple(out)


def _over_steps(name: str, rows: Sequence[dict[str, Any]], key: str, colour: int, is_strong: bool = False) -> Series:
    return Series(name, thinned([(float(row["step"]), row.get(key)) for row in rows]), colour, is_strong)


def _step_chart(title: str, series: Sequence[Series], y_axis: Axis) -> Chart:
    return Chart(title, line_chart(title, series, Axis("optimizer step", plain, is_whole=True), y_axis))


# Acceptance by position as charts.


def _by_position(
    figures: dict[str, Any], name: str, colour: int, key: str = "acceptance_per_position", is_strong: bool = False
) -> Series | None:
    shares = figures.get(key)
    if not shares:
        return None
    return Series(name, tuple((float(k), share) for k, share in enumerate(shares, 1)), colour % NUM_COLOURS, is_strong)


def _position_chart(title: str, series: Sequence[Series]) -> Chart:
    depth = max((len(s.points) for s in series), default=1)
    x_axis = Axis("position in the draft", plain, ticks=tuple(float(k) for k in range(1, depth + 1)))
    y_axis = Axis("accepted", whole_percent, ticks=(0, 0.2, 0.4, 0.6, 0.8, 1))
    return Chart(title, line_chart(title, series, x_axis, y_axis))


def _charts(title: str, charts: Sequence[Chart]) -> Section | None:
    drawn = tuple(chart for chart in charts if chart.svg)
    return Section(title, charts=drawn) if drawn else None


# Figures of one record.


def _lengths(groups: Sequence[dict[str, Any]], name: str) -> list[float | None]:
    """Acceptance length of one line of figures, by drafter."""
    return [(group.get(name) or {}).get("acceptance_length") for group in groups]


def _speedup(figures: dict[str, Any]) -> float | None:
    ours, plainly = figures.get("tokens_per_s"), figures.get("plain_tokens_per_s")
    return ours / plainly if ours and plainly else None


def _rates(figures: dict[str, Any]) -> tuple[str, ...]:
    rates = (number(figures.get(key), 1) for key in ("tokens_per_s", "plain_tokens_per_s"))
    return (*rates, ratio(_speedup(figures)))


def _identical(record: Record) -> str:
    """Answers identical to the verifier's own, of those compared."""
    lossless = record.evaluation.get("lossless") or {}
    return f"{lossless.get('identical') or 0}/{lossless['checked']}" if lossless.get("checked") else MISSING


def _compared(name: str, values: Sequence[float | None], digits: int, is_sum: bool) -> Line:
    highest = max((value for value in values if value is not None), default=None)
    winners = tuple(i for i, value in enumerate(values, 1) if value is not None and value == highest)
    return Line((name, *(number(value, digits) for value in values)), is_sum, winners)


def _advice(choice: Expected) -> str:
    """Whether the best number of drafted tokens is worth drafting at all."""
    return "pays best here" if choice.speedup > 1 else "is the least bad; no number pays here"


def _expected(record: Record) -> list[Expected]:
    cost = _pass_cost(record)
    per_position = record.evaluation["pooled"].get("acceptance_per_position")
    if cost is None or not per_position:
        return []
    return expected_speedups(per_position, cost, record.checkpoint.get("speculators_model_type") == "eagle3")


def _pass_cost(record: Record) -> PassCost | None:
    k = record.evaluation.get("num_speculative_tokens")
    values = [record.speed.get(name) for name in ("plain_ms_per_token", "draft_ms_per_pass", "verify_ms_per_pass")]
    if not k or any(not isinstance(value, (int, float)) for value in values):
        return None
    # A step drafts and verifies for every row of the batch; plain decoding is timed per token.
    rows = record.evaluation.get("batch_size") or 1
    plain_ms, draft_ms, verify_ms = float(values[0]) * rows, float(values[1]), float(values[2])  # type: ignore[arg-type]
    # More tokens never cost less than one: below that is noise of the measurement.
    return PassCost(plain_ms, draft_ms, max(verify_ms, plain_ms), int(k))


def _conditions(record: Record) -> dict[str, Any]:
    """How an evaluation was made; neither its figures nor versions that a manifest shows."""
    shown = {key: record.evaluation[key] for key in _CONDITIONS if key in record.evaluation}
    if any(manifest.get("versions") == shown.get("versions") for _, manifest in record.manifests):
        shown.pop("versions", None)
    if "replay" in shown:
        shown["replay"] = _replayed(shown["replay"])
    if "verifier" in shown:
        shown["verifier"] = public_name(str(shown["verifier"]))
    return shown


def _replayed(replay: dict[str, Any]) -> str | None:
    """Whether replay and decoding counted alike, in words."""
    if replay.get("equal") is None:
        return None
    over = f"{number(replay.get('passes'), 0)} passes of {number(replay.get('answers'), 0)} answers"
    if not replay["equal"]:
        apart = replay.get("differing", len(replay.get("differences") or ()))
        how = "as decoding does but for rounding" if replay.get("is_within_rounding") else "otherwise than decoding"
        return f"counts {how} in {apart} answers (gaps in evaluation.json), {over}"
    ties = f", {replay['excused']} ties excused" if replay.get("excused") else ""
    return f"counts as decoding does, {over}{ties}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
