"""Claims about checkpoints: whole, servable, found again; a resumed run equals an uninterrupted one bit for bit."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.drafter.network import Drafter
from peagle.errors import CheckpointError, DiskError
from peagle.train.checkpoints import Keeper, discover, link, remove_all
from peagle.train.loop import FitResult
from peagle.train.sources import MemoryRows
from tests.train.problem import ALONE, config, drafter, rows, run

ROWS, HELD_OUT = rows(16), rows(4, seed=1)


def keeper(folder: Path, keep_last: int | None = None, **fingerprint: object) -> Keeper:
    return Keeper(
        save_path=folder,
        dtype="bfloat16",
        keep_last=keep_last,
        fingerprint={"seed": 42, **fingerprint},
        counts={"num_rows": len(ROWS)},
        world=ALONE,
    )


def go(folder: Path, model: Drafter | None = None, **values: object) -> tuple[Drafter, FitResult]:
    settings = config(**{"dtype": "float32", "epochs": 3, **values})
    return run(settings, ROWS, HELD_OUT, model, keeper=keeper(folder), metrics_path=folder / "metrics.jsonl")


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Send this process a SIGTERM while optimizer step `steps` runs."""
    import peagle.train.loop as loop

    real, taken = loop._Loop._step, []

    def stepping(self, ready, interrupt):
        taken.append(1)
        if len(taken) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, ready, interrupt)

    monkeypatch.setattr(loop._Loop, "_step", stepping)


def assert_bitwise(one: Drafter, other: Drafter) -> None:
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = {"seconds", "data_wait_s"}
    return [{key: value for key, value in line.items() if key not in times} for line in lines]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("after", [2, 5])
def test_K03_a_run_stopped_by_sigterm_and_resumed_equals_an_uninterrupted_one(tmp_path, monkeypatch, kind, after):
    whole, plain = go(tmp_path / "whole", optimizer=kind)
    with monkeypatch.context() as patch:
        interrupt_after(patch, after)
        _, stopped = go(tmp_path / "parts", optimizer=kind)
    assert stopped.signal_number == signal.SIGTERM
    assert stopped.progress.step == after
    assert (tmp_path / "parts" / "interrupted" / "model.safetensors").is_file()
    assert os.readlink(tmp_path / "parts" / "checkpoint_last") == "interrupted"
    resumed, result = go(tmp_path / "parts", optimizer=kind)
    assert result.signal_number is None
    assert result.progress.step == plain.progress.step
    assert_bitwise(whole, resumed)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    assert result.progress.best == plain.progress.best
    assert not (tmp_path / "parts" / "interrupted").exists()
    for name in ("0", "1", "2"):
        ours, theirs = (load_file(tmp_path / part / name / "model.safetensors") for part in ("whole", "parts"))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_signal_in_the_last_step_of_an_epoch_loses_no_checkpoint(tmp_path, monkeypatch):
    _, plain = go(tmp_path / "whole", epochs=2)
    per_epoch = plain.progress.step // 2
    with monkeypatch.context() as patch:
        interrupt_after(patch, per_epoch)
        go(tmp_path / "parts", epochs=2)
    go(tmp_path / "parts", epochs=2)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    assert (tmp_path / "parts" / "0").is_dir()


def test_K03_a_missing_random_state_is_a_warning(tmp_path, monkeypatch, caplog):
    logging.getLogger("peagle").propagate = True
    whole, _ = go(tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        go(tmp_path / "parts")
    (tmp_path / "parts" / "interrupted" / "training_state" / "rng_rank0.safetensors").unlink()
    resumed, _ = go(tmp_path / "parts")
    assert "random state starts anew" in caplog.text
    assert_bitwise(whole, resumed)


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    first, _ = go(tmp_path)
    again, result = go(tmp_path)
    assert result.steps == []
    assert_bitwise(first, again)


def test_a_finished_run_goes_on_when_more_epochs_are_asked_for(tmp_path):
    run(config(dtype="float32", epochs=1), ROWS, HELD_OUT, keeper=keeper(tmp_path))
    _, result = run(config(dtype="float32", epochs=2), ROWS, HELD_OUT, keeper=keeper(tmp_path))
    assert {step.epoch for step in result.steps} == {1}


def test_every_folder_is_servable_and_vllm_sees_only_the_drafter_at_its_root(tmp_path):
    go(tmp_path)
    for name in ("0", "1", "2", "checkpoint_best", "checkpoint_last"):
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == [
            "README.md",
            "config.json",
            "model.safetensors",
            "training_state",
        ]
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"
        drafter_checkpoint.load(str(tmp_path / name), torch.float32, torch.device("cpu"))
    assert not list(tmp_path.rglob("*.bin")) + list(tmp_path.rglob("*.pt"))


def test_K06_discovery_takes_the_newest_complete_folder_and_no_other(tmp_path):
    go(tmp_path)
    shutil.copytree(tmp_path / "2", tmp_path / "3")
    (tmp_path / "3" / "model.safetensors").unlink()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "2", tmp_path / ".4.123.tmp")
    found = discover(tmp_path)
    assert [one.folder.name for one in found] == ["0", "1", "2"]


