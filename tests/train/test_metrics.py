"""Trackers get the numbers; a missing one is refused before training, a failing one never stops it."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from peagle.errors import ConfigError
from peagle.train.metrics import Trackers, flatten


def fake_module(monkeypatch, name, **functions):
    module = types.ModuleType(name)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_the_docstring_example_of_flatten_holds():
    row = {"loss": 1.5, "accuracy": [0.7, 0.4], "kind": "train", "best": True, "memory": {"gb": 2}}
    assert flatten(row) == {"loss": 1.5, "accuracy/0": 0.7, "accuracy/1": 0.4, "memory/gb": 2.0}


def test_an_unknown_name_and_a_missing_package_are_refused_at_once(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="not one of tensorboard, wandb, mlflow, trackio"):
        Trackers(("neptune",), tmp_path, "run", {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        Trackers(("wandb",), tmp_path, "run", {})


def test_each_tracker_gets_flat_numbers_and_the_step(monkeypatch, tmp_path):
    seen = []
    fake_module(
        monkeypatch,
        "mlflow",
        set_experiment=lambda name: seen.append(("experiment", name)),
        start_run=lambda run_name: seen.append(("run", run_name)),
        log_params=lambda params: seen.append(("params", params)),
        log_metrics=lambda flat, step: seen.append(("metrics", flat, step)),
        end_run=lambda: seen.append(("end",)),
    )
    fake_module(
        monkeypatch,
        "trackio",
        init=lambda **given: seen.append(("init", given["name"])),
        log=lambda flat, step: seen.append(("trackio", flat, step)),
        finish=lambda: seen.append(("finish",)),
    )
    trackers = Trackers(("mlflow", "trackio"), tmp_path, "night", {"lr": 0.1})
    trackers.log({"loss": 2.0, "kind": "train"}, 7)
    trackers.close()
    assert ("metrics", {"loss": 2.0}, 7) in seen
    assert ("trackio", {"loss": 2.0}, 7) in seen
    assert ("params", {"lr": "0.1"}) in seen
    assert seen[-2:] == [("end",), ("finish",)]


def test_a_tracker_that_fails_is_warned_about_once_and_training_goes_on(monkeypatch, tmp_path, caplog):
    def broken(flat, step):
        raise OSError("server gone")

    fake_module(monkeypatch, "trackio", init=lambda **given: None, log=broken, finish=lambda: None)
    trackers = Trackers(("trackio",), tmp_path, "run", {})
    monkeypatch.setattr(logging.getLogger("peagle"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        trackers.log({"loss": 1.0}, 1)
        trackers.log({"loss": 1.0}, 2)
    records = {id(record): record.getMessage() for record in caplog.records}  # once, however many loggers show it
    assert list(records.values()) == ["trackio failed (OSError: server gone); training goes on"]


def test_no_tracker_asked_for_is_fine(tmp_path):
    trackers = Trackers((), tmp_path, "run", {})
    trackers.log({"loss": 1.0}, 1)
    trackers.close()
