"""The arithmetic of plans, against figures that were worked out by hand."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from peagle.pipeline import plan as show_plan
from peagle.pipeline.plan import (
    Rows,
    count_rows,
    drafter_parameters,
    estimate,
    slots_per_supervised,
    store_bytes,
    training_bytes,
    training_epochs,
    training_work,
)
from peagle.pipeline.recipe import find, read, stages
from peagle.pipeline.run import plan
from peagle.train.config import TrainConfig

RECIPE = read(find("qwen3-8b"), None, ())
SIZES = RECIPE.sizes


def test_a_qwen3_8b_drafter_has_the_parameters_that_the_docs_say():
    assert drafter_parameters(SIZES, 4, 151936) == (796_917_760, 672_661_504, 622_329_856)


def test_its_training_takes_what_the_scaling_guide_says():
    def gb(pack_tokens, **changes):
        return training_bytes(SIZES, 4, 151936, pack_tokens, **changes) / 1e9

    assert [round(gb(tokens)) for tokens in (4096, 8192, 20480, 65536)] == [35, 37, 43, 67]
    assert gb(8192) - gb(8192, optimizer="muon") == pytest.approx(3.2, abs=0.05)
    assert gb(8192) - gb(8192, train_embeddings="mask-token") == pytest.approx(10.0, abs=0.05)
    assert gb(8192) - gb(8192, num_shards=2) == pytest.approx(23.5 / 2, abs=0.05)
    assert gb(131_072, activation_checkpointing=True) == pytest.approx(48, abs=0.5)
    # a pruned head is held beside the verifier's
    assert training_bytes(SIZES, 4, 32000, 8192) / 1e9 == pytest.approx(gb(8192) + 2 * 32000 * 4096 / 1e9, abs=0.01)


def test_a_plan_takes_the_optimizer_that_training_takes():
    recipe = read(find("llama3.1-8b"), None, ())
    rows = Rows(20000, 20_000_000, 12_000_000, True)

    def memory(*changes):
        changed = read(find("llama3.1-8b"), None, changes)
        (train,) = [stage for stage in stages(changed) if stage.name == "train"]
        return estimate(train, changed, recipe.sizes, rows, None).memory_bytes

    assert memory() == memory(f"train.optimizer={TrainConfig.model_fields['optimizer'].default}")
    assert memory() > memory("train.optimizer=muon")
    assert memory() > memory("train.activation_checkpointing=true")
    assert memory() > memory("train.train_embeddings=mask-token")
    assert memory() > memory("train.fsdp_shard=true", "processes=2")


def test_states_of_six_million_tokens_take_177_gb():
    rows = Rows(5000, 6_000_000, 3_600_000, True)
    assert store_bytes(rows, 4096, 2) / 1e9 == pytest.approx(177, abs=0.5)


def test_slots_and_work_follow_the_ratios_down_to_the_floor():
    assert slots_per_supervised(4, 0.7, 0.2) == pytest.approx(2.533)
    assert slots_per_supervised(8, 0.5, 0.2) == pytest.approx(1 + 0.5 + 0.25 + 5 * 0.2)
    work = training_work(Rows(1, 1000, 600, True), SIZES, {"num_layers": 4, "num_depths": 4})
    assert work / 1000 == pytest.approx(6.85e9, rel=0.01)


def test_a_limit_of_steps_ends_the_epochs_and_their_checkpoints():
    rows = Rows(1000, 170_000, 90_000, True)
    settings = {"epochs": 100, "max_steps": 560, "total_seq_len": 1024}
    assert training_epochs(rows, settings, 1) == pytest.approx(3.37, abs=0.01)
    assert training_epochs(rows, {**settings, "gradient_accumulation_steps": 2}, 2) == pytest.approx(13.5, abs=0.01)
    assert training_epochs(rows, {"epochs": 3}, 1) == 3
    demo = read(find("demo"), None, ())
    (train,) = [stage for stage in stages(demo) if stage.name == "train"]
    found = estimate(train, demo, demo.sizes or show_plan.sizes_of(demo), rows, 50e9)
    assert 60 < found.seconds < 600
    assert found.disk_bytes < 100e6


def test_a_narrow_terminal_gets_no_words_cut_in_two(capsys):
    recipe = read(find("qwen3-8b"), None, ())
    steps = plan(recipe, None)
    found, rows = show_plan.estimates(recipe, steps)
    for width in (80, 120):
        console = Console(width=width, record=True)
        console.print(show_plan.table(recipe, steps, found, rows, width))
        text = console.export_text()
        assert ("checkpoints/checkpoint_best" in text) == (width == 120)
        assert all(step.stage.name in text for step in steps)


def test_rows_are_assumed_until_they_are_counted(tmp_path):
    recipe = read(find("qwen3-8b"), tmp_path, ())
    assumed = count_rows(recipe)
    assert (assumed.num_rows, assumed.is_counted) == (5000, False)
    (tmp_path / "prepared").mkdir()
    summary = {"rows": 4900, "tokens": 6_000_000, "supervised_tokens": 3_600_000}
    (tmp_path / "prepared" / "summary.json").write_text(json.dumps(summary))
    assert count_rows(recipe) == Rows(4900, 6_000_000, 3_600_000, True)


def test_a_plan_says_disk_memory_and_time_or_leaves_them_open(tmp_path, capsys):
    recipe = read(find("qwen3-8b"), tmp_path, ())
    steps = plan(recipe, None)
    found, rows = show_plan.estimates(recipe, steps)
    by_name = dict(zip([step.stage.name for step in steps], found))
    assert by_name["extract"].disk_bytes > 1e11
    assert by_name["train"].memory_bytes > 25e9
    assert by_name["train"].seconds > 0
    shown = show_plan.as_json(recipe, steps, found, rows)
    assert [stage["stage"] for stage in shown["stages"]] == [step.stage.name for step in steps]
    json.dumps(shown)
    unknown = estimate(stages(recipe)[1], recipe, None, None, None)
    assert (unknown.disk_bytes, unknown.memory_bytes, unknown.seconds) == (None, None, None)


def test_sizes_and_times_are_told_as_people_read_them():
    told = [show_plan.size(x) for x in (None, 1500.0, 2.5e6, 1.77e11, 3e12)]
    assert told == ["?", "2 kB", "2.5 MB", "177.0 GB", "3.0 TB"]
    assert show_plan.spell(None) == ""
    assert show_plan.spell(90.0) == "1m30s"
    assert show_plan.spell(3 * 86400.0) == "3.0 days"


def test_a_disk_that_is_too_small_is_said_in_the_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(show_plan, "free_bytes", lambda path: 10)
    recipe = read(find("qwen3-8b"), tmp_path, ())
    steps = plan(recipe, None)
    found, rows = show_plan.estimates(recipe, steps)
    assert "TOO SMALL" in show_plan.caption(recipe, steps, found, rows)
