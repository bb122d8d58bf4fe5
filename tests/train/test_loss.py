"""The head in chunks: how rows are cut, what a loss is in each type, and that no device is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels import gpu
from peagle.train import loss as loss_module
from peagle.train.loss import LabelPlan, Targets, head_loss, plan_labels
from peagle.verifier.weights import VerifierHead

LOSSES = ["kl_div", "ce", "tv"]


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 12), st.sampled_from([1, 1 << 15, 1 << 17, 1 << 20]))
@settings(max_examples=200, deadline=None)
def test_chunks_hold_each_row_once_and_end_between_labels_where_they_can(rows_per_label, chunk_rows, vocab_size):
    """Labels are spaced, as where some are not supervised."""
    label_rows = torch.repeat_interleave(torch.arange(len(rows_per_label)) * 3 + 1, torch.tensor(rows_per_label).long())
    plan, ends = plan_labels(label_rows, chunk_rows, vocab_size), [0]
    for chunk in plan.chunks:
        assert chunk.begin == ends[-1]
        assert 0 < chunk.end - chunk.begin <= chunk_rows
        ends.append(chunk.end)
        own = plan.labels[chunk.first_label : chunk.last_label]
        places = plan.label_of_row[chunk.begin : chunk.end]
        assert torch.equal(own[places], label_rows[chunk.begin : chunk.end])
        assert own.tolist() == sorted(set(own[places].tolist()))
        row = label = 0
        for rows, labels in chunk.pieces:
            assert (rows.start, labels.start) == (row, label)
            assert set(places[rows].tolist()) == set(range(labels.start, labels.stop))
            row, label = rows.stop, labels.stop
        assert (row, label) == (chunk.end - chunk.begin, len(own))
    assert ends[-1] == len(label_rows)
    assert len(plan.labels) == sum(chunk.last_label - chunk.first_label for chunk in plan.chunks)
    for before, end in zip(plan.chunks, ends[1:-1]):
        if label_rows[end - 1] == label_rows[end]:  # inside a label: it fills the chunk alone
            assert before.last_label - before.first_label == 1


def problem(dtype: torch.dtype, vocab_size: int = 50, seed: int = 0) -> dict[str, Any]:
    """Arguments of `head_loss` for twelve rows of five labels, in chunks of at most four rows."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    verifier = VerifierHead(
        norm_weight=torch.ones(8), norm_eps=1e-6, weight=drawn(vocab_size, 8), logit_scale=1.0, logit_softcap=None
    )
    labels = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 3, 4, 4, 6])
    return {
        "states": drawn(12, 8),
        "weight": drawn(vocab_size, 8),
        "plan": plan_labels(labels, 4, vocab_size),
        "row_weight": (torch.rand(12, generator=generator) + 0.5).to(dtype),
        "targets": Targets(drawn(7, 8), verifier, None),
        "logits_buffer": torch.empty(4, vocab_size, dtype=dtype),
        "with_grad": True,
        "weight_grad": torch.zeros(vocab_size, 8, dtype=torch.promote_types(dtype, torch.float32)),
    }


