"""What is pushed is what serving needs, with a card; the training state never leaves."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch

from peagle.drafter.checkpoint import save
from peagle.drafter.network import Drafter
from peagle.errors import CheckpointError, ConfigError
from peagle.report.hub import PushConfig, push
from tests.drafter.test_card import config

EVALUATION = {
    "convention": "Pooled over all passes.",
    "pooled": {"acceptance_per_position": [0.8, 0.5], "acceptance_length": 2.3},
    "datasets": {"qa": {"acceptance_per_position": [0.8, 0.5], "acceptance_length": 2.3}},
}


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "run" / "checkpoints" / "0"
    save(Drafter(config("Qwen/Qwen3-8B")), folder, "float32")
    (folder / "training_state").mkdir()
    (folder / "training_state" / "masters.safetensors").write_bytes(b"secret")
    return folder


def test_a_dry_run_shows_weights_config_and_card_only(checkpoint, tmp_path):
    evaluation = checkpoint.parent / "evaluation"
    evaluation.mkdir()
    (evaluation / "evaluation.json").write_text(json.dumps(EVALUATION))
    out = tmp_path / "push"
    push(PushConfig(checkpoint=str(checkpoint), repo="me/drafter", dry_run=True, output=out, license_name="mit"))
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert "| Pooled | 80.0 |" in (out / "README.md").read_text()
    assert "license: mit" in (out / "README.md").read_text()


def test_upload_goes_to_the_named_repository(checkpoint, monkeypatch):
    calls = []

    class Api:
        def create_repo(self, repo, **given):
            calls.append((repo, given["private"]))

        def upload_folder(self, **given):
            calls.append((given["repo_id"], sorted(p.name for p in Path(given["folder_path"]).iterdir())))

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=Api))
    push(PushConfig(checkpoint=str(checkpoint), repo="me/drafter", private=True))
    assert calls == [("me/drafter", True), ("me/drafter", ["README.md", "config.json", "model.safetensors"])]


def test_a_hub_that_refuses_is_one_line(checkpoint, monkeypatch):
    class Api:
        def create_repo(self, repo, **given):
            raise OSError("401 no token\nlong trace")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=Api))
    with pytest.raises(CheckpointError, match=r"the hub refused \(401 no token"):
        push(PushConfig(checkpoint=str(checkpoint), repo="me/drafter"))


def test_a_bad_repository_name_a_missing_evaluation_and_damaged_weights_are_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        push(PushConfig(checkpoint=str(checkpoint), repo="drafter", dry_run=True, output=tmp_path / "p"))
    given = {"checkpoint": str(checkpoint), "repo": "me/d", "dry_run": True, "output": tmp_path / "p"}
    with pytest.raises(ConfigError, match="--evaluation"):
        push(PushConfig(**given, evaluation=tmp_path / "none.json"))
    (checkpoint / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="damaged"):
        push(PushConfig(**given))
