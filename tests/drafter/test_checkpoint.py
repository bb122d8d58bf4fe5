"""Checkpoints: strict on the way in, whole on the way out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.drafter.checkpoint import find, load, save, write_into
from peagle.errors import CheckpointError, DiskError
from tests.train.test_step import make_drafter

CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path):
    drafter = make_drafter("qwen3", 10)
    ids = torch.arange(0, 40, 4)
    drafter.d2t.copy_(ids - torch.arange(10))
    drafter.t2d[ids] = True
    save(drafter.float(), tmp_path / "checkpoint", "float32")
    return drafter, tmp_path / "checkpoint"


def test_what_is_saved_is_loaded(saved):
    drafter, folder = saved
    again = load(str(folder), torch.float32, CPU)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_V04_draft_ids_map_as_in_training(saved):
    _, folder = saved
    assert load(str(folder), torch.float32, CPU).to_verifier_ids(torch.arange(10)).tolist() == list(range(0, 40, 4))
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor d2t"):
        load(str(folder), torch.float32, CPU)


def test_X07_every_floating_tensor_bears_the_stated_type(saved, tmp_path):
    drafter, _ = saved
    save(drafter, tmp_path / "half", "bfloat16")
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.dtype.is_floating_point} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["mask_hidden", "fc.weight", "embed_tokens.weight", "layers.0.hidden_norm.weight"])
def test_X02_a_missing_tensor_is_named_not_made_up(saved, name):
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        load(str(folder), torch.float32, CPU)


def test_misshapen_left_over_and_cut_files_are_named(saved):
    _, folder = saved
    path = folder / "model.safetensors"
    good = path.read_bytes()
    tensors = load_file(path)
    save_file({**tensors, "fc.weight": torch.zeros(3, 3)}, path)
    with pytest.raises(CheckpointError, match=r"fc.weight is \[3, 3\]"):
        load(str(folder), torch.float32, CPU)
    save_file({**tensors, "extra.weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"unknown tensor extra\.weight"):
        load(str(folder), torch.float32, CPU)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        load(str(folder), torch.float32, CPU)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_with_nan_or_infinity_is_not_loaded(saved, value):
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    tensors["mask_hidden"].view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="mask_hidden holds NaN or infinity"):
        load(str(folder), torch.float32, CPU)


def test_numbers_that_are_no_weights_are_not_written(saved, tmp_path):
    drafter, _ = saved
    tensors = {**drafter.state_dict(), "fc.weight": torch.zeros(2, 2, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match=r"fc\.weight is torch\.int8, expected floating"):
        write_into(tmp_path, drafter.config, tensors, "float32")


def test_nan_is_never_saved_and_the_older_checkpoint_stays(saved):
    drafter, folder = saved
    before = (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"fc\.weight holds NaN"):
        save(drafter, folder, "float32")
    assert (folder / "model.safetensors").read_bytes() == before
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint"]


def test_a_full_disk_leaves_the_older_checkpoint(saved, monkeypatch):
    drafter, folder = saved
    before = (folder / "model.safetensors").read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peagle.drafter.checkpoint.save_file", full)
    with pytest.raises(DiskError, match="no space left"):
        save(drafter, folder, "float32")
    assert (folder / "model.safetensors").read_bytes() == before


def test_folders_that_are_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config.json"):
        find(str(tmp_path))
    with pytest.raises(CheckpointError, match="no such folder"):
        find(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load(str(tmp_path), torch.float32, CPU)
