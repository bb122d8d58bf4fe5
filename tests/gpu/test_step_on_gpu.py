"""The step on a CUDA device: flex compiled against sdpa, bfloat16 against float32, one compilation for all lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peagle.layout import full
from peagle.train.step import num_supervised, train_step
from tests.train.test_step import DEPTHS, SETTINGS, VOCAB, gradients, make_batch, make_drafter, make_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(dtype: torch.dtype, lengths: list[int], attention: str) -> tuple[float, dict[str, torch.Tensor]]:
    device = torch.device("cuda")
    # FlexAttention's kernels want heads of at least 16.
    drafter = make_drafter("qwen3", VOCAB, head_dim=16).to(device, dtype)
    head = make_head(VOCAB).to(device, dtype)
    batch = make_batch(lengths, 0, 3).to(device, dtype)
    layout = full(batch.is_supervised, batch.document_ids, DEPTHS)
    count = num_supervised(batch, layout)
    result = train_step(drafter, head, batch, layout, count, replace(SETTINGS, attention=attention))
    return result.loss_sum.sum().item() / count, gradients(drafter)


def test_flex_equals_sdpa_in_float32():
    loss, grads = on_gpu(torch.float32, [300, 150], "flex")
    expected_loss, expected = on_gpu(torch.float32, [300, 150], "sdpa")
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    for name, grad in grads.items():
        assert (grad - expected[name]).norm() <= 5e-3 * expected[name].norm(), name  # TF32 is off by default


def test_bfloat16_follows_float32():
    loss, _ = on_gpu(torch.bfloat16, [300, 150], "flex")
    expected, _ = on_gpu(torch.float32, [300, 150], "sdpa")
    assert loss == pytest.approx(expected, rel=0.05)


def test_R07_twenty_lengths_compile_at_most_three_times():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in range(200, 400, 10):
        on_gpu(torch.float32, [length, 77], "flex")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
