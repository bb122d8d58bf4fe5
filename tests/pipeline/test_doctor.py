"""The doctor says in one line what would go wrong later, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.pipeline import doctor as doctor_module
from peagle.pipeline.config import DoctorConfig
from peagle.pipeline.doctor import Finding, doctor, examine
from peagle.verifier.model_config import load_verifier_config
from peagle.vllm.launch import InstalledVllm
from tests.fakes import BYTE_VOCABULARY, byte_tokenizer, tiny_verifier


def findings(**given) -> dict[str, Finding]:
    found = {}
    for finding in examine(DoctorConfig(**given)):
        assert "\n" not in finding.message
        found[finding.what] = finding
    return found


@pytest.fixture
def verifier(tmp_path):
    return tiny_verifier(tmp_path / "verifier", "qwen3", tokenizer=byte_tokenizer(), vocab_size=BYTE_VOCABULARY + 5)


def test_a_sound_verifier_passes_the_whole_pipeline(verifier, tmp_path):
    found = findings(model=str(verifier), num_layers=1, seq_length=400, max_samples=1000, output=tmp_path)
    assert [f for f in found.values() if f.state == "fail"] == []
    assert found["training"].message.startswith("one step: loss ")
    assert found["checkpoint"].state == "ok"
    assert "own choice on all 1 rows" in found["states"].message
    assert "unused embedding row" in found["mask token"].message
    assert "1,000 conversations like these" in found["store"].message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["verifier"]


def test_a_folder_without_a_tokenizer_is_named(verifier):
    for file in verifier.glob("*token*"):
        file.unlink()
    found = findings(model=str(verifier))
    assert found["tokenizer"].state == "fail"
    assert "training" not in found


def test_layer_ids_that_collide_are_named_before_anything_runs(tmp_path):
    shallow = tiny_verifier(tmp_path / "v", "llama", tokenizer=byte_tokenizer(), num_hidden_layers=4)
    found = findings(model=str(shallow))
    assert found["layer ids"].state == "fail"
    assert "states" not in found
    asked = findings(model=str(shallow), target_layer_ids=(1, 2, 3), num_layers=1, seq_length=400)
    assert asked["layer ids"].state == "ok"
    assert asked["training"].state == "ok"


def test_tokens_beyond_the_models_embedding_are_named(tmp_path):
    small = tiny_verifier(tmp_path / "v", "llama", tokenizer=byte_tokenizer(), vocab_size=BYTE_VOCABULARY - 2)
    found = findings(model=str(small))
    assert found["tokenizer"].state == "fail"
    assert (
        f"{BYTE_VOCABULARY} tokens, but the model's embedding has {BYTE_VOCABULARY - 2} rows"
        in found["tokenizer"].message
    )


def test_a_full_vocabulary_warns_that_the_mask_token_is_shared(tmp_path):
    full = tiny_verifier(tmp_path / "v", "llama", tokenizer=byte_tokenizer(), vocab_size=BYTE_VOCABULARY)
    found = findings(model=str(full), weights=False)
    assert found["mask token"].state == "warn"
    assert "--mask-token-id" in found["mask token"].message
    assert "--no-weights" in found["dry run"].message


def test_data_without_a_reply_fails_with_its_reason(verifier, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    found = findings(model=str(verifier), data=(str(data),))
    assert found["data"].state == "fail"
    assert "training" not in found


def test_rows_that_are_cut_and_dropped_are_told(verifier, tmp_path):
    data = tmp_path / "data.jsonl"
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 500}]}
    data.write_text(json.dumps(good) + "\n" + '{"messages": 3}\n')
    found = findings(model=str(verifier), data=(str(data),), seq_length=100, weights=False)
    assert "1 of 1 rows are cut at 100 tokens" in found["lengths"].message
    assert found["data"].state == "warn"
    assert "dropped: 1" in found["data"].message


def test_a_disk_that_is_too_small_for_the_states_is_a_failure(verifier, monkeypatch):
    monkeypatch.setattr("peagle.pipeline.doctor.free_bytes", lambda path: 1000)
    found = findings(model=str(verifier), max_samples=10**6, weights=False)
    assert found["store"].state == "fail"
    assert "take fewer, or another disk" in found["store"].message


def test_weights_that_do_not_fit_into_memory_are_not_run(verifier, monkeypatch):
    monkeypatch.setattr("peagle.pipeline.doctor.available_memory", lambda: 1e6)
    found = findings(model=str(verifier), seq_length=400)
    assert "memory" in found["dry run"].message
    assert "states" not in found


def test_what_vllm_lacks_for_a_family_is_said(tmp_path):
    package = tmp_path / "vllm" / "model_executor" / "models"
    package.mkdir(parents=True)
    (package / "registry.py").write_text(
        "_MODELS = {'Gemma3ForCausalLM': ('gemma3', 'Gemma3ForCausalLM'),\n"
        "    'Qwen3ForCausalLM': ('q', 'Qwen3ForCausalLM')}\n"
    )
    (package / "gemma3.py").write_text("class Gemma3ForCausalLM:\n    pass\n")
    (package / "q.py").write_text("class Qwen3ForCausalLM(SupportsEagle3):\n    pass\n")
    engine = InstalledVllm("0.32.0", "", tmp_path / "vllm")
    gemma = load_verifier_config(str(tiny_verifier(tmp_path / "g", "gemma3_text", tokenizer=byte_tokenizer())), False)
    qwen = load_verifier_config(str(tiny_verifier(tmp_path / "q", "qwen3", tokenizer=byte_tokenizer())), False)
    llama = load_verifier_config(str(tiny_verifier(tmp_path / "l", "llama", tokenizer=byte_tokenizer())), False)
    assert "TransformersForCausalLM" in doctor_module.serving(gemma, engine).message
    assert doctor_module.serving(qwen, engine).state == "ok"
    assert "does not list LlamaForCausalLM" in doctor_module.serving(llama, engine).message
    assert "not installed" in doctor_module.serving(llama, None).message


def test_an_old_package_and_an_old_vllm_are_failures(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    assert doctor_module._package("torch", (2, 9)).state == "fail"
    monkeypatch.setattr(doctor_module, "engine_here", lambda: InstalledVllm("0.11.0", "", None))
    assert "0.28 is the first" in doctor_module._vllm().message


def test_a_missing_model_is_one_line_and_status_1_and_json_is_json(tmp_path, capsys):
    assert doctor(DoctorConfig(model=str(tmp_path / "none"))) == 1
    assert "FAIL" in capsys.readouterr().out
    assert doctor(DoctorConfig(json_output=True)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"what", "state", "message"} == set(shown[0])


def test_memory_of_the_control_group_counts(tmp_path, monkeypatch):
    real = Path.read_text

    def read(path, *args, **given):
        values = {"/sys/fs/cgroup/memory.max": "3000", "/sys/fs/cgroup/memory.current": "1000"}
        return values.get(str(path)) or real(path, *args, **given)

    monkeypatch.setattr(Path, "read_text", read)
    assert doctor_module.available_memory() == 2000.0
