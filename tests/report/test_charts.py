from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

from peagle.report.charts import Axis, Series, bar_chart, line_chart, plain, round_ticks, whole_percent


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("text")]


def test_ticks_are_round_and_span_the_data():
    assert round_ticks(0.0, 0.83, 5) == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    ticks = round_ticks(3.0, 3.0, 5)
    assert ticks[0] <= 3.0 <= ticks[-1]
    assert round_ticks(0, 1234, 5)[-1] >= 1234


def test_a_line_chart_is_xml_and_names_every_line():
    series = [Series(f"set & {i}", ((1, 0.9 - i / 100), (2, None), (3, 0.4 - i / 100)), i) for i in range(9)]
    svg = line_chart(
        "t <x>", series, Axis("position", plain, ticks=(1, 2, 3)), Axis("accepted", whole_percent, floor=0.0)
    )
    assert {s.name for s in series} <= set(texts(svg))
    assert "nan" not in svg.lower()


def test_names_at_the_right_never_overlap_and_stay_inside():
    series = [Series(f"s{i}", ((1, 0.5), (2, 0.5)), i) for i in range(9)]
    svg = line_chart("t", series, Axis("x", plain), Axis("y", whole_percent, floor=0.0))
    ys = sorted(float(e.get("y")) for e in ET.fromstring(svg).iter("text") if "end" in (e.get("class") or ""))
    assert all(b - a >= 12.9 for a, b in itertools.pairwise(ys))
    assert ys[0] > 0
    assert ys[-1] < 290


def test_nothing_to_draw_gives_nothing():
    assert line_chart("t", [Series("a", ((1, None),), 0)], Axis("x", plain), Axis("y", plain)) == ""
    assert bar_chart("t", [], 0, "k", Axis("y", plain)) == ""


def test_a_bar_chart_marks_the_best_bar_only():
    svg = bar_chart("t", [("1", 1.2), ("2", 1.5), ("3", 1.4)], 1, "k", Axis("speed-up", plain, floor=0.0))
    assert svg.count("bar best") == 1
    assert {"1", "2", "3", "1.5"} <= set(texts(svg))


def test_a_single_point_and_a_single_value_are_drawn_without_dividing_by_zero():
    svg = line_chart("t", [Series("a", ((4, 2.0),), 0)], Axis("x", plain, ticks=(4.0,), is_log=True), Axis("y", plain))
    assert "circle" in svg
