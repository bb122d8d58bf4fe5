"""Verifiers whose files or configuration were misread without a word, and their neighbours."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from peagle.cli.main import main
from peagle.errors import VerifierError
from peagle.verifier.local import NotCausalError, TransformersVerifier, _load_model, decoder_of
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.weights import TensorFiles, fingerprint, load_head, same_weights, weights_are_here
from tests import fakes

IDS = fakes.random_row("r", 20, 2, 260, 3).input_ids


def load(folder: Path, **changes: object) -> TransformersVerifier:
    return TransformersVerifier(
        dataclasses.replace(load_verifier_config(str(folder), False), **changes), "float32", "cpu"
    )


@pytest.mark.parametrize(
    ("family", "changes", "scale"),
    [
        ("hyperclovax", {"logits_scaling": 0.25}, 0.25),
        ("hyperclovax", {"logits_scaling": 4.0}, 4.0),
        ("granite", {"logits_scaling": 0.25}, 4.0),
        ("granite", {"logits_scaling": 4.0}, 0.25),
    ],
)
def test_N06_logits_are_scaled_as_the_family_does_over_the_whole_vocabulary(
    tmp_path: Path, family: str, changes: dict[str, float], scale: float
) -> None:
    verifier = load(fakes.tiny_verifier(tmp_path, family, **changes))
    assert verifier.verifier_config.logit_scale == pytest.approx(scale)
    head = load_head(verifier.verifier_config)
    verifier.check_head(head, IDS)
    for wrong in (1 / scale, 1.0):  # the same best tokens
        with pytest.raises(VerifierError, match=f"does not know how the {family} family computes them"):
            verifier.check_head(dataclasses.replace(head, logit_scale=wrong), IDS)


@pytest.mark.parametrize("family", ["llama4_text", "llama4", "qwen3", "gemma3"])
def test_F07_a_decoder_has_the_layers_and_not_the_head(family: str) -> None:
    model = fakes.tiny_model(family)
    decoder, layers = decoder_of(model)
    assert decoder.get_output_embeddings() is None
    assert len(layers) == model.config.get_text_config().num_hidden_layers
    with torch.no_grad():
        states = decoder(input_ids=torch.tensor([IDS]), use_cache=False).last_hidden_state
        own = model(input_ids=torch.tensor([IDS])).logits
        torch.testing.assert_close(model.get_output_embeddings()(states), own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("paligemma", {}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 512}),
    ],
)
def test_F07_states_that_depend_on_later_tokens_are_refused_by_the_models_name(
    tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    with pytest.raises(NotCausalError, match=r"(PaliGemma|Gemma3).* is not causal: .*by \d+%"):
        load(fakes.tiny_verifier(tmp_path, family, **changes))


def test_F07_any_attention_that_is_not_causal_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the configuration says: the states show it."""
    folder = fakes.tiny_verifier(tmp_path, "llama")
    load(folder)
    import transformers.models.llama.modeling_llama as modeling

    monkeypatch.setattr(modeling, "create_causal_mask", lambda **given: torch.zeros(1, 1, 1, 1))
    with pytest.raises(NotCausalError, match="LlamaForCausalLM is not causal"):
        load(folder)


@pytest.mark.parametrize("family", fakes.TEXT_FAMILIES)
def test_bfloat16_rounding_is_not_taken_for_a_model_that_is_not_causal(tmp_path: Path, family: str) -> None:
    TransformersVerifier(
        load_verifier_config(str(fakes.tiny_verifier(tmp_path, family, dtype="bfloat16")), False), "bfloat16", "cpu"
    )


def width(folder: Path, family: str, **changes: object) -> int:
    values = fakes.tiny_config(family, **changes).to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if changes.get(k, v) is not ...}))
    return load_verifier_config(str(folder), False).intermediate_size


