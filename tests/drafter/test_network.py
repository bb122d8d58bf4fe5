"""The network against Transformers' own layers, and its hand-written operations against autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from peagle.kernels.cpu import rms_norm, swiglu
from tests.train.test_step import make_drafter


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_later_layers_and_head_equal_transformers(layer_type):
    """Layer 0 differs by design (it reads two inputs); all that follows is a stock decoder, so let one run it."""
    drafter = make_drafter(layer_type, 40, num_layers=3)
    config_type, model_type = (
        (LlamaConfig, LlamaForCausalLM) if layer_type == "llama" else (Qwen3Config, Qwen3ForCausalLM)
    )
    stock = model_type(config_type(**{**drafter.config.layer_config(), "num_hidden_layers": 2})).double()
    weights = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith("layers.") and not name.startswith("layers.0."):
            index = int(name.split(".")[1]) - 1
            weights[f"model.layers.{index}." + name.split(".", 2)[2]] = tensor
    weights |= {"model.norm.weight": drafter.norm.weight, "lm_head.weight": drafter.lm_head.weight}
    weights["model.embed_tokens.weight"] = drafter.embed_tokens.weight
    stock.load_state_dict(weights)
    entering = {}

    def attend(index, q, k, v):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True)
        return out.transpose(0, 1).flatten(1)

    original = drafter.layers[0].leave

    def watch(residual, attended):
        entering["hidden"] = original(residual, attended)
        return entering["hidden"]

    drafter.layers[0].leave = watch
    n = 12
    pairs = drafter.embed_pairs(torch.randint(0, 40, (n,)), torch.randn(n, 72, dtype=torch.float64))
    states = drafter.norm(drafter.carried_pass(drafter.enter(*pairs), torch.arange(n), attend))
    logits = drafter.logits(states)
    theirs = stock(inputs_embeds=entering["hidden"][None]).logits[0]
    # Transformers norms in float32 whatever the model is, hence not 1e-9.
    torch.testing.assert_close(logits, theirs, rtol=1e-5, atol=1e-5)


def test_one_mask_slot_stands_for_all_of_them():
    drafter = make_drafter("qwen3", 40)
    one, many = drafter.enter(*drafter.embed_masks(1)), drafter.enter(*drafter.embed_masks(5))
    for a, b in ((one.q, many.q), (one.k, many.k), (one.v, many.v), (one.residual, many.residual)):
        torch.testing.assert_close(a.expand_as(b), b)


def test_the_mask_tokens_embedding_row_is_trained():
    """A `padding_idx` would freeze it."""
    drafter = make_drafter("llama", 40)
    embeds, hidden = drafter.embed_masks(2)
    (embeds.sum() + hidden.sum()).backward()
    assert drafter.embed_tokens.weight.grad[7].abs().sum() > 0
    assert drafter.mask_hidden.grad.abs().sum() > 0


def test_R14_positions_reach_the_rotary_tables():
    drafter = make_drafter("llama", 40)
    near, _ = drafter.rotary(torch.arange(4), torch.float64)
    far, _ = drafter.rotary(torch.arange(10, 14), torch.float64)
    assert not torch.allclose(near, far)


def test_norm_and_swiglu_have_the_gradients_of_autograd():
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)  # noqa: E731
    x, weight = make(3, 5, 6), make(6)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, weight))
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (6,), weight, 1e-6))
    gate, up, down = make(8, 6), make(8, 6), make(6, 8)
    assert torch.autograd.gradcheck(swiglu, (x, gate, up, down))
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    torch.testing.assert_close(swiglu(x, gate, up, down), expected)


def test_half_precision_is_normed_in_float32():
    x = (torch.randn(4, 64) * 300).to(torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    exact = F.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    assert (rms_norm(x, weight, 1e-6).double() - exact).abs().max() < 0.02


def test_rotary_frequencies_are_never_rounded():
    """vLLM and training rotate in float32; a bfloat16 frequency is off by radians at a few thousand positions."""
    positions = torch.tensor([0, 1, 2048, 30_000])
    drafter = make_drafter("qwen3", 32)
    wanted = drafter.rotary(positions, torch.float32)
    for found, right in zip(drafter.to(torch.bfloat16).rotary(positions, torch.float32), wanted):
        torch.testing.assert_close(found, right, rtol=0, atol=0)
