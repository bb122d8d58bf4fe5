"""The demo runs the whole pipeline with the shipped verifier, and refuses to overwrite what it did not make."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from peagle.errors import PeagleError
from peagle.pipeline.config import DemoConfig
from peagle.pipeline.demo import clear, demo, show, verdict

FIGURES = {
    "pooled": {"acceptance_length": 2.2},
    "speed": {"tokens_per_s": 150.0, "plain_tokens_per_s": 100.0},
    "lossless": {"checked": 40, "identical": 40},
    "replay": {"equal": True},
}


@pytest.mark.slow
def test_the_demo_runs_the_whole_pipeline_and_leaves_its_figures(tmp_path):
    status = demo(DemoConfig(output=tmp_path / "demo", questions=8, test_questions=2, steps=2))
    figures = json.loads((tmp_path / "demo" / "evaluation.json").read_text())
    assert status == 0
    assert figures["lossless"]["checked"] == 2
    assert figures["lossless"]["identical"] == 2
    assert figures["replay"]["equal"] is True
    assert figures["pooled"]["verifier_passes"] > 0
    assert len(figures["pooled"]["acceptance_per_position"]) == 4
    assert set(figures["datasets"]) == {"gsm8k"}
    assert figures["speed"]["tokens_per_s"] > 0
    assert figures["speed"]["plain_tokens_per_s"] > 0
    for name in ("report/report.html", "checkpoints/checkpoint_best/model.safetensors", "answers.jsonl"):
        assert (tmp_path / "demo" / name).exists()


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(PeagleError, match="no earlier demo made it"):
        clear(tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"
    (tmp_path / "demo.json").write_text("{}")
    clear(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["demo.json"]


def test_the_end_tells_speed_proof_and_places(tmp_path):
    out = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    show(FIGURES, tmp_path, 200.0, out)
    text = out.export_text()
    assert "2.20 tokens per verifier pass" in text
    assert "1.50 times as fast" in text
    assert "all 40 answers are identical" in text
    assert "report.html" in text
    assert "3m20s" in text


@pytest.mark.parametrize(
    ("changes", "status"),
    [({}, 0), ({"lossless": {"checked": 40, "identical": 39}}, 1), ({"replay": {"equal": False}}, 1)],
)
def test_an_answer_that_differs_or_a_count_that_differs_fails_the_demo(changes, status):
    assert verdict({**FIGURES, **changes}) == status
