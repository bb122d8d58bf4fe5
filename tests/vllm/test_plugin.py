from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from peagle.errors import DiskError, EndpointError
from peagle.vllm.launch import PLUGIN_FOLDER
from peagle.vllm.plugin import peagle_vllm_writer as writer_module
from peagle.vllm.plugin.peagle_vllm_writer import SAFE_NAME, ByteBudget, StatesWriter, sweep_temporary
from peagle.vllm.states import StatesFolder


def writer(folder: Path) -> StatesWriter:
    return StatesWriter(str(folder), [2, 4, 5, 8], 2, 1 << 20)


def submit(made: StatesWriter, name: str, rows: torch.Tensor) -> None:
    made.budget.acquire(rows.numel() * rows.element_size())
    made.submit(name, list(range(rows.shape[0])), rows, None)


def test_files_appear_whole_and_say_their_layers(tmp_path: Path) -> None:
    made = writer(tmp_path)
    rows = torch.randn(5, 4, 8)
    submit(made, "a", rows)
    made.close()
    found = load_file(tmp_path / "a.safetensors")
    assert torch.equal(found["hidden_states"], rows)
    assert found["token_ids"].tolist() == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_library_reads_what_the_writer_wrote(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"hidden_states": torch.randn(5, 4, 6).to(dtype), "token_ids": torch.arange(5)}
    writer_module.write_safetensors(tensors, str(tmp_path / "ours"), {"layer_ids": "[2, 4]"})
    found = load_file(tmp_path / "ours")
    assert {name: (t.dtype, t.tolist()) for name, t in found.items()} == {
        name: (t.dtype, t.tolist()) for name, t in tensors.items()
    }
    with safe_open(tmp_path / "ours", "pt") as opened:
        assert opened.metadata() == {"layer_ids": "[2, 4]"}


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".a", "a.b", "-a", "a" * 129, "a\n", "ä", "a\x00"])
def test_unsafe_names_are_refused(name: str) -> None:
    assert SAFE_NAME.match(name) is None


def test_the_client_makes_safe_names() -> None:
    folder = StatesFolder(Path("/nowhere"), "any store, ../ even")
    assert SAFE_NAME.match(folder.new_name())
    assert folder.new_name() != StatesFolder(Path("/nowhere"), "any store, ../ even").new_name()


def test_a_failed_write_leaves_a_note_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module, "write_safetensors", full)
    made = writer(tmp_path / "shared" / "in-flight")
    submit(made, "a", torch.zeros(2, 4, 8))
    made.close()
    assert made.take_failures() == {"a": "OSError: [Errno 28] No space left on device"}
    assert made.take_failures() == {}
    with pytest.raises(DiskError, match="No space left"):
        StatesFolder(tmp_path / "shared", "x").read("a", 1.0)
    assert list((tmp_path / "shared" / "in-flight").iterdir()) == []


def test_a_discarded_file_never_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    save = writer_module.write_safetensors

    def slow(*args: object, **kwargs: object) -> None:
        held.wait(5)
        save(*args, **kwargs)

    made = writer(tmp_path)
    submit(made, "before", torch.zeros(2, 4, 8))
    while not (tmp_path / "before.safetensors").exists():
        time.sleep(0.01)
    made.discard("before")
    monkeypatch.setattr(writer_module, "write_safetensors", slow)
    submit(made, "queued", torch.zeros(2, 4, 8))
    made.discard("queued")
    made.discard("never heard of")
    held.set()
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_holds_a_bounded_number_of_bytes() -> None:
    budget = ByteBudget(100)
    budget.acquire(60)
    entered = threading.Event()
    waiting = threading.Thread(target=lambda: (budget.acquire(60), entered.set()))
    waiting.start()
    assert not entered.wait(0.1)
    budget.release(60)
    assert entered.wait(2)
    budget.release(60)
    budget.acquire(1000)  # larger than the limit: goes alone
    budget.release(1000)
    waiting.join()


def test_only_temporary_files_of_dead_writers_of_this_machine_are_swept(tmp_path: Path) -> None:
    mine = writer_module._writer_tag()
    host = mine.split("_")[0]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f".a.{mine}.tmp", f".b.{host}_{dead.pid}_1.tmp", ".c.elsewhere_1_1.tmp", "d.safetensors"):
        (tmp_path / name).touch()
    sweep_temporary(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([f".a.{mine}.tmp", ".c.elsewhere_1_1.tmp", "d.safetensors"])


def test_the_plugin_folder_holds_nothing_that_could_shadow_a_package() -> None:
    names = {path.name for path in PLUGIN_FOLDER.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "peagle_vllm_connector.py", "peagle_vllm_writer.py"}
    for name in ("peagle_vllm_connector", "peagle_vllm_writer"):
        assert "peagle." not in (PLUGIN_FOLDER / f"{name}.py").read_text().replace("peagle_vllm", "")


def test_a_damaged_file_is_said_so_and_removed(tmp_path: Path) -> None:
    folder = StatesFolder(tmp_path, "x")
    folder.path.mkdir()
    (folder.path / "a.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(EndpointError, match="damaged file from the server"):
        folder.read("a", 1.0)
    assert list(folder.path.iterdir()) == []
