"""A drafter that starts from its verifier's last layers, and verifiers that cannot lend theirs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle.drafter.model_config import config_for
from peagle.drafter.network import Drafter
from peagle.train.start import start_from_verifier
from peagle.verifier.model_config import load_verifier_config
from tests import fakes


def new_drafter(folder, **changes) -> Drafter:
    values = {
        "speculators_model_type": "peagle",
        "layer_type": None,
        "num_layers": 2,
        "intermediate_size": None,
        "num_speculative_tokens": 4,
        "aux_layer_ids": (2, 4, 5),
        "draft_vocab_size": None,
        "mask_token_id": 3,
        "norm_before_residual": False,
        "norm_before_fc": False,
    }
    torch.manual_seed(0)
    return Drafter(config_for(load_verifier_config(str(folder), False), **{**values, **changes}))


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_the_last_layers_are_the_verifiers(tmp_path, family):
    fakes.tiny_verifier(tmp_path / "v", family, num_layers=8)
    drafter = new_drafter(tmp_path / "v")
    before = drafter.layers[0].self_attn.q_proj.weight[:, : drafter.config.hidden_size].clone()
    assert start_from_verifier(drafter, load_verifier_config(str(tmp_path / "v"), False)) is None
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "v").model.layers
    for ours, index in ((0, 6), (1, 7)):
        for leaf in ("mlp.down_proj", "mlp.gate_proj", "self_attn.o_proj", "post_attention_layernorm"):
            expected = theirs[index].get_submodule(leaf).weight
            assert torch.equal(drafter.layers[ours].get_submodule(leaf).weight, expected), (ours, leaf)
    hidden = drafter.config.hidden_size
    first = drafter.layers[0].self_attn.q_proj.weight
    assert torch.equal(first[:, hidden:], theirs[6].self_attn.q_proj.weight)
    assert torch.equal(first[:, :hidden], before)
    assert torch.equal(drafter.layers[0].hidden_norm.weight, theirs[6].input_layernorm.weight)
    assert torch.equal(drafter.layers[1].input_layernorm.weight, theirs[7].input_layernorm.weight)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma3_text", {}, "another kind"),
        ("qwen3_moe", {}, "another kind"),
        ("qwen3", {"intermediate_size": 48}, r"mlp.*is \["),
        ("qwen3", {"num_layers": 9}, "8 layers only"),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_changes(tmp_path, family, changes, reason):
    import re

    fakes.tiny_verifier(tmp_path / "v", family, num_layers=8)
    drafter = new_drafter(tmp_path / "v", **changes)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    found = start_from_verifier(drafter, load_verifier_config(str(tmp_path / "v"), False))
    assert found is not None
    assert re.search(reason, found)
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in before.items())
