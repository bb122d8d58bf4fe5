"""Line and bar charts as SVG text. The page gives the colours, so light, dark and print all work."""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from html import escape

Points = tuple[tuple[float, float | None], ...]

NUM_COLOURS = 9
_WIDTH, _HEIGHT = 480, 290
_LEFT, _TOP, _BOTTOM = 46, 12, 44
_LABEL_GAP = 13.0
_CHAR_WIDTH = 6.1


@dataclass(frozen=True)
class Series:
    """One line: points in ascending x; a point whose y is None leaves a gap."""

    name: str
    points: Points
    colour: int
    """Index into the page's palette, 0 .. NUM_COLOURS - 1."""
    is_strong: bool = False
    """Drawn thicker and on top."""

    @property
    def known(self) -> list[tuple[float, float]]:
        """The points that have a value."""
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class Axis:
    """How one axis is labelled."""

    label: str
    show: Callable[[float], str]
    """A tick's text."""
    _: KW_ONLY
    ticks: tuple[float, ...] | None = None
    """Where the ticks go; None chooses round numbers."""
    floor: float | None = None
    """Lowest value shown; None fits the data."""
    is_log: bool = False
    """Base-2 spacing, for counts that double; needs `ticks`."""
    is_whole: bool = False
    """Ticks only at whole numbers."""


def whole_percent(value: float) -> str:
    """0.713 as "71 %"."""
    return f"{100 * value:.0f} %"


def plain(value: float) -> str:
    """A number with no more digits than it needs: 1.5, 20, 3k."""
    if abs(value) >= 1000 and value % 100 == 0:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"


def round_ticks(low: float, high: float, count: int) -> tuple[float, ...]:
    """About `count` round numbers that span [low, high]: 5 for [0, 0.83] are 0.0, 0.2, 0.4, 0.6, 0.8, 1.0."""
    if high <= low:
        high = low + (abs(low) or 1.0) * 0.1
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(i * step, 12) for i in range(first, last + 1))


def line_chart(title: str, series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """Draw lines with their names at their right ends, kept from overlapping. "" where no series has a point."""
    drawn = [s for s in series if s.known]
    if not drawn:
        return ""
    xs = [x for s in drawn for x, _ in s.known]
    ys = [y for s in drawn for _, y in s.known]
    right = 16 + (_CHAR_WIDTH * max(len(s.name) for s in drawn) if len(drawn) > 1 else 0)
    place = _Scale(xs, ys, x_axis, y_axis, right)
    parts = [*_frame(title, place, x_axis, y_axis)]
    for s in sorted(drawn, key=lambda s: s.is_strong):
        parts.append(f'<path class="line c{s.colour}{" strong" if s.is_strong else ""}" d="{_path(s, place)}"/>')
        if len(s.known) <= 24:
            for x, y in s.known:
                text = f"{s.name}, {x_axis.label} {x_axis.show(x)}: {y_axis.show(y)}"
                parts.append(
                    f'<circle class="dot c{s.colour}" cx="{place.x(x):.1f}" cy="{place.y(y):.1f}" r="3">'
                    f"<title>{escape(text)}</title></circle>"
                )
    if len(drawn) > 1:
        wanted = [(place.y(s.known[-1][1]), s) for s in drawn]
        edge = _WIDTH - right + 8
        for (wished, s), y in zip(sorted(wanted, key=lambda w: w[0]), _spread(sorted(w for w, _ in wanted))):
            x_end = place.x(s.known[-1][0])
            if abs(y - wished) > 2 or x_end < edge - 16:
                parts.append(f'<path class="lead" d="M{x_end + 4:.1f} {wished:.1f}L{edge - 2} {y:.1f}"/>')
            strong = " strong" if s.is_strong else ""
            parts.append(f'<text class="end c{s.colour}{strong}" x="{edge}" y="{y + 4:.1f}">{escape(s.name)}</text>')
    return _svg(title, parts)


def bar_chart(title: str, bars: Sequence[tuple[str, float]], best: int, x_label: str, y_axis: Axis) -> str:
    """Draw one bar for each (name, value) with its value above it; bar `best` stands out. "" where there is none."""
    if not bars:
        return ""
    place = _Scale([0.5, len(bars) + 0.5], [value for _, value in bars], Axis("", plain, ticks=()), y_axis, 16)
    names = Axis(x_label, lambda x: bars[int(x) - 1][0], ticks=tuple(range(1, len(bars) + 1)))
    parts = [*_frame(title, place, names, y_axis)]
    width = (place.x(1) - place.x(0)) * 0.62
    base = place.y(place.low_y)
    for index, (name, value) in enumerate(bars):
        left, top = place.x(index + 1) - width / 2, place.y(value)
        kind = "bar best" if index == best else "bar"
        parts.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{min(top, base):.1f}" width="{width:.1f}" '
            f'height="{abs(base - top):.1f}"><title>{escape(f"{x_label} {name}: {y_axis.show(value)}")}</title></rect>'
        )
        parts.append(
            f'<text class="value" x="{left + width / 2:.1f}" y="{top - 5:.1f}">{escape(y_axis.show(value))}</text>'
        )
    return _svg(title, parts)