@pytest.mark.parametrize("scores", [(3.0, 2.0, 1.0), (1.0, 2.0, 3.0)])
def test_K06_pruning_spares_the_best(tmp_path, monkeypatch, scores):
    import dataclasses

    import peagle.train.loop as loop

    real, left = loop._Loop._validate, list(scores)

    def scored(self, epoch):
        return dataclasses.replace(real(self, epoch), acceptance_length=left.pop(0), loss=len(left))

    monkeypatch.setattr(loop._Loop, "_validate", scored)
    run(config(dtype="float32", epochs=3), ROWS, HELD_OUT, keeper=keeper(tmp_path, keep_last=1))
    best = "0" if scores[0] == 3.0 else "2"
    assert sorted(p.name for p in tmp_path.iterdir() if not p.is_symlink()) == sorted({"2", best})
    assert os.readlink(tmp_path / "checkpoint_best") == best
    assert (tmp_path / "checkpoint_best" / "config.json").is_file()


def test_K06_without_validation_there_is_no_best_and_the_last_is_usable(tmp_path):
    run(config(dtype="float32", epochs=2), ROWS, [], keeper=keeper(tmp_path))
    assert not (tmp_path / "checkpoint_best").exists()
    drafter_checkpoint.load(str(tmp_path / "checkpoint_last"), torch.float32, torch.device("cpu"))


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(tmp_path):
    go(tmp_path)
    other = keeper(tmp_path, num_layers=4)
    with pytest.raises(CheckpointError, match="num_layers: then None, now 4"):
        run(config(dtype="float32"), ROWS, HELD_OUT, keeper=other)


def test_a_damaged_state_file_is_named(tmp_path):
    go(tmp_path)
    path = tmp_path / "2" / "training_state" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"2/training_state/optimizer.safetensors: missing, damaged or cut short"):
        go(tmp_path)


def test_R18_a_run_goes_on_with_the_verifier_it_began_with(tmp_path):
    def began(weights: str) -> Keeper:
        return keeper(tmp_path, verifier_weights=weights)

    run(config(dtype="float32", max_steps=2), ROWS, HELD_OUT, keeper=began("3f-one"))
    with pytest.raises(CheckpointError, match="verifier_weights: then 3f-one, now 77-two"):
        run(config(dtype="float32"), ROWS, HELD_OUT, keeper=began("77-two"))
    run(config(dtype="float32", max_steps=3), ROWS, HELD_OUT, keeper=began(""))  # a server's: not known here
    run(config(dtype="float32", max_steps=4), ROWS, HELD_OUT, keeper=keeper(tmp_path))


def test_K02_checkpoints_without_a_state_are_not_written_over(tmp_path):
    go(tmp_path)
    for path in tmp_path.glob("*/training_state/state.json"):
        path.unlink()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/model.safetensors")}
    with pytest.raises(CheckpointError, match=r"holds checkpoints .* but no training state to go on from"):
        go(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/model.safetensors")} == before
    assert set(remove_all(tmp_path)) >= {"0", "1"}
    go(tmp_path)


def test_K02_a_state_without_its_best_is_one_line(tmp_path):
    go(tmp_path)
    path = tmp_path / "2" / "training_state" / "state.json"
    state = json.loads(path.read_text())
    del state["progress"]["best"]
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"state.json: damaged \(KeyError: 'best'\)"):
        go(tmp_path)


