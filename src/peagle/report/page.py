"""The parts of a report, and how they become one HTML page or Markdown. Nothing here knows what is reported."""

import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape
from markupsafe import Markup, escape

from peagle.evaluate.counts import markdown_lines
from peagle.report.charts import NUM_COLOURS

TEMPLATES = Path(__file__).resolve().parent / "templates"
MISSING = "-"


@dataclass(frozen=True)
class Card:
    """One figure at the top of the page."""

    value: str
    label: str
    tone: str = ""
    """"good", "bad" or nothing."""


@dataclass(frozen=True)
class Line:
    """A table's row."""

    cells: tuple[str, ...]
    is_sum: bool = False
    """Average and Pooled stand out."""
    best: tuple[int, ...] = ()
    """Indices of cells that are the best of their kind."""


@dataclass(frozen=True)
class Grid:
    """A table."""

    head: tuple[str, ...]
    rows: tuple[Line, ...]
    caption: str = ""
    is_text: bool = False
    """Two columns of text, names and values."""


@dataclass(frozen=True)
class Chart:
    """A titled figure."""

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A heading with tables and charts."""

    title: str
    _: KW_ONLY
    text: str = ""
    tables: tuple[Grid, ...] = ()
    charts: tuple[Chart, ...] = ()
    footnote: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str
    cards: tuple[Card, ...]
    notes: tuple[str, ...]
    sections: tuple[Section, ...]


def html(page: Page) -> str:
    """One self-contained HTML page: styles and charts inside, no script, nothing fetched."""
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(("html", "html.j2")),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # what stands between backticks is set as code
    templates.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    sections = [s for s in page.sections if s.tables or any(c.svg for c in s.charts)]
    return templates.get_template("report.html.j2").render(
        vars(page) | {"sections": sections, "num_colours": NUM_COLOURS}
    )


def markdown(page: Page) -> str:
    """The page's words and tables; charts are left out."""
    out = [f"# {page.title}", "", page.subtitle, ""]
    out += [f"- **{card.value}** {card.label}" for card in page.cards]
    out += [f"- {note}" for note in page.notes] + [""]
    for section in page.sections:
        if not section.tables:
            continue
        out += [f"## {section.title}", "", *([section.text, ""] if section.text else [])]
        for grid in section.tables:
            out += [f"*{grid.caption}*", ""] if grid.caption else []
            head, rows = grid.head or ("",) * len(grid.rows[0].cells), [row.cells for row in grid.rows]
            out += [*markdown_lines(head, rows, "---" if grid.is_text else "---:"), ""]
        out += [section.footnote, ""] if section.footnote else []
    return "\n".join(out).rstrip() + "\n"


def number(value: float | None, digits: int) -> str:
    """A figure as a cell shows it: 12,345.7."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def ratio(value: float | None) -> str:
    """A speed-up: 1.52x."""
    return MISSING if value is None else f"{value:.2f}x"
