"""Claims about ranks: N give what one gives, and none ever waits for one that will not come.

Two processes with gloo on the CPU. Tolerances: float64, so differences are the rounding of sums in another order.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from peagle.cli.main import main
from peagle.train.batches import Pack
from peagle.train.checkpoints import discover
from peagle.train.parallel import World
from tests.train.files import make_files
from tests.train.problem import ALONE, config, row, run
from tests.train.ranks import ROOT, Ended, found, run_ranks
from tests.train.worker import HELD_OUT, HOW, ROWS, fitted, keeper, weights

ROUNDING = 1e-9


def must_end_well(ended: Ended) -> None:
    assert ended.codes == [0, 0], "\n".join(ended.errors)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Everything that two ranks do well, in one start of two processes."""
    folder = tmp_path_factory.mktemp("two")
    for how, values in HOW.items():
        settings = config(max_steps=2, batch_size=2, scheduler_total_steps=9, epochs=4, **alone(values))
        run(settings, ROWS, HELD_OUT, keeper=keeper(folder / f"from-one-{how}", ALONE))
    must_end_well(run_ranks("equal,uneven,saved,moments,goes_on,signalled,data_fails", folder, 120))
    return folder


def alone(values: dict) -> dict:
    return {key: value for key, value in values.items() if key != "fsdp_shard"}


CASES = {
    "adamw-replicated": {"optimizer": "adamw"},
    "adamw-sharded": {"optimizer": "adamw"},
    "muon-replicated": {"optimizer": "muon"},
    "muon-sharded": {"optimizer": "muon"},
    "mask-token-replicated": {"train_embeddings": "mask-token"},
    "mask-token-sharded": {"train_embeddings": "mask-token"},
}


@pytest.mark.parametrize("name", CASES)
def test_R15_two_ranks_give_one_process_s_losses_and_weights(two, tmp_path, name):
    alone = fitted(ALONE, tmp_path, "alone", batch_size=3, **CASES[name])
    together = found("equal", two)[name]
    assert len(together["steps"]) == len(alone["steps"])
    for ours, theirs in zip(together["steps"], alone["steps"]):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=ROUNDING)
        assert ours["num_supervised"] == theirs["num_supervised"]
        assert ours["num_tokens"] == theirs["num_tokens"]
        assert ours["accuracy"] == theirs["accuracy"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-7)
    for ours, theirs in zip(together["validations"], alone["validations"]):
        assert ours["acceptance_length"] == theirs["acceptance_length"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=ROUNDING)
    reference = load_file(tmp_path / "alone.rank0.safetensors")
    for rank in (0, 1):
        assert largest_difference(load_file(two / f"{name}.rank{rank}.safetensors"), reference) < ROUNDING


@pytest.mark.parametrize("name", ["bfloat16-replicated", "bfloat16-sharded"])
def test_two_ranks_in_bfloat16_stay_equal_and_near_one_process(two, tmp_path, name):
    alone = fitted(ALONE, tmp_path, "alone", batch_size=3, dtype="bfloat16", optimizer="adamw")
    together = found("equal", two)[name]
    assert together["steps"][0]["loss"] == pytest.approx(alone["steps"][0]["loss"], rel=1e-6)
    assert together["steps"][-1]["loss"] == pytest.approx(alone["steps"][-1]["loss"], rel=0.05)
    first, second = (load_file(two / f"{name}.rank{rank}.safetensors") for rank in (0, 1))
    assert largest_difference(first, second) == 0


def test_R04_a_rank_with_nothing_supervised_and_one_pack_fewer_neither_hangs_nor_skews(two, monkeypatch):
    import peagle.train.loop as loop

    names = ["r0", "r1", "r2", "r3", "r4", "silent", "r5"]
    monkeypatch.setattr(loop, "packs", lambda lengths, *_: [Pack((name,), 30) for name in names if lengths])
    made = [*[row(f"r{i}", 30, 3, i) for i in range(6)], row("silent", 30, 5, 3, supervised=False)]
    model, result = run(config(total_seq_len=32, epochs=2, batch_size=2), made)
    together = [found("uneven", two, rank) for rank in (0, 1)]
    assert [one["progress"]["step"] for one in together] == [result.progress.step] * 2 == [8, 8]
    for rank in (0, 1):
        ours = load_file(two / f"uneven.rank{rank}.safetensors")
        assert largest_difference(ours, weights(model)) < ROUNDING


