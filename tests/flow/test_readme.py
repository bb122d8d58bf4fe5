"""The Python example of the README runs as it stands, on a run made by the commands' own functions."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from peagle.data.config import PrepareConfig
from peagle.data.prepare import prepare
from peagle.hidden_states.config import ExtractConfig
from peagle.hidden_states.extract import extract
from peagle.train.config import TrainConfig
from peagle.train.run import train
from tests.fakes import byte_tokenizer, tiny_verifier

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path):
    """A tiny run where the README says that the demo's is."""
    verifier = tiny_verifier(tmp_path / "verifier", "qwen3", tokenizer=byte_tokenizer())
    talks = [
        {"messages": [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]}
        for n in range(6)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    at = tmp_path / "demo-output"
    given = {"model": str(verifier), "data": [str(tmp_path / "talks.jsonl")], "output": at / "prepared"}
    prepare(PrepareConfig.build({**given, "num_preprocessing_workers": 1}))
    extract(ExtractConfig.build({"preprocessed_data": at / "prepared", "output": at / "hidden_states"}))
    settings = {
        "verifier_name_or_path": str(verifier),
        "data_path": at / "prepared",
        "hidden_states_path": at / "hidden_states",
        "save_path": at / "checkpoints",
        "num_layers": 1,
        "max_steps": 1,
        "epochs": 1,
        "total_seq_len": 256,
    }
    train(TrainConfig.build(settings))
    return at


def test_the_readmes_example_runs_and_does_what_it_says(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["slots"].num_slots > 0
    assert names["result"].loss_sum.sum() > 0
    assert names["model"].drafter.mask_hidden.grad.abs().sum() > 0
    assert 0 < len(names["written"].answer.ids) <= 80
    assert all(0 <= accepted <= 4 for accepted in names["written"].accepted)
    assert "loss per depth" in capsys.readouterr().out


def test_the_python_pages_examples_run_and_what_it_names_exists(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    written, trained, prepared = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    exec(compile(written, "docs/python.md", "exec"), {})
    exec(compile(trained, "docs/python.md", "exec"), {})
    losses = [float(line) for line in capsys.readouterr().out.splitlines()[-3:]]
    assert all(0 < loss < 20 for loss in losses)
    compile(prepared, "docs/python.md", "exec")
    for name in re.findall(r"`(peagle\.[a-z_.A-Z]+\.[A-Za-z]+)`", page):
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member), name


def test_the_readmes_example_has_ten_lines():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    lines = [line for line in example.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 10
