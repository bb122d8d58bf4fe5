"""The model card says what the drafter is, how to serve it and how good it is, and nothing about the machine."""

from __future__ import annotations

import yaml

from peagle.drafter.card import NOT_MEASURED, card, is_hub_id, public_name, refresh_card, run_facts, write_card
from peagle.drafter.model_config import DrafterConfig
from peagle.embedded import NAMES
from tests.fakes import drafter_config

MEASURED = "| Pooled | 80.0 | 50.0 | 2.300 |"


def config(verifier: str, **changes) -> DrafterConfig:
    values = {"hidden_size": 64, "vocab_size": 300, "aux_layer_ids": (2, 4, 5), "num_speculative_tokens": 4}
    return drafter_config(**{**values, "head_dim": 16, "verifier": verifier, **changes})


def metadata(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_a_hub_verifier_is_the_base_model_and_the_table_is_there():
    text = card(config("Qwen/Qwen3-8B"), {"settings": {"lr": 0.001, "epochs": 3}}, MEASURED, "apache-2.0")
    assert metadata(text)["base_model"] == "Qwen/Qwen3-8B"
    assert metadata(text)["license"] == "apache-2.0"
    assert "vllm serve OWNER/Qwen3-8B-P-EAGLE" in text
    assert MEASURED in text
    assert "| lr | 0.001 |" in text


def test_a_verifier_folder_leaves_only_its_name_in_the_card(tmp_path):
    folder = tmp_path / "secret" / "my-verifier"
    text = card(config(str(folder)), {"settings": {"data_path": str(tmp_path)}}, None, None)
    assert str(tmp_path) not in text
    assert "`my-verifier`" in text
    assert "base_model" not in metadata(text)
    assert "Not measured yet" in text


def test_a_pruned_vocabulary_and_eagle3_are_told():
    text = card(config("a/b", draft_vocab_size=100), {}, None, None)
    assert "100 of 300" in text
    text = card(config("a/b", speculators_model_type="eagle3", mask_token_id=None), {}, None, None)
    assert "one by one" in text
    assert "eagle-3" in metadata(text)["tags"]


def test_what_is_a_hub_id(tmp_path):
    assert is_hub_id("Qwen/Qwen3-8B")
    assert not is_hub_id("/models/qwen")
    assert not is_hub_id("./a/b")
    assert public_name("/models/qwen") == "qwen"
    assert public_name(str(NAMES["embedded:verifier"])) == "embedded:verifier"


def test_settings_of_the_other_kind_of_drafter_are_left_out():
    settings = {"num_depths": 4, "down_sample_ratio": 0.7, "ttt_steps": 3, "lr": 0.5}
    parallel = card(config("a/b"), {"settings": {**settings, "speculator_type": "peagle"}}, None, None)
    assert "| num_depths | 4 |" in parallel
    assert "ttt_steps" not in parallel
    chain = card(config("a/b"), {"settings": {**settings, "speculator_type": "eagle3"}}, None, None)
    assert "| ttt_steps | 3 |" in chain
    assert "down_sample_ratio" not in chain


def test_the_run_beside_a_checkpoint_is_found_through_its_link(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "checkpoint_best").symlink_to("0")
    (tmp_path / "run.yaml").write_text("train:\n  lr: 0.5\n")
    (tmp_path / "manifest.json").write_text('{"stage": "train", "versions": {"torch": "2.13.0"}}')
    facts = run_facts(tmp_path / "checkpoint_best")
    assert facts["settings"] == {"lr": 0.5}
    write_card(tmp_path / "0", config("a/b"), facts, None, None)
    assert "| torch | 2.13.0 |" in (tmp_path / "0" / "README.md").read_text()
    assert run_facts(tmp_path) != {}
    (tmp_path / "elsewhere").mkdir()
    assert run_facts(tmp_path / "elsewhere" / "x") == {}


def test_a_refreshed_card_gains_the_run_and_the_table_and_keeps_them(tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  lr: 0.5\n")
    folder = tmp_path / "0"
    folder.mkdir()
    write_card(folder, config("a/b"), {}, None, None)
    refresh_card(folder, config("a/b"), None)
    assert "| lr | 0.5 |" in (folder / "README.md").read_text()
    assert NOT_MEASURED in (folder / "README.md").read_text()
    refresh_card(folder, config("a/b"), MEASURED)
    refresh_card(folder, config("a/b"), None)
    assert MEASURED in (folder / "README.md").read_text()
    refresh_card(tmp_path / "gone" / "deeper", config("a/b"), None)