def test_K02_the_best_link_never_dangles_or_leads_elsewhere(tmp_path, caplog):
    go(tmp_path)
    best = (tmp_path / "checkpoint_best").resolve()
    other = next(name for name in ("0", "1", "2") if name != best.name)
    # Killed between the folder and the link: the link still leads to an older one.
    link(tmp_path, "checkpoint_best", other)
    go(tmp_path)
    assert (tmp_path / "checkpoint_best").resolve() == best
    if best.name == "2":  # the newest holds the state
        return
    shutil.rmtree(best)
    go(tmp_path)
    assert f"the best checkpoint, {best.name}, is gone" in caplog.text
    assert not (tmp_path / "checkpoint_best").is_symlink()


def test_K07_a_full_disk_leaves_no_partial_folder_and_the_run_goes_on_later(tmp_path, monkeypatch):
    import errno

    import peagle.train.checkpoints as resume

    whole, _ = go(tmp_path / "whole")
    real, writes = resume.save_file, []

    def failing(tensors, path, *rest):
        writes.append(path)
        if len(writes) == 5:  # half-way through the second checkpoint
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(tensors, path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(resume, "save_file", failing)
        with pytest.raises(DiskError, match="no space left"):
            go(tmp_path / "parts")
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == [
        "0",
        "checkpoint_best",
        "checkpoint_last",
        "metrics.jsonl",
    ]
    resumed, _ = go(tmp_path / "parts")
    assert_bitwise(whole, resumed)


def test_links_become_copies_where_links_are_not_to_be_had(tmp_path, monkeypatch):
    go(tmp_path)
    monkeypatch.setattr(Path, "symlink_to", lambda *a, **k: (_ for _ in ()).throw(OSError("no links here")))
    link(tmp_path, "checkpoint_best", "1")
    assert not (tmp_path / "checkpoint_best").is_symlink()
    drafter_checkpoint.load(str(tmp_path / "checkpoint_best"), torch.float32, torch.device("cpu"))
    assert [one.folder.name for one in discover(tmp_path)] == ["0", "1", "2"]


def test_starting_anew_removes_the_checkpoints_of_before_and_nothing_else(tmp_path):
    go(tmp_path)
    (tmp_path / "mine").mkdir()
    assert sorted(remove_all(tmp_path)) == ["0", "1", "2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "mine"]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_run_may_go_on_with_another_batch_size(tmp_path, monkeypatch, batch):
    """Packs of an epoch do not depend on the batch size: each is still taken exactly once."""
    seen = []

    class Watched(MemoryRows):
        def read(self, row_id):
            seen.append(row_id)
            return super().read(row_id)

    import tests.train.problem as problem

    monkeypatch.setattr(problem, "MemoryRows", Watched)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        run(config(dtype="float32", epochs=1, batch_size=2), ROWS, keeper=keeper(tmp_path))
    before = len(seen)
    run(config(dtype="float32", epochs=1, batch_size=batch), ROWS, keeper=keeper(tmp_path))
    trained = json.loads((tmp_path / "0" / "training_state" / "state.json").read_text())
    assert trained["progress"]["epoch"] == 1
    assert set(seen[before:]) | set(seen[:before]) == {r.row.row_id for r in ROWS}


def test_mask_token_training_resumes_its_single_row(tmp_path, monkeypatch):
    whole, _ = go(tmp_path / "whole", train_embeddings="mask-token")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        go(tmp_path / "parts", train_embeddings="mask-token")
    resumed, _ = go(tmp_path / "parts", model=drafter(), train_embeddings="mask-token")
    assert_bitwise(whole, resumed)


def test_bfloat16_training_resumes_its_float32_masters(tmp_path, monkeypatch):
    whole, _ = run(config(dtype="bfloat16"), ROWS, keeper=keeper(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        run(config(dtype="bfloat16"), ROWS, keeper=keeper(tmp_path / "parts"))
    resumed, _ = run(config(dtype="bfloat16"), ROWS, keeper=keeper(tmp_path / "parts"))
    assert_bitwise(whole, resumed)
    masters = load_file(tmp_path / "parts" / "1" / "training_state" / "masters.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
