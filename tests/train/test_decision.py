"""Claims about `peagle train` before its first step: refusals in one line, what is chosen, what it starts from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from peagle.cli.main import main
from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.errors import ConfigError, DataError, DiskError, PeagleError, StoreError, TrainingError, VerifierError
from peagle.hidden_states.config import ExtractConfig
from peagle.hidden_states.extract import extract
from peagle.train.config import FitConfig, TrainConfig
from peagle.train.decision import Decision, decide
from peagle.train.run import checkpoint_bytes, train
from tests.fakes import tiny_verifier
from tests.train.files import Files, make_files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("files"))


def refused(files: Files, tmp_path: Path, error: type[PeagleError], match: str, **values: object) -> None:
    """Nothing is loaded when a run is refused, and nothing is written but the lock that keeps others out."""
    with pytest.raises(error, match=match) as raised:
        train(files.config(tmp_path / "save", **values))
    assert "\n" not in str(raised.value)
    assert {path.name for path in (tmp_path / "save").glob("*")} <= {".lock"}


def test_a_folder_that_is_not_prepared_data_is_refused(files, tmp_path):
    refused(files, tmp_path, DataError, "not prepared rows", data_path=files.verifier)
    refused(files, tmp_path, DataError, "no such folder", data_path=tmp_path / "nowhere")


def test_a_folder_without_a_store_is_refused(files, tmp_path):
    refused(files, tmp_path, StoreError, "no hidden-state store", hidden_states_path=files.data)


def test_hidden_states_lie_below_the_data_unless_said(files, tmp_path):
    refused(files, tmp_path, StoreError, "data/hidden_states: no hidden-state store", hidden_states_path=None)


def test_other_layer_ids_than_the_store_s_are_refused(files, tmp_path):
    refused(files, tmp_path, StoreError, "the store has layers 2, 4, 5, --target-layer-ids asks for 1, 2, 3",
            target_layer_ids=(1, 2, 3))  # fmt: skip


@pytest.mark.parametrize(("ids", "match"), [((2, 2, 5), "given twice"), ((2, 4, 9), "layer id 9 does not exist")])
def test_layer_ids_that_collide_or_do_not_exist_are_refused(files, tmp_path, ids, match):
    refused(files, tmp_path, VerifierError, match, target_layer_ids=ids)


def test_another_verifier_than_the_store_s_is_refused(files, tmp_path):
    other = tiny_verifier(tmp_path / "other", seed=9)
    refused(files, tmp_path, StoreError, "made by other weights", verifier_name_or_path=str(other))
    wider = tiny_verifier(tmp_path / "wider", hidden_size=32)
    refused(files, tmp_path, StoreError, r"hidden_size 64\), .* has 32", verifier_name_or_path=str(wider))


def test_tensors_with_unusual_names_are_named_by_a_flag(files, tmp_path):
    odd = shutil.copytree(files.verifier, tmp_path / "odd")
    tensors = load_file(odd / "model.safetensors")
    tensors["adapter.last_norm.w"] = 3 * tensors["model.norm.weight"]
    save_file(tensors, odd / "model.safetensors", metadata={"format": "pt"})
    asked = {"verifier_name_or_path": str(odd), "hidden_states_path": tmp_path / "states"}
    extract(ExtractConfig.build({"preprocessed_data": files.data, "output": tmp_path / "states", "model": str(odd)}))
    refused(files, tmp_path, VerifierError, "no tensor named a.b", **asked, verifier_tensors=("norm=a.b",))
    named = {"verifier_tensors": ("norm=adapter.last_norm.w",)}
    runs = [
        train(files.config(tmp_path / name, **asked, **more, max_steps=1)) for name, more in (("a", {}), ("b", named))
    ]
    assert runs[0].steps[0].loss != pytest.approx(runs[1].steps[0].loss, rel=1e-3)


def test_a_verifier_without_tokenizer_is_refused(files, tmp_path):
    bare = shutil.copytree(files.verifier, tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    refused(
        files,
        tmp_path,
        VerifierError,
        "the folder has no tokenizer|no tokenizer in this folder",
        verifier_name_or_path=str(bare),
    )


def test_a_row_longer_than_a_pack_is_refused(files, tmp_path):
    refused(files, tmp_path, DataError, "--total-seq-len is 40; raise it, or prepare again", total_seq_len=40)


def test_a_mask_token_beyond_the_vocabulary_is_refused(files, tmp_path):
    refused(files, tmp_path, VerifierError, "--mask-token-id 5000 is no row", mask_token_id=5000)


@pytest.mark.parametrize(("size", "match"), [(0, "greater than or equal to 1"), (5000, "--draft-vocab-size 5000")])
def test_a_draft_vocabulary_of_no_possible_size_is_refused(files, tmp_path, size, match):
    with pytest.raises(ConfigError, match=match):
        train(files.config(tmp_path / "save", draft_vocab_size=size))


def test_rows_without_states_are_refused_or_skipped_as_told(files, tmp_path):
    more = make_files(tmp_path / "more", count=30)
    mixed = Files(files.verifier, more.data, files.states)
    refused(mixed, tmp_path, StoreError, r"no hidden states of 6 of 30 prepared rows .* --on-missing skip")
    decision = decide(mixed.config(tmp_path / "save", on_missing="skip"))
    assert decision.dropped == {"no hidden states in the store": 6}
    assert len(decision.train) + len(decision.held_out) == 24


def test_an_endpoint_that_nobody_will_ask_is_named(files, tmp_path):
    decision = decide(files.config(tmp_path, endpoint=("http://127.0.0.1:1",)))
    assert any("http://127.0.0.1:1 is not asked" in warning for warning in decision.warnings)


def test_data_that_was_prepared_again_in_another_way_is_refused(files, tmp_path):
    import datasets

    changed = shutil.copytree(files.data, tmp_path / "changed")
    table = datasets.load_from_disk(str(changed))

    def reworded(row):
        return {"input_ids": [row["input_ids"][0] + 1, *row["input_ids"][1:]]}

    table.map(reworded).save_to_disk(str(tmp_path / "again"))
    for path in changed.iterdir():
        if path.suffix == ".arrow" or path.name in ("state.json", "dataset_info.json"):
            path.unlink()
    shutil.copytree(tmp_path / "again", changed, dirs_exist_ok=True)
    refused(Files(files.verifier, changed, files.states), tmp_path, StoreError, "was stored with other tokens")


def test_a_damaged_shard_is_named_and_never_trained_on(files, tmp_path):
    damaged = shutil.copytree(files.states, tmp_path / "damaged")
    shard = next(damaged.glob("shard-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-40] ^= 255
    shard.write_bytes(content)
    with pytest.raises(StoreError, match=rf"{shard.name} holds other \w+ for row .*run the same `peagle extract`"):
        train(Files(files.verifier, files.data, damaged).config(tmp_path / "save"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 1 << 64), ("lr", float("inf")), ("lr", float("nan")), ("muon_lr", 1e9), ("weight_decay", float("inf"))],
)
def test_numbers_that_no_run_can_have_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        FitConfig.build({name: value})


def test_K07_a_disk_without_room_for_one_checkpoint_is_refused(files, tmp_path, monkeypatch):
    import peagle.train.run as run

    monkeypatch.setattr(run, "free_bytes", lambda path: 100_000)
    refused(files, tmp_path, DiskError, "a checkpoint takes 0.00 GB")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("size", [None, 64])
def test_K07_the_estimate_of_a_checkpoint_is_within_five_percent(files, tmp_path, kind, size):
    settings = files.config(tmp_path / "save", optimizer=kind, draft_vocab_size=size, num_layers=2)
    train(settings)
    taken = sum(path.stat().st_size for path in (tmp_path / "save" / "0").rglob("*") if path.is_file())
    loaded = drafter_checkpoint.load(str(tmp_path / "save" / "0"), torch.float32, torch.device("cpu"))
    assert checkpoint_bytes(settings, "float32", loaded) == pytest.approx(taken, rel=0.05)


def test_flags_that_contradict_each_other_are_refused():
    plain = {"verifier_name_or_path": "v", "data_path": "d", "save_path": "s"}
    with pytest.raises(ConfigError, match=r"--down-sample-ratio-min 0\.9 exceeds --down-sample-ratio 0\.7"):
        TrainConfig.build({**plain, "down_sample_ratio_min": 0.9})
    with pytest.raises(ConfigError, match="above 1 it counts whole epochs"):
        TrainConfig.build({**plain, "checkpoint_freq": 1.5})
    with pytest.raises(ConfigError, match="unknown key `num_layer`; did you mean `num_layers`"):
        TrainConfig.build({**plain, "num_layer": 3})


def test_the_command_line_prints_one_line_and_exits_with_2(files, tmp_path, capsys):
    status = main(["train", "--verifier-name-or-path", str(files.verifier), "--data-path", str(files.data),
                   "--hidden-states-path", str(files.data), "--save-path", str(tmp_path / "save")])  # fmt: skip
    assert status == 2
    message = capsys.readouterr().err
    assert message.startswith("peagle: error: ")
    assert message.count("\n") == 1
    assert main(["train", "--num-layerz", "3"]) == 2
    assert "--num-layerz" in capsys.readouterr().err


def test_the_published_recipe_s_command_is_understood(files, tmp_path, monkeypatch):
    """Step four of the recipe, flag for flag."""
    import peagle.train.run as run
    from peagle.train.loop import FitResult

    seen: list[TrainConfig] = []
    monkeypatch.setattr(run, "train", lambda config: seen.append(config) or FitResult())
    command = (
        "train --verifier-name-or-path Qwen/Qwen3-8B --data-path OUT --hidden-states-path OUT/hidden_states "
        "--save-path OUT/checkpoints --speculator-type peagle --num-layers 4 --num-depths 4 --down-sample-ratio 0.7 "
        "--down-sample-ratio-min 0.2 --no-norm-before-residual --mask-token-id 151669 --scheduler-type cosine "
        "--epochs 5 --lr 6e-4 --total-seq-len 4096"
    )
    assert main(command.split()) == 0
    assert (seen[0].lr, seen[0].epochs, seen[0].mask_token_id, seen[0].norm_before_residual) == (6e-4, 5, 151669, False)


def test_the_rate_that_a_run_took_is_written_where_none_was_asked_for(files, tmp_path):
    result = train(files.config(tmp_path / "save", lr=None, max_steps=1, scheduler_warmup_steps=0))
    written = yaml.safe_load((tmp_path / "save" / "run.yaml").read_text())
    assert written["train"]["lr"] == result.steps[0].lr == 0.384 / 64
    assert "| lr | 0.006 |" in (tmp_path / "save" / "checkpoint_last" / "README.md").read_text()


def test_a_run_of_the_former_defaults_goes_on_when_they_are_said(files, tmp_path):
    former = {"optimizer": "muon", "lr": 8e-4, "scheduler_type": "cosine", "depth_loss_decay": 1.0}
    train(files.config(tmp_path / "save", **former))
    with pytest.raises(PeagleError, match="optimizer: then muon, now adamw"):
        train(files.config(tmp_path / "save", lr=None, epochs=2))
    assert train(files.config(tmp_path / "save", **former, epochs=2)).progress.epoch == 2


def test_V02_the_draft_vocabulary_is_of_the_size_that_was_asked_for_each_time(files, tmp_path):
    sizes = []
    for asked in (64, 100, None):
        decision = decide(files.config(tmp_path, draft_vocab_size=asked))
        sizes.append((decision.drafter["draft_vocab_size"], decision.draft_ids and len(decision.draft_ids)))
    assert sizes == [(64, 64), (100, 100), (272, None)]


def test_V02_a_checkpoint_of_another_vocabulary_is_not_continued(files, tmp_path):
    train(files.config(tmp_path / "save", draft_vocab_size=64))
    with pytest.raises(PeagleError, match="draft_vocab_size: then 64, now 100"):
        train(files.config(tmp_path / "save", draft_vocab_size=100))
    train(files.config(tmp_path / "save", draft_vocab_size=100, resume_from_checkpoint=False))
    tensors = load_file(tmp_path / "save" / "checkpoint_best" / "model.safetensors")
    assert tensors["d2t"].shape == (100,)
    assert tensors["lm_head.weight"].shape[0] == 100
    assert int(tensors["t2d"].sum()) == 100


def test_a_run_records_what_it_was_made_of(files, tmp_path):
    import yaml

    train(files.config(tmp_path / "save", mask_token_id=0))
    manifest = json.loads((tmp_path / "save" / "manifest.json").read_text())
    assert manifest["rows_trained"] + manifest["rows_validated"] == 24
    assert manifest["checkpoint_best"] == "0"
    assert any("the drafter cannot tell" in warning for warning in manifest["warnings"])
    settings = yaml.safe_load((tmp_path / "save" / "run.yaml").read_text())["train"]
    assert settings["mask_token_id"] == 0
    assert settings["down_sample_ratio"] == 0.7


def test_E11_a_run_on_few_rows_says_so(files, tmp_path):
    decision = decide(files.config(tmp_path))
    assert any("only 19 rows with" in warning for warning in decision.warnings)
    train(files.config(tmp_path / "save"))
    state = json.loads((tmp_path / "save" / "0" / "training_state" / "state.json").read_text())
    assert state["num_rows"] == 19


def test_rank_0_s_decision_survives_json(files, tmp_path):
    from dataclasses import asdict

    decision = decide(files.config(tmp_path, draft_vocab_size=64))
    sent = json.dumps(asdict(decision))
    again = Decision(**json.loads(sent))
    assert json.dumps(asdict(again)) == sent
    assert again.store_spec() == decision.store_spec()
    assert again.drafter_config() == decision.drafter_config()
    assert again.fingerprint(files.config(tmp_path)) == decision.fingerprint(files.config(tmp_path))


def test_nothing_supervised_is_refused_before_anything_is_loaded(files, tmp_path):
    import datasets

    silent = shutil.copytree(files.data, tmp_path / "silent")
    table = datasets.load_from_disk(str(silent))
    table.map(lambda row: {"loss_mask": [0] * len(row["loss_mask"])}).save_to_disk(str(tmp_path / "again"))
    for path in silent.iterdir():
        if path.suffix == ".arrow" or path.name in ("state.json", "dataset_info.json"):
            path.unlink()
    shutil.copytree(tmp_path / "again", silent, dirs_exist_ok=True)
    refused(
        Files(files.verifier, silent, files.states), tmp_path, TrainingError, "0 of 24 rows have a supervised token"
    )
