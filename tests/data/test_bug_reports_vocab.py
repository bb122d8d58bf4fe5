"""Bug reports V01 to V08: the pruned draft vocabulary, through prepare, extract, train and check."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.cli.main import main
from peagle.data.draft_vocab import choose_vocab
from peagle.data.prepared import load_prepared
from tests.data.toys import chat, write_lines
from tests.fakes import byte_tokenizer, tiny_verifier

VOCAB = 272  # of the tiny verifier; its tokenizer has 259


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier, prepared rows with few distinct tokens, and their states."""
    folder = tmp_path_factory.mktemp("road")
    verifier = tiny_verifier(folder / "verifier")
    data = write_lines(folder / "d.jsonl", [chat(f"question {i}", f"the answer is {i % 10} ok") for i in range(12)])
    assert main(["prepare", "--model", str(verifier), "--data", str(data), "--output", str(folder / "data")]) == 0
    store = ["--preprocessed-data", str(folder / "data"), "--output", str(folder / "data" / "hidden_states")]
    assert main(["extract", *store]) == 0
    return folder


def train_arguments(road: Path, save_path: Path, *flags: str) -> list[str]:
    return [
        "train", "--verifier-name-or-path", str(road / "verifier"), "--data-path", str(road / "data"),
        "--save-path", str(save_path), "--num-layers", "1", "--num-depths", "2", "--max-steps", "1",
        "--epochs", "1", "--total-seq-len", "128", "--device", "cpu", *flags,
    ]  # fmt: skip


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    (file,) = checkpoint.glob("*.safetensors")
    return load_file(str(file))


def test_V01_the_draft_vocabulary_is_filled_up_refused_when_too_large_and_left_out_when_whole(road, tmp_path, capsys):
    prepared = load_prepared(road / "data")
    seen = set(torch.nonzero(prepared.frequencies).flatten().tolist())
    assert len(seen) < 100
    assert main(train_arguments(road, tmp_path / "a", "--draft-vocab-size", "100")) == 0
    tensors = weights_of(tmp_path / "a" / "checkpoint_best")
    ids = tensors["d2t"] + torch.arange(100)
    assert len(ids.unique()) == 100
    assert torch.equal(ids, ids.sort().values)
    assert seen <= set(ids.tolist())
    assert int(tensors["t2d"].sum()) == 100
    capsys.readouterr()
    assert main(train_arguments(road, tmp_path / "b", "--draft-vocab-size", "400")) == 2
    assert "--draft-vocab-size 400: expected 1 to 272" in capsys.readouterr().err
    assert main(train_arguments(road, tmp_path / "c", "--draft-vocab-size", str(VOCAB))) == 0
    tensors = weights_of(tmp_path / "c" / "checkpoint_best")
    assert tensors["lm_head.weight"].shape[0] == VOCAB
    assert not {"d2t", "t2d"} & set(tensors)


def test_V02_each_run_has_the_vocabulary_that_it_asks_for(road, tmp_path):
    sizes = {}
    for name, flags in (("64", ["--draft-vocab-size", "64"]), ("100", ["--draft-vocab-size", "100"]), ("unset", [])):
        save_path = tmp_path / "same folder"
        assert main(train_arguments(road, save_path, "--no-resume-from-checkpoint", *flags)) == 0
        sizes[name] = weights_of(save_path / "checkpoint_best")["lm_head.weight"].shape[0]
    assert sizes == {"64": 64, "100": 100, "unset": VOCAB}


def test_V04_the_tables_are_in_the_exported_weights_and_their_loss_is_found(road, tmp_path, capsys):
    assert main(train_arguments(road, tmp_path / "a", "--draft-vocab-size", "64")) == 0
    prepared = load_prepared(road / "data")
    eos = byte_tokenizer().eos_token_id
    wanted = choose_vocab(prepared, byte_tokenizer(), [eos], 64)
    checkpoint = tmp_path / "a" / "checkpoint_best"
    from peagle.drafter.checkpoint import load

    drafter = load(str(checkpoint), torch.float32, torch.device("cpu"))
    assert torch.equal(drafter.to_verifier_ids(torch.arange(64)), wanted.ids)
    assert torch.equal(drafter.t2d, wanted.t2d)
    assert main(["check", str(checkpoint)]) == 0
    (file,) = checkpoint.glob("*.safetensors")
    tensors = load_file(str(file))
    del tensors["d2t"]
    save_file(tensors, str(file))
    capsys.readouterr()
    assert main(["check", str(checkpoint)]) != 0
    captured = capsys.readouterr()
    assert "d2t" in captured.out + captured.err


@pytest.mark.slow
def test_V08_two_ranks_make_the_same_vocabulary_without_waiting_for_each_other(road, tmp_path):
    save_path = tmp_path / "ranks"
    arguments = train_arguments(road, save_path, "--draft-vocab-size", "64")
    # what an earlier tool may have left beside the data: nothing reads it, so no rank can find another table there
    (road / "data" / "d2t.npy").write_bytes(b"corrupt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "peagle"]
    started_s = time.monotonic()
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - started_s < 120  # 15 s on an idle machine
    wanted = choose_vocab(load_prepared(road / "data"), byte_tokenizer(), [byte_tokenizer().eos_token_id], 64)
    tensors = weights_of(save_path / "checkpoint_best")
    assert torch.equal(tensors["d2t"] + torch.arange(64), wanted.ids)
