import pytest
import torch
from torch.nn import functional as F

from peagle.engine.cache import Ruler
from peagle.engine.drafting import FusedDrafter
from tests.engine.helpers import random_drafter
from tests.fakes import tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_type": "llama"},
        {"layer_type": "llama", "attention_bias": True, "num_key_value_heads": 1},
        {"norm_before_residual": True, "num_key_value_heads": 4},
        {"num_layers": 1, "head_dim": 8},
        {"rope_parameters": YARN},
    ],
)
@pytest.mark.parametrize("starts", [[0], [5], [5, 5], [2, 9, 4]])
def test_the_fused_layers_equal_the_network(changes: dict, starts: list[int]):
    model = tiny_model("qwen3", num_hidden_layers=4)
    drafter = random_drafter(model, scale=8.0, **changes)
    ruler = Ruler(32, 8, torch.float32, torch.device("cpu"))
    span = ruler.span(0, starts, 6)
    generator = torch.Generator().manual_seed(1)
    embeds, hidden = torch.randn(2, len(starts), 6, 64, generator=generator)
    groups = drafter.config.num_attention_heads // drafter.config.num_key_value_heads

    def attend_heads(layer, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)

    def attend(layer, q, k, v):
        return attend_heads(layer, *(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2).flatten(2)

    with torch.inference_mode():
        layers = FusedDrafter(drafter)
        layers.reserve(8)
        layers.reserve(32)
        found = layers.run(embeds, hidden, span, attend_heads)
        wanted = drafter.carried_pass(drafter.enter(embeds, hidden), span.positions, attend)
        logits = drafter.logits(drafter.norm(wanted))
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    assert (layers.logits(found) - logits).norm() <= 1e-5 * logits.norm()