def test_F14_a_drafter_is_as_wide_as_what_a_token_passes_through(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 8 experts of 768 are its 6144; DeepSeek-V3: 8 + 1 of 2048 are its 18432."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    moe = fakes.tiny_config("qwen3_moe", **experts).to_dict()
    moe.pop("intermediate_size")
    (tmp_path / "config.json").write_text(json.dumps(moe))
    assert load_verifier_config(str(tmp_path), False).intermediate_size == 64
    assert width(tmp_path / "a", "qwen3_moe", num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768) == 6144
    shared = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    assert width(tmp_path / "b", "deepseek_v3", **shared, **latent, head_dim=8, num_key_value_heads=4) == 160
    assert width(tmp_path / "c", "qwen3", intermediate_size=96) == 96
    assert width(tmp_path / "d", "gpt_oss", intermediate_size=48) == 48  # an expert's: it is all that is said


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "cut in its header":
        path.write_bytes(content[:20])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4967215360\n")


@pytest.mark.parametrize("which", ["head", "layer"])
@pytest.mark.parametrize("how", ["cut", "cut in its header", "empty", "pointer"])
def test_N10_a_damaged_shard_is_named_in_one_line_whatever_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, which: str
) -> None:
    from tests.hidden_states.conftest import prepare_rows

    folder = fakes.tiny_verifier(tmp_path / "verifier", max_shard_size="60KB", tie_word_embeddings=False)
    data = prepare_rows(tmp_path / "prepared", folder, fakes.random_rows(2, 259, 0))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "one"}]}) + "\n")
    name = "lm_head.weight" if which == "head" else "model.layers.4.mlp.up_proj.weight"
    file = TensorFiles.open(str(folder)).file_of[name]
    damage(folder / file, how)
    capsys.readouterr()
    for command in (
        ["extract", "--preprocessed-data", str(data), "--output", str(tmp_path / "out")],
        ["regenerate", "--model", str(folder), "--data", str(prompts), "--output", str(tmp_path / "answers.jsonl")],
    ):
        assert main(command) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("peagle: error: ")
        assert file in last
        assert {"empty": "empty file", "pointer": "git lfs pull"}.get(how, "cannot be read") in last
    assert main(["doctor", str(folder), "--output", str(tmp_path / "d")]) == 1
    assert any("FAIL" in line and file in line for line in capsys.readouterr().out.splitlines())


def eos(folder: Path, wrapper: object, text: object, generation: object = None) -> tuple[int, ...]:
    values = fakes.tiny_config("gemma3").to_dict()
    values["eos_token_id"], values["text_config"]["eos_token_id"] = wrapper, text
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return load_verifier_config(str(folder), False).eos_token_ids


def test_N12_all_end_tokens_that_a_wrapper_and_its_text_part_name_are_read(tmp_path: Path) -> None:
    assert eos(tmp_path, [2, 5], 2) == (2, 5)
    assert eos(tmp_path, [5, 2], 2) == (5, 2)
    assert eos(tmp_path, 5, [2, 7]) == (5, 2, 7)
    assert eos(tmp_path, None, 3) == (3,)
    assert eos(tmp_path, [2, 5], 2, generation=[9, 2]) == (9, 2)


def test_fingerprints_agree_on_the_files_that_both_have(tmp_path: Path) -> None:
    folder = fakes.tiny_verifier(tmp_path, max_shard_size="60KB")
    verifier = load_verifier_config(str(folder), False)
    whole = fingerprint(verifier)
    assert same_weights(whole, whole)
    assert same_weights("", whole)
    assert same_weights(whole.split(".")[0], whole)  # as stores had it before
    assert not same_weights("f" * 64, whole)
    assert weights_are_here(verifier)
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].unlink()
    part = fingerprint(verifier, fetches=False)
    assert part.startswith("-.")
    assert same_weights(whole, part)
    assert not weights_are_here(verifier)
    with pytest.raises(VerifierError, match=rf"{shards[1].name} is missing"):
        fingerprint(verifier)
    content = bytearray(shards[0].read_bytes())
    content[-4:] = b"\1\2\3\4"
    shards[0].write_bytes(bytes(content))
    assert not same_weights(whole, fingerprint(verifier, fetches=False))


# ---- quantised verifiers in this process


def quantised(folder: Path) -> VerifierConfig:
    return dataclasses.replace(
        load_verifier_config(str(fakes.tiny_verifier(folder, "qwen3")), False), quantization="fp8"
    )


def test_a_quantised_verifier_goes_to_its_device_or_vllm_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    verifier = quantised(tmp_path)
    real, asked = importlib.util.find_spec, []

    class Asked(Exception):
        pass

    def from_pretrained(name: str, **given: object) -> None:
        asked.append(given)
        raise Asked

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "accelerate" else real(name))
    with pytest.raises(Asked):
        _load_model(verifier, torch.float32, torch.device("cuda", 1))
    assert asked[0]["device_map"] == {"": torch.device("cuda", 1)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else real(name))
    with pytest.raises(VerifierError, match=r"quantised \(fp8\): run it in vLLM .*or install accelerate"):
        _load_model(verifier, torch.float32, torch.device("cuda", 1))


def test_a_quantised_verifier_that_is_left_on_another_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    verifier = quantised(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    report = {"missing_keys": set(), "mismatched_keys": set()}
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, **given: (model, report))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(VerifierError, match=r"run it in vLLM .*: Transformers put parts of it on cpu, not meta"):
        _load_model(verifier, torch.float32, torch.device("meta"))


def test_a_frozen_head_is_given_a_copy_of_a_slice(tmp_path: Path) -> None:
    """On a slice of longer states a frozen bfloat16 head may take 35 times as long."""
    verifier = load(fakes.tiny_verifier(tmp_path, "qwen3"))
    seen = []
    handle = verifier.lm_head.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    with torch.no_grad():
        verifier.model(input_ids=torch.tensor([IDS]), logits_to_keep=1)
    handle.remove()
    assert seen[0].untyped_storage().nbytes() == seen[0].nbytes
