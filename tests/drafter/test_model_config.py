"""config.json: what is written is what vLLM reads, and every verifier's shape gives a drafter or a reason."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter, inverse_frequencies
from peagle.errors import CheckpointError, ConfigError
from tests import fakes
from tests.fakes import drafter_for


@pytest.fixture
def qwen3(tmp_path):
    fakes.tiny_verifier(tmp_path / "verifier", "qwen3")
    return tmp_path / "verifier"


@pytest.mark.parametrize("kind", ["peagle", "eagle3"])
def test_config_json_round_trips(qwen3, kind):
    config = drafter_for(qwen3, speculators_model_type=kind, mask_token_id=3 if kind == "peagle" else None)
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json("bfloat16"))), "x") == config


def test_layer_config_is_a_plain_transformers_config(qwen3):
    layers = drafter_for(qwen3).layer_config()
    parsed = AutoConfig.for_model(**layers)
    assert parsed.model_type == "qwen3"
    assert parsed.head_dim == layers["head_dim"]
    assert "num_aux_hidden_states" not in layers


def test_X01_four_aux_layers_are_counted_where_vllm_reads_them(qwen3):
    config = drafter_for(qwen3, aux_layer_ids=(1, 2, 4, 5))
    assert config.layer_config()["num_aux_hidden_states"] == 4
    assert Drafter(config).fc.weight.shape == (config.hidden_size, 4 * config.hidden_size)
    three = Drafter(drafter_for(qwen3))
    assert three.fc.weight.shape == (config.hidden_size, 3 * config.hidden_size)


def test_F13_an_explicit_head_width_is_honoured(tmp_path):
    fakes.tiny_verifier(tmp_path / "v", "qwen3", hidden_size=64, num_attention_heads=4, head_dim=32)
    config = drafter_for(tmp_path / "v")
    drafter = Drafter(config)
    assert drafter.layers[0].self_attn.q_proj.out_features == 128
    assert config.layer_config()["head_dim"] == 32
    assert DrafterConfig.from_json(config.to_json("float32"), "x").head_dim == 32


@pytest.mark.parametrize("layout", ["old", "new"])
def test_F10_the_rope_base_is_the_verifiers_in_either_layout(tmp_path, layout):
    fakes.tiny_verifier(tmp_path / "v", "llama", hidden_size=128, num_attention_heads=2, head_dim=64)
    path = tmp_path / "v" / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    config.update(
        {"rope_theta": 1e6} if layout == "old" else {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    )
    path.write_text(json.dumps(config))
    drafter = Drafter(drafter_for(tmp_path / "v"))
    cos, _ = drafter.rotary(torch.tensor([1]), torch.float32)
    assert torch.arccos(cos[0, 0, 1]).item() == pytest.approx(0.649, abs=1e-3)


def test_F12_yarn_equals_transformers_and_unknown_types_are_refused(qwen3):
    base = drafter_for(qwen3)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    config = DrafterConfig.build({**base.model_dump(), "rope_parameters": yarn})
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=yarn,
        )
    )
    positions = torch.arange(50)
    cos, sin = Drafter(config).rotary(positions, torch.float32)
    their_cos, their_sin = theirs(torch.zeros(1, 1, 1), positions[None])
    torch.testing.assert_close(cos[:, 0], their_cos[0])
    torch.testing.assert_close(sin[:, 0], their_sin[0])
    assert not torch.allclose(cos, Drafter(base).rotary(positions, torch.float32)[0])
    with pytest.raises(ConfigError, match="rope_type 'foo'"):
        DrafterConfig.build({**base.model_dump(), "rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}})


def test_F06_the_verifiers_quantisation_is_not_inherited(tmp_path):
    fakes.tiny_verifier(tmp_path / "v", "llama")
    fakes.edit_config(tmp_path / "v", quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    written = json.dumps(drafter_for(tmp_path / "v").to_json("bfloat16"))
    assert "quantization" not in written.replace(str(tmp_path), "")


def test_missing_fields_are_named(qwen3):
    config = drafter_for(qwen3).to_json("float32")
    for field in ("eagle_aux_hidden_state_layer_ids", "mask_token_id", "transformer_layer_config", "draft_vocab_size"):
        broken = {key: value for key, value in config.items() if key != field}
        with pytest.raises(CheckpointError, match=field):
            DrafterConfig.from_json(broken, "config.json")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("transformer_layer_config", None, "of another kind than Speculators writes"),
        ("transformer_layer_config", [1], "of another kind than Speculators writes"),
        ("speculators_config", {"proposal_methods": [], "verifier": {}}, "empty or of another kind"),
        ("eagle_aux_hidden_state_layer_ids", 5, "of another kind"),
        ("draft_vocab_size", "many", "valid integer"),
    ],
)
def test_a_field_of_another_kind_is_one_line(qwen3, field, value, message):
    config = drafter_for(qwen3).to_json("float32")
    with pytest.raises(CheckpointError, match=message) as caught:
        DrafterConfig.from_json({**config, field: value}, "config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta is 'x'"),
        ({"model_type": "llama", "num_attention_heads": 7, "num_key_value_heads": 1}, "no multiple of 7 heads"),
        ({"head_dim": 9}, "head_dim 9 is odd"),
    ],
)
def test_layers_that_nothing_can_build_are_one_line(qwen3, changes, message):
    config = drafter_for(qwen3).to_json("float32")
    config["transformer_layer_config"].update(changes)
    with pytest.raises(CheckpointError, match=message):
        DrafterConfig.from_json(config, "config.json")


def test_a_rope_that_lacks_what_its_type_needs_is_one_line(qwen3):
    config = drafter_for(qwen3).to_json("float32")
    config["transformer_layer_config"]["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": "x"}
    with pytest.raises(ConfigError, match="cannot be used"):
        inverse_frequencies(DrafterConfig.from_json(config, "config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10**6}, "less than or equal to 256"),
        ({"aux_layer_ids": (5, 4, 2)}, "distinct and ascending"),
        ({"aux_layer_ids": (2, 2, 4)}, "distinct and ascending"),
        ({"mask_token_id": 10**6}, "has no row"),
        ({"mask_token_id": None}, "needs a mask token id"),
        ({"draft_vocab_size": 10**6}, "exceeds the verifier's"),
    ],
)
def test_impossible_drafters_are_refused_in_one_line(qwen3, changes, message):
    with pytest.raises(ConfigError, match=message):
        drafter_for(qwen3, **changes)
