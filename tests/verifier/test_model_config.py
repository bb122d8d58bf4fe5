"""What is read from a verifier's configuration."""

import json

import pytest
import torch

from peagle.errors import VerifierError
from peagle.verifier.model_config import drafter_rope, load_verifier_config, resolve_aux_layer_ids
from tests import fakes


@pytest.fixture
def qwen3(tmp_path):
    return fakes.tiny_verifier(tmp_path / "verifier", "qwen3")


def config_with(folder, **changes):
    fakes.edit_config(folder, **changes)
    return load_verifier_config(str(folder), False)


def inverse_frequencies(rope, head_dim):
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ..., "rope_theta": 1e6},
        {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
    ids=["old", "old with null scaling", "new"],
)
def test_F10_rope_base_is_read_from_the_old_and_the_new_layout(qwen3, changes):
    verifier_config = config_with(qwen3, head_dim=64, **changes)
    assert verifier_config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert inverse_frequencies(verifier_config.rope_parameters, 64)[1].item() == pytest.approx(0.649, abs=1e-3)


def test_F10_rope_scaling_of_the_old_layout_keeps_its_type_and_keys(qwen3):
    scaling = {"type": "linear", "factor": 2.0}
    verifier_config = config_with(qwen3, rope_parameters=..., rope_theta=1e6, rope_scaling=scaling)
    assert verifier_config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}


@pytest.mark.parametrize("rope", [None, ..., {"rope_type": "default", "rope_theta": 10000.0}])
def test_F12_null_absent_and_default_rope_are_plain_rope(qwen3, rope):
    assert config_with(qwen3, rope_parameters=rope).rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_F12_yarn_reaches_the_drafter_as_yarn_with_all_its_keys(tmp_path):
    verifier_config = load_verifier_config(str(fakes.tiny_verifier(tmp_path, "gpt_oss")), False)
    assert verifier_config.rope_parameters["rope_type"] == "yarn"
    assert {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"} <= set(
        verifier_config.rope_parameters
    )


def test_F13_an_explicit_head_width_is_honoured(qwen3):
    assert config_with(qwen3, head_dim=32).head_dim == 32


def test_F13_without_head_dim_it_is_hidden_size_over_heads(tmp_path):
    folder = fakes.tiny_verifier(tmp_path, "qwen2")
    assert config_with(folder, head_dim=..., num_attention_heads=2).head_dim == 32


def test_F08_nested_sizes_other_activation_key_and_split_rope_are_read(tmp_path):
    verifier_config = load_verifier_config(str(fakes.tiny_verifier(tmp_path, "gemma3", hidden_size=32)), False)
    assert verifier_config.has_text_config
    assert verifier_config.hidden_size == 32
    assert verifier_config.hidden_act == "gelu_pytorch_tanh"
    assert verifier_config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_F08_a_gemma_4_style_configuration_is_read(tmp_path):
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size": 300,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    values = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    verifier_config = load_verifier_config(str(tmp_path), False)
    assert (verifier_config.hidden_size, verifier_config.num_layers, verifier_config.vocab_size) == (48, 6, 300)
    assert verifier_config.hidden_act == "gelu_pytorch_tanh"
    assert verifier_config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert verifier_config.embedding_scale == 48**0.5
    assert not verifier_config.norm_adds_one


def test_F06_a_quantisation_block_is_said_and_stays_out_of_everything_else(qwen3):
    plain = load_verifier_config(str(qwen3), False)
    verifier_config = config_with(qwen3, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    assert (plain.quantization, verifier_config.quantization) == (None, "fp8")
    assert {key for key, value in vars(verifier_config).items() if value != vars(plain)[key]} == {"quantization"}


def test_multimodal_rope_sections_and_partial_rotation_are_left_out():
    given = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.25}
    assert drafter_rope(given) == {"rope_type": "default", "rope_theta": 5e5}
    assert drafter_rope({"type": "mrope", "mrope_section": [1, 1, 1], "rope_theta": 1e4})["rope_type"] == "default"


def test_of_a_rope_per_layer_type_the_global_one_is_taken():
    parts = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6, "rope_type": "default"}}
    assert drafter_rope(parts)["rope_theta"] == 1e6
    assert drafter_rope({"local": {"rope_theta": 1e4}, "wide": {"rope_theta": 3e6}})["rope_theta"] == 3e6


