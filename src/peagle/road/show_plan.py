"""The plan of a recipe as a table or as JSON: what would run and why, disk, memory, time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from peagle import log
from peagle.files import free_bytes
from peagle.road.estimate import Estimate, Rows, count_rows, estimate, measured_rate, sizes_of
from peagle.road.recipe import Recipe
from peagle.road.run import Step

_WIDE = 116


def estimates(recipe: Recipe, steps: Sequence[Step]) -> tuple[list[Estimate], Rows | None]:
    """Estimate every step; the machine's rate is measured if anything is to be run."""
    sizes, rows = sizes_of(recipe), count_rows(recipe)
    rate = measured_rate() if any(step.action != "skip" for step in steps) else None
    return [estimate(step.stage, recipe, sizes, rows, rate) for step in steps], rows


def table(recipe: Recipe, steps: Sequence[Step], found: Sequence[Estimate], rows: Rows | None, width: int) -> Table:
    """The plan for a terminal of so many columns; what each stage makes is left out where it would be cut up."""
    shown = Table(title=f"{recipe.name}: {recipe.description or recipe.verifier}", title_justify="left")
    is_wide = width >= _WIDE
    for name in ("stage", "plan"):
        shown.add_column(name, no_wrap=True)
    for name in ("why", "makes") if is_wide else ("why",):
        shown.add_column(name, overflow="fold")
    for name in ("disk", "memory", "time here"):
        shown.add_column(name, justify="right", no_wrap=True)
    for step, one in zip(steps, found):
        is_idle = step.action == "skip"
        costs = ("", "", "") if is_idle else (size(one.disk_bytes), size(one.memory_bytes), spell(one.seconds))
        style = "dim" if is_idle else ""
        makes = (_below(step.stage.output, recipe.output),) if is_wide else ()
        shown.add_row(step.stage.name, step.action, step.why, *makes, *costs, style=style)
    shown.caption = caption(recipe, steps, found, rows)
    shown.caption_justify = "left"
    return shown


def caption(recipe: Recipe, steps: Sequence[Step], found: Sequence[Estimate], rows: Rows | None) -> str:
    """What the figures rest on, and whether the disk has room."""
    parts = []
    if rows is None:
        parts.append(
            "No limit on the number of rows (max_samples), so nothing can be estimated before `prepare` has run."
        )
    elif rows.is_counted:
        parts.append(
            f"{rows.num_rows:,} prepared rows, {rows.num_tokens:,} tokens, {rows.num_supervised:,} supervised."
        )
    else:
        mean = rows.num_tokens // max(rows.num_rows, 1)
        parts.append(f"{rows.num_rows:,} rows of {mean:,} tokens on average are assumed until `prepare` counted them.")
    need = sum(one.disk_bytes or 0 for step, one in zip(steps, found) if step.action != "skip")
    free = free_bytes(recipe.output)
    verdict = "" if need <= free else "  THE DISK IS TOO SMALL."
    parts.append(f"Disk: {size(need)} needed, {size(free)} free at {recipe.output}.{verdict}")
    parts.append("Time is for this machine as busy as it is now, to a factor of two or three.")
    return " ".join(parts)


def as_json(recipe: Recipe, steps: Sequence[Step], found: Sequence[Estimate], rows: Rows | None) -> dict[str, Any]:
    """The plan as JSON."""
    return {
        "name": recipe.name,
        "verifier": recipe.verifier,
        "output": str(recipe.output),
        "rows": None if rows is None else vars(rows),
        "free_bytes": free_bytes(recipe.output),
        "stages": [
            {
                "stage": step.stage.name,
                "action": step.action,
                "why": step.why,
                "output": str(step.stage.output),
                "settings": step.stage.settings,
                **vars(one),
            }
            for step, one in zip(steps, found)
        ],
    }


def _below(path: Path, root: Path) -> str:
    """A path as seen from the run's folder, if it lies in it."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def size(value: float | None) -> str:
    """Bytes as people read them: 1.2 GB."""
    if value is None:
        return "?"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value / 1e3:.0f} kB"


def spell(seconds: float | None) -> str:
    """Seconds as people read them, days included."""
    if seconds is None:
        return ""
    return f"{seconds / 86400:.1f} days" if seconds > 2 * 86400 else log.duration(seconds)
