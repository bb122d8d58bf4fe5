"""A recipe is run once: what is done is skipped, what changed is done again, what was killed goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from peagle.errors import PeagleError
from peagle.pipeline import run as run_module
from peagle.pipeline.config import RunConfig
from peagle.pipeline.plan import plan
from peagle.pipeline.recipe import read
from peagle.pipeline.run import run
from peagle.processes import take_lock

# Stands for a stage: writes its settings and what it read into its output, and notes that it ran.
FAKE_STAGE = """
import json, sys, pathlib, yaml
name, settings_file, log = sys.argv[1:]
settings = yaml.safe_load(open(settings_file))
out = pathlib.Path(settings.get("save_path") or settings.get("output"))
out.mkdir(parents=True, exist_ok=True)
read = settings.get("preprocessed_data") or settings.get("data_path")
seen = (pathlib.Path(read) / "made.txt").read_text() if read else pathlib.Path(settings["data"][0]).read_text()
if name == "train" and settings.get("seed") == 13:
    sys.exit(2)
(out / "made.txt").write_text(name + str(settings.get("epochs", "")) + seen)
open(log, "a").write(name + "\\n")
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "data.jsonl").write_text('{"a": 1}\n')
    values = {
        "name": "fake",
        "verifier": "owner/model",
        "output": str(tmp_path / "out"),
        "prepare": {"data": [str(tmp_path / "data.jsonl")]},
        "extract": {},
        "train": {"epochs": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "fake_stage.py").write_text(FAKE_STAGE)

    def command(recipe, stage, settings_file):
        return [sys.executable, str(tmp_path / "fake_stage.py"), stage.name, str(settings_file), str(tmp_path / "log")]

    monkeypatch.setattr(run_module, "stage_command", command)
    return tmp_path / "recipe.yaml"


def run_it(recipe, **given):
    return run(RunConfig(recipe=str(recipe), **given))


def ran(recipe):
    log = recipe.parent / "log"
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return names


def test_the_second_run_does_nothing(recipe):
    assert run_it(recipe) == 0
    assert ran(recipe) == ["prepare", "extract", "train"]
    assert run_it(recipe) == 0
    assert ran(recipe) == []


def test_a_changed_setting_redoes_its_stage_and_keeps_the_old_result_aside(recipe):
    run_it(recipe)
    ran(recipe)
    run_it(recipe, changes=("train.epochs=2",))
    assert ran(recipe) == ["train"]
    kept = list((recipe.parent / "out" / "old").iterdir())
    assert [path.name.startswith("checkpoints-") for path in kept] == [True]
    assert (kept[0] / "made.txt").read_text().startswith("train1")


def test_changed_data_redoes_everything_that_follows_from_it(recipe):
    run_it(recipe)
    ran(recipe)
    (recipe.parent / "data.jsonl").write_text('{"a": 2}\n')
    run_it(recipe)
    assert ran(recipe) == ["prepare", "extract", "train"]


def test_equal_data_written_anew_redoes_nothing(recipe):
    run_it(recipe)
    ran(recipe)
    data = recipe.parent / "data.jsonl"
    data.write_text(data.read_text())
    os.utime(data, (1, 1))
    run_it(recipe)
    assert ran(recipe) == []


def test_a_result_that_was_deleted_or_changed_is_made_again(recipe):
    run_it(recipe)
    ran(recipe)
    (recipe.parent / "out" / "checkpoints" / "made.txt").unlink()
    run_it(recipe)
    assert ran(recipe) == ["train"]
    (recipe.parent / "out" / "checkpoints" / "made.txt").write_text("by hand")
    run_it(recipe)
    assert ran(recipe) == ["train"]


def test_a_failed_stage_stops_the_run_and_the_next_run_goes_on_there(recipe):
    assert run_it(recipe, changes=("train.seed=13",)) == 2
    assert ran(recipe) == ["prepare", "extract"]
    assert run_it(recipe) == 0
    assert ran(recipe) == ["train"]


def test_a_started_stage_is_resumed_in_its_folder(recipe):
    run_it(recipe)
    state_file = recipe.parent / "out" / "run.json"
    state = json.loads(state_file.read_text())
    state["train"]["status"] = "started"
    state_file.write_text(json.dumps(state))
    assert [s.action for s in plan(read(recipe, None, ()), None)] == ["skip", "skip", "resume"]
    ran(recipe)
    run_it(recipe)
    assert ran(recipe) == ["train"]
    assert not (recipe.parent / "out" / "old").exists()


def test_what_the_first_releases_did_is_still_known(recipe):
    run_it(recipe)
    (recipe.parent / "out" / "run.json").rename(recipe.parent / "out" / "road.json")
    ran(recipe)
    run_it(recipe)
    assert ran(recipe) == []


def test_the_plan_of_a_fresh_recipe_runs_everything_and_touches_nothing(recipe):
    steps = plan(read(recipe, None, ()), None)
    assert [(s.stage.name, s.action) for s in steps] == [("prepare", "run"), ("extract", "run"), ("train", "run")]
    assert steps[1].why == "after prepare"
    assert not (recipe.parent / "out").exists()


def test_until_stops_early_and_an_unknown_stage_is_refused(recipe):
    run_it(recipe, until="prepare")
    assert ran(recipe) == ["prepare"]
    with pytest.raises(PeagleError, match="it has prepare, extract, train"):
        run_it(recipe, until="serve")


def test_two_runs_of_one_folder_are_never_at_work_together(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.processes._LOCK_WAIT_S", 0.1)
    lock = take_lock(tmp_path)
    with pytest.raises(PeagleError, match="another `peagle run` is at work"):
        take_lock(tmp_path)
    os.close(lock)
    os.close(take_lock(tmp_path))


def test_a_stage_ends_with_the_run_that_was_killed(tmp_path):
    child = "import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(60)"
    parent = (
        "import sys; from pathlib import Path; from peagle.processes import run_process, take_lock;"
        f"run_process([sys.executable, '-c', {child!r}], take_lock(Path('.')), {{}})"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    stat = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)