@pytest.mark.parametrize("how", ["replicated", "sharded"])
def test_K01_a_resumed_run_on_two_ranks_equals_an_unbroken_one(two, how):
    one = found("saved", two)[how]
    assert one["equal"]
    assert one["rates"][5:] == one["rates_resumed"]


def test_K05_every_moment_of_a_sharded_optimizer_survives_the_checkpoint(two):
    for rank in (0, 1):
        sums = found("moments", two, rank)
        assert len(sums["before"]) > 10
        assert sums["before"] == sums["after"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("origin", ["one", "two"])
def test_checkpoints_of_any_number_of_ranks_resume_on_any_other(two, how, origin):
    """One rank to two, or none to two; then on to one rank: the weights of one rank from the start."""
    where = two / f"from-{origin}-{how}"
    newest = discover(where)[-1].state
    assert (newest["world_size"], newest["progress"]["step"], newest["progress"]["packs_per_step"]) == (2, 4, 2)
    settings = config(max_steps=8, scheduler_total_steps=9, epochs=4, **alone(HOW[how]))
    model, result = run(settings, ROWS, HELD_OUT, keeper=keeper(where, ALONE))
    assert result.progress.step == 8
    whole, _ = run(settings.model_copy(update={"batch_size": 2}), ROWS, HELD_OUT)
    assert largest_difference(weights(model), weights(whole)) < ROUNDING


def test_a_signal_to_one_rank_stops_both_after_the_same_step(two):
    assert found("signalled", two, 0) == found("signalled", two, 1) == {"step": 2, "signal": signal.SIGTERM}
    assert (two / "signalled" / "interrupted" / "training_state" / "rng_rank1.safetensors").is_file()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two ranks whose collectives may take 10 s; rank 1 has no, then a broken table of frequencies."""
    folder = tmp_path_factory.mktemp("prepared")
    files = make_files(folder, count=12)
    for trouble in ("missing", "corrupt"):
        for rank in (0, 1):
            shutil.copytree(files.data, folder / f"{trouble}-{rank}" / "data")
        table = folder / f"{trouble}-1" / "data" / "token_frequencies.safetensors"
        table.unlink() if trouble == "missing" else table.write_bytes(b"rubbish")
    must_end_well(run_ranks("prepares,decides,fails", folder, 10))
    return folder


def test_R06_a_slow_preparation_does_not_time_the_other_rank_out(prepared):
    for rank in (0, 1):
        result = found("prepares", prepared, rank)
        assert (result["value"], result["sum"]) == (7, 2)
        assert result["seconds"] > 13


def test_R06_when_rank_0_fails_rank_1_ends_too_and_says_why(prepared):
    assert found("fails", prepared, 0)["error"] == "PeagleError: the disk of rank 0 is gone"
    assert found("fails", prepared, 1)["error"] == "TrainingError: rank 0 failed: the disk of rank 0 is gone"


def test_damaged_data_of_one_rank_stops_both(two):
    assert "another rank failed" in found("data_fails", two, 0)["error"]
    assert "target states are not those" in found("data_fails", two, 1)["error"]


def test_V08_rank_0_decides_the_draft_vocabulary_whatever_rank_1_can_read(prepared):
    first, second = (found("decides", prepared, rank) for rank in (0, 1))
    assert first == second
    assert [len(ids) for ids in first.values()] == [64, 64]


def test_torchrun_trains_with_the_command_line_and_resumes_alone(tmp_path):
    files = make_files(tmp_path / "files", count=16)
    flags = [
        "train", "--verifier-name-or-path", str(files.verifier), "--data-path", str(files.data),
        "--hidden-states-path", str(files.states), "--save-path", str(tmp_path / "save"), "--num-layers", "1",
        "--num-depths", "3", "--total-seq-len", "256", "--device", "cpu", "--quiet",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launcher, "-m", "peagle", *flags, "--epochs", "1"], check=True, env=env, cwd=ROOT, timeout=400)
    state = json.loads((tmp_path / "save" / "0" / "training_state" / "state.json").read_text())
    assert state["world_size"] == 2
    assert main([*flags, "--epochs", "2"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()]
    trained = [line["step"] for line in lines if line["kind"] == "train"]
    assert trained == list(range(1, len(trained) + 1))
    assert {line["epoch"] for line in lines} == {0, 1}


def test_a_world_of_one_needs_no_process_group():
    world = World(0, 1, torch.device("cpu"))
    assert world.sum(torch.ones(2)).tolist() == [1, 1]
    assert world.from_main("x", lambda: {"a": 1}) == {"a": 1}
    assert world.gather(torch.ones(1)) == [torch.ones(1)]
