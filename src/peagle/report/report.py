"""`peagle report`: one self-contained page about one drafter, or about several side by side."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle.errors import DataError
from peagle.files import whole_file
from peagle.report import sections
from peagle.report.config import ReportConfig
from peagle.report.data import Record, collect
from peagle.report.page import Page, html, markdown

logger = logging.getLogger(__name__)


def main(config: ReportConfig) -> int:
    """`peagle report`: write the report and print where."""
    print(report(config))
    return 0


def report(config: ReportConfig) -> Path:
    """Write report.html, report.md and report.csv.

    Returns:
        The page's path.

    Raises:
        DataError: nothing to report in a folder.
    """
    if not config.folders:
        raise DataError("name at least one folder: `peagle report RUN`")
    records = collect([Path(folder) for folder in config.folders])
    page = build(records, config.title)
    texts = {"report.html": html(page), "report.md": markdown(page), "report.csv": as_csv(records)}
    for name, text in texts.items():
        with whole_file(config.output / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    number = "1 evaluation" if len(records) == 1 else f"{len(records)} evaluations"
    logger.info("read %s, wrote %s (and .md, .csv)", number, config.output / "report.html")
    return config.output / "report.html"


def build(records: Sequence[Record], title: str | None) -> Page:
    """Lay out the page."""
    names = [record.name for record in records]
    shown = title or ("Drafter " + names[0] if len(names) == 1 else "Drafters: " + ", ".join(names))
    measured = [record for record in records if record.evaluation]
    parts = [
        sections.side_by_side(measured),
        *(sections.acceptance(record, len(measured) > 1) for record in measured),
        sections.curves(measured),
        sections.contexts(measured),
        sections.speed(measured),
        sections.best_number(measured),
        sections.training(records),
        sections.what_was_run(records),
    ]
    return Page(
        title=shown,
        subtitle=sections.subtitle(records),
        cards=tuple(sections.cards(measured[0])) if len(measured) == 1 else (),
        notes=tuple(sections.notes(measured)),
        sections=tuple(section for section in parts if section is not None),
    )


def as_csv(records: Sequence[Record]) -> str:
    """Every figure in long form: drafter, data set, measure, position, value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["drafter", "dataset", "measure", "position", "value"])
    for record in records:
        groups: dict[str, Any] = dict(record.evaluation.get("datasets", {}))
        for name in ("average", "pooled"):
            if name in record.evaluation:
                groups[name.capitalize()] = record.evaluation[name]
        for name, figures in record.evaluation.get("by_context_length", {}).items():
            groups[f"context {name}"] = figures
        for dataset, figures in groups.items():
            for measure, value in figures.items():
                if isinstance(value, bool) or value is None:
                    continue
                if isinstance(value, list):
                    writer.writerows(
                        [record.name, dataset, measure, i, item] for i, item in enumerate(value, 1) if item is not None
                    )
                elif isinstance(value, (int, float)):
                    writer.writerow([record.name, dataset, measure, "", value])
        for measure, value in record.evaluation.get("speed", {}).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                writer.writerow([record.name, "", f"speed.{measure}", "", value])
    return out.getvalue()