def test_the_end_tokens_come_from_the_generation_configuration_first(qwen3):
    assert load_verifier_config(str(qwen3), False).eos_token_ids == (2,)
    (qwen3 / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_verifier_config(str(qwen3), False).eos_token_ids == (7, 9)


def test_a_configuration_without_dtype_gives_that_of_the_stored_tensors(tmp_path):
    folder = fakes.tiny_verifier(tmp_path, "llama", dtype="bfloat16")
    fakes.edit_config(folder, dtype=..., torch_dtype=...)
    assert load_verifier_config(str(folder), False).dtype == "bfloat16"


def test_granite_scales_are_read(tmp_path):
    verifier_config = load_verifier_config(str(fakes.tiny_verifier(tmp_path, "granite")), False)
    assert (verifier_config.embedding_scale, verifier_config.logit_scale) == (3.0, 0.25)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: folder / "nowhere" / "x", "no such folder"),
        (lambda folder: (folder / "config.json").unlink() or folder, "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{") and folder, "cannot be read"),
        (lambda folder: fakes.edit_config(folder, model_type="nonsense") or folder, "model type `nonsense`"),
        (lambda folder: folder / "model.safetensors", "found a file"),
        (lambda folder: fakes.edit_config(folder, vocab_size="many") or folder, "expected int, got str"),
        (lambda folder: fakes.edit_config(folder, num_hidden_layers=-1) or folder, "cannot be read|no usable"),
        (lambda folder: fakes.edit_config(folder, eos_token_id="x") or folder, "cannot be (used|read)"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "x"}') and folder,
            "a value that cannot be used",
        ),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_in_one_line(qwen3, prepare, message):
    with pytest.raises(VerifierError, match=message) as caught:
        load_verifier_config(str(prepare(qwen3)), False)
    assert "\n" not in str(caught.value)


def test_a_family_without_an_rms_norm_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "vocab_size": 100}))
    with pytest.raises(VerifierError, match="gpt_neox model has no RMS norm"):
        load_verifier_config(str(tmp_path), False)


def test_tensor_names_are_given_by_role(qwen3):
    names = load_verifier_config(str(qwen3), False, ["head=x.weight", "norm=n"]).tensor_names
    assert names == {"head": "x.weight", "norm": "n"}
    for wrong in ("tail=x", "head", "head="):
        with pytest.raises(VerifierError, match="roles are embedding, norm, head"):
            load_verifier_config(str(qwen3), False, [wrong])


def test_the_default_is_the_published_one():
    assert resolve_aux_layer_ids(36, None) == (2, 18, 33)
    assert resolve_aux_layer_ids(8, None) == (2, 4, 5)


@pytest.mark.parametrize("num_layers", range(1, 9))
def test_H18_shallow_verifiers_get_distinct_ids_in_range_or_a_message(num_layers):
    if num_layers < 7:
        with pytest.raises(VerifierError, match=f"verifier of {num_layers} layers.*--target-layer-ids"):
            resolve_aux_layer_ids(num_layers, None)
        return
    ids = resolve_aux_layer_ids(num_layers, None)
    assert list(ids) == sorted(set(ids))
    assert ids[0] >= 0
    assert ids[-1] <= num_layers


@pytest.mark.parametrize(
    ("asked", "message"), [((2, 2, 5), "given twice"), ((2, 4, 9), "9 does not exist"), ((-1,), "-1")]
)
def test_H18_users_lists_with_duplicates_or_out_of_range_are_refused(asked, message):
    with pytest.raises(VerifierError, match=message):
        resolve_aux_layer_ids(8, asked)


def test_H13_the_last_layer_is_a_valid_id_and_one_beyond_it_is_not():
    assert resolve_aux_layer_ids(8, (2, 4, 5, 8)) == (2, 4, 5, 8)
    with pytest.raises(VerifierError, match="9 does not exist"):
        resolve_aux_layer_ids(8, (2, 4, 5, 9))


def test_ids_in_any_order_come_out_ascending_as_states_are_laid_out():
    assert resolve_aux_layer_ids(8, (5, 2, 4)) == (2, 4, 5)