def defined(asked: dict[str, Any], loss: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, correctness, gradients of the states and of the weight: from the logits' own numbers, in float64."""
    targets, plan, dtype = asked["targets"], asked["plan"], asked["states"].dtype
    states, weight = (asked[name].double().clone().requires_grad_() for name in ("states", "weight"))
    rows = [plan.labels[c.first_label : c.last_label][plan.label_of_row[c.begin : c.end]] for c in plan.chunks]
    rows = torch.cat(rows)
    exact = states @ weight.t()
    # Half precision rounds the logits; their gradient is that of the product.
    logits = exact + ((asked["states"] @ asked["weight"].t()).double() - exact).detach()
    theirs = targets.head.logits(targets.normed).to(dtype).double()[rows]
    choice = theirs.argmax(-1) if targets.choices is None else targets.choices[rows]
    ours, p = logits.log_softmax(-1), theirs.softmax(-1)
    if loss == "kl_div":
        losses = (p * (theirs.log_softmax(-1) - ours)).sum(-1)
    elif loss == "ce":
        losses = torch.where(choice >= 0, -ours.gather(1, choice.clamp(min=0)[:, None])[:, 0], 0.0)
    else:
        losses = 1 - torch.minimum(ours.exp(), p).sum(-1)
    grads = torch.autograd.grad((losses * asked["row_weight"].double()).sum(), (states, weight))
    return losses.detach(), logits.argmax(-1) == choice, *grads


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize("piece_elements", [1, 1 << 17])
def test_the_head_in_chunks_is_its_definition(loss, dtype, is_pruned, piece_elements, monkeypatch):
    """In bfloat16 a row's loss is as exact as in float32, given the rounded logits."""
    monkeypatch.setattr(loss_module, "PIECE_ELEMENTS", piece_elements)
    asked = problem(dtype)
    if is_pruned:
        asked["targets"] = replace(asked["targets"], choices=torch.tensor([3, 49, 7, -1, 0, 2, 11]))
    losses, is_correct, states_grad, weight_grad = defined(asked, loss)
    found = head_loss(**asked, loss=loss)
    assert found.loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.loss.double(), losses, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.is_correct, is_correct)
    limit = {"rtol": 0.02, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert found.grad.dtype == dtype
    torch.testing.assert_close(found.grad.double(), states_grad, **limit)
    torch.testing.assert_close(asked["weight_grad"].double(), weight_grad, **limit)
    same = head_loss(**(asked | {"with_grad": False, "weight_grad": None}), loss=loss)
    assert same.grad is None
    torch.testing.assert_close(same.loss, found.loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(same.is_correct, is_correct)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_grad", [False, True])
def test_R21_a_tie_is_correct_only_where_the_first_of_the_largest_logits_is_the_choice(loss, dtype, with_grad):
    """The rows of the heads at 20 and 30 are equal, and nothing is larger: the logits there tie exactly."""
    asked = problem(dtype)
    asked["states"] = asked["states"].abs()
    for weight in (asked["weight"], asked["targets"].head.weight):
        weight[20] = weight[30] = 5.0
    normed = asked["targets"].normed.abs()
    asked |= {"with_grad": with_grad, "weight_grad": None}
    rows = asked["plan"].label_of_row
    for choices, expected in ((None, True), ([20] * 7, True), ([30] * 7, False), ([-1] * 7, False), ([19] * 7, False)):
        known = None if choices is None else torch.tensor(choices)
        asked["targets"] = Targets(normed, asked["targets"].head, known)
        assert head_loss(**asked, loss=loss).is_correct.tolist() == [expected] * len(rows)


def on_meta(asked: dict[str, Any]) -> dict[str, Any]:
    """The same on a device that holds no numbers: asking it for one raises."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to("meta")
        if isinstance(value, LabelPlan):
            return replace(value, labels=value.labels.to("meta"), label_of_row=value.label_of_row.to("meta"))
        if isinstance(value, Targets):
            return Targets(value.normed.to("meta"), value.head.to("meta", value.normed.dtype), None)
        return value

    return {name: moved(value) for name, value in asked.items()}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("with_grad", [False, True])
def test_off_the_cpu_a_chunk_is_one_kernel_and_the_host_asks_for_nothing(loss, with_grad, monkeypatch):
    asked, calls = problem(torch.bfloat16), []

    def fused(**call: Any) -> tuple[Tensor, Tensor]:
        calls.append(call)
        rows = call["logits"].shape[:1]
        return torch.empty(rows, device="meta"), torch.empty(rows, dtype=torch.bool, device="meta")

    monkeypatch.setattr(gpu, "fused_loss_problem", lambda: None)
    monkeypatch.setattr(gpu, "row_losses_", fused)
    found = head_loss(**(on_meta(asked) | {"with_grad": with_grad}), loss=loss)
    assert found.loss.dtype == torch.float32
    assert len(calls) == len(asked["plan"].chunks) > 1
    for call, chunk in zip(calls, asked["plan"].chunks):
        assert call["logits"].shape[0] == call["label_of_row"].shape[0] == chunk.end - chunk.begin
        assert call["verifier_logits"].shape[0] == chunk.last_label - chunk.first_label
        assert (call["loss"], call["with_grad"]) == (loss, with_grad)


@pytest.mark.parametrize("loss", LOSSES)
def test_off_the_cpu_without_triton_the_definition_runs_and_the_host_asks_for_nothing(loss, monkeypatch):
    monkeypatch.setattr(gpu, "fused_loss_problem", lambda: "Triton is not installed")
    monkeypatch.setattr(gpu, "row_losses_", None)
    found = head_loss(**on_meta(problem(torch.bfloat16)), loss=loss)
    assert found.grad.shape == (12, 8)