class _Scale:
    """Data coordinates to SVG coordinates."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], x_axis: Axis, y_axis: Axis, right: float) -> None:
        self.right = _WIDTH - right
        self._log = x_axis.is_log
        self.low_x, self.high_x = self._at(min(xs)), self._at(max(xs))
        if self.high_x <= self.low_x:
            self.low_x, self.high_x = self.low_x - 0.5, self.high_x + 0.5
        low = min(ys) if y_axis.floor is None else y_axis.floor
        self.y_ticks = y_axis.ticks or round_ticks(low, max(max(ys), low + 1e-9), 5)
        self.low_y, self.high_y = self.y_ticks[0], self.y_ticks[-1]
        chosen = x_axis.ticks
        if chosen is None:
            slack = 1e-9 * max(abs(self.low_x), abs(self.high_x), 1.0)
            ticks = round_ticks(min(xs), max(xs), 5)
            chosen = tuple(t for t in ticks if self.low_x - slack <= t <= self.high_x + slack)
        self.x_ticks = tuple(t for t in chosen if t == int(t)) or (min(xs),) if x_axis.is_whole else chosen

    def _at(self, x: float) -> float:
        return math.log2(x) if self._log else x

    def x(self, value: float) -> float:
        return _LEFT + (self._at(value) - self.low_x) / (self.high_x - self.low_x) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        share = (value - self.low_y) / (self.high_y - self.low_y)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _frame(title: str, place: _Scale, x_axis: Axis, y_axis: Axis) -> list[str]:
    """Grid, ticks and axis labels."""
    parts = []
    for tick in place.y_ticks:
        y = place.y(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{place.right:.1f}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{y + 4:.1f}">{escape(y_axis.show(tick))}</text>')
    for tick in x_axis.ticks or place.x_ticks:
        text = escape(x_axis.show(tick))
        parts.append(f'<text class="tick x" x="{place.x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 17}">{text}</text>')
    middle = (_LEFT + place.right) / 2
    parts.append(f'<text class="axis" x="{middle:.1f}" y="{_HEIGHT - 6}">{escape(x_axis.label)}</text>')
    return parts


def _path(series: Series, place: _Scale) -> str:
    """The `d` of a line; None and non-finite values lift the pen."""
    path, pen = "", "M"
    for x, y in series.points:
        if y is None or not math.isfinite(y):
            pen = "M"
        else:
            path, pen = f"{path}{pen}{place.x(x):.1f} {place.y(y):.1f}", "L"
    return path


def _spread(wanted: list[float]) -> list[float]:
    """Ascending label positions moved apart to `_LABEL_GAP`, as near as may be to where they belong."""
    placed: list[list[float]] = []  # clusters of wishes, each laid out around its mean
    for wish in wanted:
        placed.append([wish])
        while len(placed) > 1 and _top(placed[-2]) + _LABEL_GAP * len(placed[-2]) > _top(placed[-1]):
            last = placed.pop()
            placed[-1] += last
    return [_top(cluster) + _LABEL_GAP * i for cluster in placed for i in range(len(cluster))]


def _top(cluster: list[float]) -> float:
    height = _LABEL_GAP * (len(cluster) - 1)
    wished = sum(cluster) / len(cluster) - height / 2
    return max(min(wished, _HEIGHT - _BOTTOM - height), float(_TOP))


def _svg(title: str, parts: list[str]) -> str:
    body = "".join(parts)
    return f'<svg class="chart" role="img" aria-label="{escape(title)}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{body}</svg>'
