"""What is to be done, by contents; and the arithmetic of plans, against figures that were worked out by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from peagle import log
from peagle.pipeline import plan as plans
from peagle.pipeline.plan import (
    Fingerprints,
    RowSizes,
    count_rows,
    drafter_parameters,
    estimate,
    key_of,
    plan,
    store_bytes,
    training_bytes,
    training_epochs,
    training_work,
)
from peagle.pipeline.recipe import Stage, find, read, stages
from peagle.train.config import TrainConfig

RECIPE = read(find("qwen3-8b"), None, ())
SIZES = RECIPE.sizes


def training(**given) -> TrainConfig:
    paths = {"verifier_name_or_path": "v", "data_path": "d", "hidden_states_path": "h", "save_path": "s"}
    return TrainConfig.build({**paths, **given})


def test_equal_contents_have_equal_hashes_wherever_and_whenever(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "x.json").write_text("1")
    os.utime(tmp_path / "b" / "sub" / "x.json", (1, 1))
    prints = Fingerprints(tmp_path)
    assert prints.of(tmp_path / "a") == prints.of(tmp_path / "b")
    (tmp_path / "b" / "sub" / "x.json").write_text("2")
    assert prints.of(tmp_path / "a") != prints.of(tmp_path / "b")


def test_a_renamed_file_changes_the_folder_and_what_only_tells_about_a_run_does_not(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "x").write_text("1")
    prints = Fingerprints(tmp_path)
    before = prints.of(folder)
    (folder / "manifest.json").write_text("{}")
    (folder / ".lock").write_text("")
    assert prints.of(folder) == before
    (folder / "x").rename(folder / "y")
    assert prints.of(folder) != before


def test_nothing_there_has_no_hash(tmp_path):
    prints = Fingerprints(tmp_path)
    assert prints.of(tmp_path / "gone") is None
    (tmp_path / "empty").mkdir()
    assert prints.of(tmp_path / "empty") is None


def test_a_file_is_read_again_only_if_size_or_time_changed(tmp_path, monkeypatch):
    read = []
    real = plans.sha256_file
    monkeypatch.setattr(plans, "sha256_file", lambda path: read.append(path.name) or real(path))
    file = tmp_path / "big"
    file.write_text("1")
    first = Fingerprints(tmp_path)
    digest = first.of(file)
    first.save()
    assert Fingerprints(tmp_path).of(file) == digest
    assert read == ["big"]
    (tmp_path / ".hashes.json").write_text("not json")
    assert Fingerprints(tmp_path).of(file) == digest


def test_a_key_follows_settings_and_inputs_but_not_the_place_of_the_run():
    def key(root: str, seed: int, digest: str) -> str:
        config = training(seed=seed, save_path=f"{root}/c")
        stage = Stage(name="train", config=config, inputs=(), output=Path(root), uses_server=False, root=Path(root))
        return key_of(stage, {f"{root}/prepared": digest})

    assert key("/x/run", 1, "h") == key("/y", 1, "h")
    assert key("/x/run", 1, "h") != key("/x/run", 2, "h")
    assert key("/x/run", 1, "h") != key("/x/run", 1, "i")


def test_a_store_stands_for_itself_by_its_checksums(tmp_path):
    (tmp_path / "store.json").write_text("{}")
    (tmp_path / "shard-0.json").write_text('{"sha256": "a"}')
    (tmp_path / "shard-0.safetensors").write_bytes(b"large")
    prints = Fingerprints(tmp_path.parent)
    before = prints.of(tmp_path)
    (tmp_path / "shard-0.safetensors").write_bytes(b"never read")
    assert prints.of(tmp_path) == before
    (tmp_path / "shard-0.json").write_text('{"sha256": "bb"}')
    assert prints.of(tmp_path) != before


def test_a_qwen3_8b_drafter_has_the_parameters_that_the_docs_say():
    assert drafter_parameters(SIZES, 4, 151936, 3) == (796_917_760, 672_661_504, 622_329_856)


def test_its_training_takes_what_the_scaling_guide_says():
    def gb(pack_tokens, num_shards=1, **given):
        return training_bytes(SIZES, training(total_seq_len=pack_tokens, **given), num_shards) / 1e9

    assert [round(gb(tokens)) for tokens in (4096, 8192, 20480, 65536)] == [40, 42, 49, 73]
    assert gb(8192) - gb(8192, optimizer="muon") == pytest.approx(3.2, abs=0.05)
    assert gb(8192) - gb(8192, train_embeddings="mask-token") == pytest.approx(10.0, abs=0.05)
    assert gb(8192) - gb(8192, num_shards=2) == pytest.approx(23.5 / 2, abs=0.05)
    assert gb(131_072, activation_checkpointing=True) == pytest.approx(55, abs=0.5)
    # a pruned head is held beside the verifier's
    assert gb(8192, draft_vocab_size=32000) == pytest.approx(gb(8192) + 2 * 32000 * 4096 / 1e9, abs=0.01)


def test_training_of_four_layers_and_with_another_budget_takes_what_was_set():
    plain = training_bytes(SIZES, training(), 1)
    wider = training_bytes(SIZES, training(target_layer_ids=(2, 10, 18, 33)), 1)
    assert wider - plain == (2 + 8 + 8) * 4096**2  # of `fc`: weights, masters and gradients, AdamW's state
    assert training_bytes(SIZES, training(memory_budget=12.0), 1) - plain == 2e9


def test_an_eagle_3_recipe_is_estimated_by_its_own_steps():
    rows = RowSizes(20000, 20_000_000, 12_000_000, True)

    def seconds(num_steps):
        config = training(speculator_type="eagle3", ttt_steps=num_steps)
        here = Path("/x")
        stage = Stage(name="train", config=config, inputs=(), output=here, uses_server=False, root=here)
        return estimate(stage, RECIPE, SIZES, rows, 1e15).seconds

    assert seconds(2) < seconds(3) < seconds(6)


def test_a_plan_takes_the_optimizer_that_training_takes():
    recipe = read(find("llama3.1-8b"), None, ())
    rows = RowSizes(20000, 20_000_000, 12_000_000, True)

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
    rows = RowSizes(5000, 6_000_000, 3_600_000, True)
    assert store_bytes(rows, 4096, 2, 3) / 1e9 == pytest.approx(177, abs=0.5)


def test_slots_and_work_follow_the_ratios_down_to_the_floor():
    rows = RowSizes(1, 1000, 600, True)
    assert training_work(rows, SIZES, training()) / 1000 == pytest.approx(6.85e9, rel=0.01)

    def slots(**given) -> float:
        """Per supervised position, from what one more of them adds to the work of one depth."""
        layers, _, head = drafter_parameters(SIZES, 4, SIZES.vocab_size, 3)
        more = training_work(rows, SIZES, training(**given)) - training_work(rows, SIZES, training(num_depths=1))
        return 1 + more / (600 * (3 * layers + 2 * head))

    shallow = {"num_depths": 4, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}
    assert slots(**shallow) == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    deep = {"num_depths": 8, "down_sample_ratio": 0.5, "down_sample_ratio_min": 0.2}
    assert slots(**deep) == pytest.approx(1 + 0.5 + 0.25 + 5 * 0.2)


def test_a_limit_of_steps_ends_the_epochs_and_their_checkpoints():
    rows = RowSizes(1000, 170_000, 90_000, True)
    limited = {"epochs": 100, "max_steps": 560, "total_seq_len": 1024}
    assert training_epochs(rows, training(**limited), 1) == pytest.approx(3.37, abs=0.01)
    assert training_epochs(rows, training(**limited, gradient_accumulation_steps=2), 2) == pytest.approx(13.5, abs=0.01)
    assert training_epochs(rows, training(epochs=3), 1) == 3
    demo = read(find("demo"), None, ())
    (train,) = [stage for stage in stages(demo) if stage.name == "train"]
    found = estimate(train, demo, demo.sizes or plans.sizes_of(demo), rows, 50e9)
    assert 60 < found.seconds < 600
    assert found.disk_bytes < 100e6


def test_a_narrow_terminal_gets_no_words_cut_in_two(capsys):
    recipe = read(find("qwen3-8b"), None, ())
    steps = plans.estimated(recipe, plan(recipe, None))
    for width in (80, 120):
        console = Console(width=width, record=True)
        console.print(plans.table(recipe, steps, width))
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
    assert count_rows(recipe) == RowSizes(4900, 6_000_000, 3_600_000, True)


def test_a_plan_says_disk_memory_and_time_or_leaves_them_open(tmp_path, capsys):
    recipe = read(find("qwen3-8b"), tmp_path, ())
    steps = plans.estimated(recipe, plan(recipe, None))
    by_name = {step.stage.name: step.estimate for step in steps}
    assert by_name["extract"].disk_bytes > 1e11
    assert by_name["train"].memory_bytes > 25e9
    assert by_name["train"].seconds > 0
    shown = plans.as_json(recipe, steps)
    assert [stage["stage"] for stage in shown["stages"]] == [step.stage.name for step in steps]
    json.dumps(shown)
    unknown = estimate(stages(recipe)[1], recipe, None, None, None)
    assert (unknown.disk_bytes, unknown.memory_bytes, unknown.seconds) == (None, None, None)


def test_sizes_and_times_are_shown_as_people_read_them():
    shown = [log.size(x) for x in (None, 1500.0, 2.5e6, 1.77e11, 3e12)]
    assert shown == ["?", "2 kB", "2.5 MB", "177.0 GB", "3.0 TB"]
    assert plans.spell(None) == ""
    assert plans.spell(90.0) == "1m30s"
    assert plans.spell(3 * 86400.0) == "3.0 days"


def test_a_disk_that_is_too_small_is_said_in_the_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "free_bytes", lambda path: 10)
    recipe = read(find("qwen3-8b"), tmp_path, ())
    assert "TOO SMALL" in plans.caption(recipe, plans.estimated(recipe, plan(recipe, None)))
