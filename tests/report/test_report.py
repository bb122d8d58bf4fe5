"""The report shows what was measured, side by side, as one page that fetches nothing."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser

import pytest

from peagle.errors import DataError
from peagle.evaluate.counts import DatasetCounts, PassCounts
from peagle.evaluate.counts import report as acceptance
from peagle.report.config import ReportConfig
from peagle.report.data import collect
from peagle.report.report import MAX_POINTS, report, thinned, training_charts

VERIFIER = "Example/Verifier-1B"


def write_run(folder, accepted=(800, 500, 300), with_speed=True):
    """A run folder as the commands leave it: evaluation, checkpoint, metrics, manifest."""
    checkpoint = folder / "checkpoints" / "checkpoint_best"
    checkpoint.mkdir(parents=True)
    halves = {"1-128": PassCounts(400, tuple(a * 0.4 for a in accepted), 0)}
    halves["129-256"] = PassCounts(600, tuple(a * 0.6 for a in accepted), 0)
    found = acceptance(
        {
            "qa": DatasetCounts(PassCounts(1000, accepted, 2600), halves),
            "a|b <c>": DatasetCounts(PassCounts(10, (5, 2, 1), 20), {}),
        }
    )
    found |= {
        "checkpoint": str(checkpoint),
        "lossless": {"checked": 40, "identical": 40},
        "notes": ["a <note>, `code`"],
    }
    if with_speed:
        found["speed"] = {
            "tokens_per_s": 150.0,
            "plain_tokens_per_s": 100.0,
            "plain_ms_per_token": 10.0,
            "draft_ms_per_pass": 2.0,
            "verify_ms_per_pass": 12.0,
            "by_concurrency": [
                {"concurrency": c, "tokens_per_s": 100.0 * c, "plain_tokens_per_s": 70.0 * c} for c in (1, 8)
            ],
        }
    (folder / "evaluation.json").write_text(json.dumps(found))
    config = {
        "speculators_config": {"verifier": {"name_or_path": VERIFIER}},
        "speculators_model_type": "peagle",
        "transformer_layer_config": {"num_hidden_layers": 4},
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    lines = [{"kind": "train", "step": s, "loss": 3.0 - s / 100, "accuracy": [0.5, 0.3]} for s in range(1, 101)]
    for step in (50, 100):
        lines.append(
            {"kind": "validation", "step": step, "loss": 2.0, "accuracy": [0.6, 0.4], "acceptance_length": 1.9}
        )
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr'
    (checkpoint.parent / "metrics.jsonl").write_text(text)
    (folder / "manifest.json").write_text(json.dumps({"stage": "evaluate", "versions": {"torch": "2.13.0"}, "seed": 7}))
    return folder


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.fetched, self.titles = [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in ("src", "href")]
        assert tag not in ("script", "link", "iframe")
        self.titles += [v for k, v in attrs if k == "aria-label"]


def test_one_drafter_gets_a_page_with_every_section(tmp_path):
    write_run(tmp_path / "run")
    report(ReportConfig(folders=[str(tmp_path / "run")], output=tmp_path / "out", title=None))
    page = (tmp_path / "out" / "report.html").read_text()
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Acceptance",
        "Acceptance by position",
        "Acceptance by context length",
        "Speed",
        "Which number of drafted tokens pays",
        "Training",
        "What was run",
    ]
    assert VERIFIER in page
    assert "1.50x" in page
    assert "40/40" in page
    assert "2.6" in page
    assert "torch 2.13.0" in page


def test_the_page_fetches_nothing_and_escapes_what_it_shows(tmp_path):
    write_run(tmp_path / "run")
    report(ReportConfig(folders=[str(tmp_path / "run")], output=tmp_path / "out", title="<b>&"))
    page = (tmp_path / "out" / "report.html").read_text()
    parser = _Links()
    parser.feed(page)
    assert parser.fetched == []
    assert "url(" not in page
    assert "http" not in page
    assert "a|b &lt;c&gt;" in page
    assert "a &lt;note&gt;, <code>code</code>" in page
    assert "&lt;b&gt;&amp;" in page
    assert "Expected speed-up" in parser.titles


def test_light_dark_and_print_have_their_own_styles(tmp_path):
    write_run(tmp_path / "run")
    report(ReportConfig(folders=[str(tmp_path / "run")], output=tmp_path / "out", title=None))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_several_drafters_stand_side_by_side_with_the_best_marked(tmp_path):
    write_run(tmp_path / "runs" / "good")
    write_run(tmp_path / "runs" / "poor", accepted=(500, 200, 50), with_speed=False)
    report(ReportConfig(folders=[str(tmp_path / "runs")], output=tmp_path / "out", title=None))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Side by side" in page
    assert re.search(r'<td>qa</td><td class="best">2\.600</td><td>1\.750</td>', page)
    assert "Acceptance: good" in page
    assert "Acceptance: poor" in page


def test_one_training_measured_twice_is_drawn_once(tmp_path):
    first = write_run(tmp_path / "a")
    second = tmp_path / "a" / "again"
    second.mkdir()
    (second / "evaluation.json").write_text((first / "evaluation.json").read_text())
    report(ReportConfig(folders=[str(first), str(second)], output=tmp_path / "out", title=None))
    titles = re.findall(r"<h3>(.*?)</h3>", (tmp_path / "out" / "report.html").read_text())
    assert titles.count("Loss") == 1
    other = write_run(tmp_path / "b")
    (other / "checkpoints" / "metrics.jsonl").write_text("")
    report(ReportConfig(folders=[str(first), str(other)], output=tmp_path / "out", title=None))
    titles = re.findall(r"<h3>(.*?)</h3>", (tmp_path / "out" / "report.html").read_text())
    assert titles.count("Loss") == 0
    assert [title for title in titles if title.startswith("Loss: ")] == ["Loss: again, a"]


def test_agreement_of_replay_and_lossless_answers_are_shown_in_words(tmp_path):
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    for folder, equal in zip(folders, (True, False)):
        found = json.loads((folder / "evaluation.json").read_text())
        differences = [] if equal else [{"row_id": "x"}, {"row_id": "y"}]
        found["replay"] = {"equal": equal, "answers": 8, "passes": 375, "excused": 0, "differences": differences}
        (folder / "evaluation.json").write_text(json.dumps(found))
    report(ReportConfig(folders=[str(folder) for folder in folders], output=tmp_path / "out", title=None))
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| evaluation: replay | counts as decoding does, 375 passes of 8 answers |" in text
    assert "counts otherwise than decoding in 2 answers" in text
    assert "row_id" not in text
    assert "| Answers identical to the verifier's own | 40/40 | 40/40 |" in text


def test_markdown_and_csv_have_the_same_figures(tmp_path):
    write_run(tmp_path / "run")
    report(ReportConfig(folders=[str(tmp_path / "run")], output=tmp_path / "out", title=None))
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "| qa | 80.0 | 50.0 | 30.0 | 2.600 | 1,000 |" in markdown
    assert "a\\|b <c>" in markdown
    with open(tmp_path / "out" / "report.csv") as handle:
        rows = list(csv.DictReader(handle))
    found = {(r["dataset"], r["measure"], r["position"]): float(r["value"]) for r in rows}
    assert found["qa", "acceptance_length", ""] == pytest.approx(2.6)
    assert found["qa", "acceptance_per_position", "2"] == pytest.approx(0.5)
    assert found["", "speed.tokens_per_s", ""] == 150.0


def test_a_run_with_training_alone_is_reported_too(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "evaluation.json").unlink()
    report(ReportConfig(folders=[str(run)], output=tmp_path / "out", title=None))
    assert "Held-out accuracy per depth" in (tmp_path / "out" / "report.html").read_text()


def test_folders_with_nothing_to_report_are_refused_with_what_makes_it(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(DataError, match=r"peagle evaluate --output"):
        collect([tmp_path])
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(DataError, match="no `pooled`"):
        collect([tmp_path])
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        collect([tmp_path])


def test_one_evaluation_named_twice_is_one_column_and_equal_names_get_numbers(tmp_path):
    first, second = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")
    assert [r.name for r in collect([first, first, second])] == ["run", "run (2)"]


def test_nothing_drafted_shows_dashes_not_zeros(tmp_path):
    run = write_run(tmp_path / "run", with_speed=False)
    found = acceptance({"qa": DatasetCounts(PassCounts(0, (0, 0, 0), 5), {})})
    (run / "evaluation.json").write_text(json.dumps(found))
    report(ReportConfig(folders=[str(run)], output=tmp_path / "out", title=None))
    assert "| qa | - | - | - | - | 0 |" in (tmp_path / "out" / "report.md").read_text()


def test_long_curves_are_thinned_to_means_and_keep_their_last_step():
    points = [(float(i), float(i % 2)) for i in range(10_000)]
    short = thinned(points)
    assert len(short) == MAX_POINTS
    assert short[-1][0] == 9_999.0
    assert all(abs(y - 0.5) < 0.05 for _, y in short)


def test_training_without_validation_shows_the_training_accuracy():
    rows = [{"kind": "train", "step": s, "loss": 2.0, "accuracy": [0.5, None]} for s in (1, 2)]
    assert [chart.title for chart in training_charts(rows)] == ["Loss", "Training accuracy per depth"]


def test_an_evaluation_and_the_checkpoints_that_it_names_are_one_drafter(tmp_path):
    run = write_run(tmp_path / "mine")
    (run / "evaluation").mkdir()
    (run / "evaluation.json").rename(run / "evaluation" / "evaluation.json")
    (record,) = collect([run / "evaluation", run / "checkpoints"])
    assert record.name == "mine"
    assert record.metrics
    assert [r.name for r in collect([run / "checkpoints"])] == ["mine"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("average", "x"), ("speed", [1]), ("lossless", 5), ("by_context_length", "x"), ("batch_size", "x")],
)
def test_an_evaluation_with_a_part_of_another_kind_is_refused_by_its_name(tmp_path, key, value):
    write_run(tmp_path / "run")
    path = next((tmp_path / "run").rglob("evaluation.json"))
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, key: value}))
    with pytest.raises(DataError, match=f"`{key}` is .*, expected"):
        report(ReportConfig(folders=[str(tmp_path / "run")], output=tmp_path / "out", title=None))
    path.write_text(json.dumps({**found, key: None}))
    report(ReportConfig(folders=[str(tmp_path / "run")], output=tmp_path / "out", title=None))


def test_metrics_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read"):
        collect([tmp_path])
