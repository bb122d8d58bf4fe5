"""`peagle report`."""

from __future__ import annotations

from peagle.evaluate.report import ReportConfig, report

CONFIG = ReportConfig


def run(config: ReportConfig) -> None:
    """Make one self-contained page (HTML, Markdown, CSV) about a drafter, or several side by side.

    Name runs, checkpoints or evaluations. The page has the acceptance table, curves by position and by context length,
    the training, speed, which number of drafted tokens pays on this hardware, and what was run.
    """
    print(report(config))
