"""Training metrics as curves for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peagle.evaluate.charts import NUM_COLOURS, Series

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
