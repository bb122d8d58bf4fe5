"""The two-pass step against a dense oracle, recorded steps of Speculators, and itself cut differently."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.parity import WHOLE, compare
from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import Batch
from peagle.kernels.cpu import native_attention_problem
from peagle.layout import full, sample, visible
from peagle.train import step
from peagle.train.loss import verifier_choices
from peagle.train.step import num_supervised, train_step, validate_step
from peagle.verifier.weights import VerifierHead
from tests.fakes import drafter_config
from tests.train.problem import step_settings

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures").glob("peagle_*.safetensors"))
SETTINGS = step_settings()
PROBLEM = native_attention_problem(torch.device("cpu"), torch.float32, 64)
HIDDEN, VOCAB, DEPTHS = 24, 40, 4


def make_drafter(layer_type: str, draft_vocab: int, **changes) -> Drafter:
    torch.manual_seed(0)
    values = {
        "layer_type": layer_type,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
        "mask_token_id": 7,
        "num_speculative_tokens": DEPTHS,
    }
    drafter = Drafter(drafter_config(**{**values, **changes})).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    drafter.lm_head.weight.requires_grad_(False)
    return drafter


def make_head(rows: int) -> VerifierHead:
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    return VerifierHead(
        norm_weight=torch.ones(HIDDEN, dtype=torch.float64),
        norm_eps=1e-6,
        weight=weight,
        logit_scale=1.0,
        logit_softcap=None,
    )


def make_batch(lengths: list[int], padding: int, seed: int) -> Batch:
    """Documents of `lengths` pair slots; two replies each, the last slots of a document not supervised."""
    generator = torch.Generator().manual_seed(seed)
    ids, pos, supervised = [], [], []
    for document, length in enumerate(lengths):
        ids += [document] * length
        pos += list(range(length))
        supervised += [2 <= i < length - 1 and i != length // 2 for i in range(length)]
    total = len(ids)
    ids += [-1] * padding
    pos += [0] * padding
    supervised += [False] * padding
    mask = torch.tensor(supervised)
    return Batch(
        pair_ids=torch.randint(0, VOCAB, (total + padding,), generator=generator),
        aux_states=torch.randn(total + padding, 3 * HIDDEN, generator=generator, dtype=torch.float64),
        rope_pos=torch.tensor(pos),
        document_ids=torch.tensor(ids),
        label_of_pair=torch.where(mask, mask.cumsum(0) - 1, -1),
        last_states=torch.randn(int(mask.sum()), HIDDEN, generator=generator, dtype=torch.float64),
        row_ids=tuple(str(i) for i in range(len(lengths))),
    )


def make_layout(batch: Batch, seed: int):
    generators = [torch.Generator().manual_seed(seed + d) for d in range(len(batch.row_ids))]
    return sample(batch.is_supervised, batch.document_ids, DEPTHS, 0.7, 0.2, generators)


def gradients(drafter: Drafter) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    return found


def dense_states(drafter: Drafter, batch: Batch, layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition: every slot in one sequence, one dense mask, plain autograd; states, anchors and depths."""
    pairs = torch.arange(int((batch.document_ids >= 0).sum()))
    anchor = torch.cat([pairs, layout.anchor_pos])
    depth = torch.cat([torch.zeros_like(pairs), layout.depth])
    mask = visible(anchor, depth, anchor, depth, batch.document_ids)
    real = drafter.embed_pairs(batch.pair_ids[pairs], batch.aux_states[pairs])
    masked = drafter.embed_masks(layout.num_slots)
    entered = drafter.enter(*(torch.cat([a, b]) for a, b in zip(real, masked)))

    def attend(_index, q, k, v):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v).flatten(1)

    return drafter.norm(drafter.carried_pass(entered, batch.rope_pos[anchor] + depth, attend)), anchor, depth


def dense_loss(drafter: Drafter, head: VerifierHead, batch: Batch, layout, loss: str) -> torch.Tensor:
    """The definition with full logits."""
    states, anchor, depth = dense_states(drafter, batch, layout)
    label = batch.label_of_pair[anchor + depth]
    counts = torch.cat([batch.is_supervised[anchor[depth == 0]], layout.is_supervised])
    log_q = F.log_softmax(drafter.logits(states[counts]), -1)
    log_p = F.log_softmax(head.logits(head.normed(batch.last_states)), -1)[label[counts]]
    if loss == "kl_div":
        rows = (log_p.exp() * (log_p - log_q)).sum(-1)
    elif loss == "ce":
        rows = F.nll_loss(log_q, log_p.argmax(-1), reduction="none")
    else:
        rows = 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    return rows.sum() / counts.sum()


def dense_counts(
    drafter: Drafter, head: VerifierHead, batch: Batch, layout, draft_ids: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """`correct`, `total` and `prefix_correct` slot by slot: the verifier chooses over its whole vocabulary."""
    states, anchor, depth = dense_states(drafter, batch, layout)
    is_supervised = torch.cat([batch.is_supervised[anchor[depth == 0]], layout.is_supervised])
    drafted = [draft_ids[place] for place in drafter.logits(states).argmax(-1).tolist()]
    chosen = head.logits(head.normed(batch.last_states)).argmax(-1).tolist()
    is_right: dict[tuple[int, int], bool] = {}
    for a, d, counts, token in zip(anchor.tolist(), depth.tolist(), is_supervised.tolist(), drafted):
        if counts:
            is_right[a, d] = token == chosen[int(batch.label_of_pair[a + d])]
    correct, total, prefix = ([0] * layout.num_depths for _ in range(3))
    for (a, d), right in is_right.items():
        total[d] += 1
        correct[d] += right
        prefix[d] += all(is_right.get((a, e), False) for e in range(d + 1))
    return correct, total, prefix


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize(("block", "checkpoint"), [(1, False), (7, True), (WHOLE, False)])
def test_loss_and_gradients_equal_speculators(path, attention, block, checkpoint):
    found = compare(path, attention, block, 64, checkpoint)
    assert found["loss_error"] <= 1e-5
    assert found["gradient_error"] <= 1e-4
    assert found["counts_equal"]
    assert found["tensors"] > 20


@pytest.mark.parametrize("loss", ["kl_div", "ce", "tv"])
@pytest.mark.parametrize(
    "changes", [{}, {"norm_before_fc": True, "norm_before_residual": True}], ids=["plain", "norms"]
)
@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_step_equals_the_dense_definition(loss, changes, layer_type):
    drafter, head = make_drafter(layer_type, VOCAB, **changes), make_head(VOCAB)
    batch = make_batch([13, 9, 17], 4, 1)
    layout = make_layout(batch, 2)
    dense = dense_loss(drafter, head, batch, layout, loss)
    dense.backward()
    expected = gradients(drafter)
    count = num_supervised(batch, layout)
    result = train_step(drafter, head, batch, layout, count, replace(SETTINGS, loss=loss, block_slots=11))
    assert result.loss_sum.sum().item() / count == pytest.approx(dense.item(), rel=1e-12)
    found = gradients(drafter)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "attention", ["sdpa", pytest.param("native", marks=pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)))]
)
@pytest.mark.parametrize(("layer_type", "kv_heads"), [("llama", 4), ("qwen3", 2)])
def test_a_step_in_float32_is_that_in_float64_but_for_rounding(layer_type, kv_heads, attention):
    """Heads of 64, which the native kernels take in float32."""
    batch = make_batch([150, 40, 90], 0, 1)
    layout = make_layout(batch, 2)
    count = num_supervised(batch, layout)
    settings = replace(SETTINGS, block_slots=200, chunk_rows=70)
    found = {}
    for dtype, name in ((torch.float64, "reference"), (torch.float32, attention)):
        drafter = make_drafter(layer_type, VOCAB, head_dim=64, num_key_value_heads=kv_heads).to(dtype)
        head = make_head(VOCAB).to(torch.device("cpu"), dtype)
        same = replace(batch, aux_states=batch.aux_states.to(dtype), last_states=batch.last_states.to(dtype))
        result = train_step(drafter, head, same, layout, count, replace(settings, attention=name))
        found[dtype] = result.loss_sum.sum().item() / count, gradients(drafter)
    (exact_loss, exact), (loss, ours) = found[torch.float64], found[torch.float32]
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    assert ours.keys() == exact.keys()
    for name, gradient in ours.items():
        error = (gradient.double() - exact[name]).norm() / exact[name].norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("block", [1, 5, 23])
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_blocks_chunks_and_recomputation_change_nothing(block, chunk, checkpoint):
    drafter, head, batch = make_drafter("llama", VOCAB), make_head(VOCAB), make_batch([21, 8], 0, 3)
    layout = make_layout(batch, 4)
    count = num_supervised(batch, layout)
    whole = train_step(drafter, head, batch, layout, count, SETTINGS)
    expected = gradients(drafter)
    settings = step_settings(block_slots=block, chunk_rows=chunk, checkpoint_base=checkpoint)
    cut = train_step(drafter, head, batch, layout, count, settings)
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13, msg=name)
    torch.testing.assert_close(cut.loss_sum, whole.loss_sum, rtol=1e-12, atol=0)
    assert torch.equal(cut.correct, whole.correct)
    assert torch.equal(cut.prefix_correct, whole.prefix_correct)


def test_R11_packed_equals_separate_in_either_order():
    drafter, head = make_drafter("qwen3", VOCAB), make_head(VOCAB)
    alone = [make_batch([15], 0, 5), make_batch([10], 0, 6)]
    layouts = [full(b.is_supervised, b.document_ids, DEPTHS) for b in alone]
    total = sum(num_supervised(b, lay) for b, lay in zip(alone, layouts))
    expected_loss = 0.0
    for batch, layout in zip(alone, layouts):
        expected_loss += train_step(drafter, head, batch, layout, total, SETTINGS).loss_sum
    expected = gradients(drafter)
    for order in ((0, 1), (1, 0)):
        first, second = (alone[i] for i in order)
        shift = first.last_states.shape[0]
        packed = Batch(
            pair_ids=torch.cat([first.pair_ids, second.pair_ids]),
            aux_states=torch.cat([first.aux_states, second.aux_states]),
            rope_pos=torch.cat([first.rope_pos, second.rope_pos]),
            document_ids=torch.cat([first.document_ids, second.document_ids + 1]),
            label_of_pair=torch.cat(
                [first.label_of_pair, torch.where(second.is_supervised, second.label_of_pair + shift, -1)]
            ),
            last_states=torch.cat([first.last_states, second.last_states]),
            row_ids=("a", "b"),
        )
        layout = full(packed.is_supervised, packed.document_ids, DEPTHS)
        result = train_step(drafter, head, packed, layout, total, replace(SETTINGS, block_slots=6))
        torch.testing.assert_close(result.loss_sum, expected_loss, rtol=1e-12, atol=0)
        for name, gradient in gradients(drafter).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13, msg=name)


def test_R03_padding_changes_neither_loss_nor_gradients():
    drafter, head = make_drafter("llama", VOCAB), make_head(VOCAB)
    results = []
    plain = make_batch([12], 0, 8)
    padded = replace(
        plain,
        pair_ids=F.pad(plain.pair_ids, (0, 37)),
        aux_states=F.pad(plain.aux_states, (0, 0, 0, 37)),
        rope_pos=F.pad(plain.rope_pos, (0, 37)),
        document_ids=F.pad(plain.document_ids, (0, 37), value=-1),
        label_of_pair=F.pad(plain.label_of_pair, (0, 37), value=-1),
    )
    for batch in (plain, padded):
        layout = full(batch.is_supervised, batch.document_ids, DEPTHS)
        result = train_step(drafter, head, batch, layout, num_supervised(batch, layout), SETTINGS)
        results.append((result.loss_sum, gradients(drafter)))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[1][1][name], value) for name, value in results[0][1].items())


def test_R01_a_batch_without_a_supervised_slot_adds_nothing_and_no_nan():
    drafter, head = make_drafter("llama", VOCAB), make_head(VOCAB)
    batch = make_batch([12], 3, 8)
    empty = replace(batch, label_of_pair=torch.full_like(batch.label_of_pair, -1))
    layout = full(empty.is_supervised, empty.document_ids, DEPTHS)
    result = train_step(drafter, head, empty, layout, 1.0, SETTINGS)
    assert result.total.sum() == 0
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_R14_a_mask_slot_is_trained_at_its_anchors_position_plus_its_depth(attention, monkeypatch):
    drafter, head, batch = make_drafter("llama", VOCAB), make_head(VOCAB), make_batch([14, 11], 0, 4)
    layout = full(batch.is_supervised, batch.document_ids, DEPTHS)
    result = train_step(drafter, head, batch, layout, 1.0, replace(SETTINGS, attention=attention))
    found = result.loss_sum.sum() / result.total.sum()
    assert found.item() == pytest.approx(dense_loss(drafter, head, batch, layout, "kl_div").item(), rel=1e-9)
    pairs = batch.rope_pos.numel()
    whole = drafter.carried_pass

    def without_offsets(entered, rope_pos, attend):
        return whole(entered, torch.cat([rope_pos[:pairs], batch.rope_pos[layout.anchor_pos]]), attend)

    monkeypatch.setattr(drafter, "carried_pass", without_offsets)
    wrong = dense_loss(drafter, head, batch, layout, "kl_div").item()
    assert found.item() != pytest.approx(wrong, rel=1e-3)


def test_depth_weights_scale_each_depths_gradient():
    drafter, head, batch = make_drafter("llama", VOCAB), make_head(VOCAB), make_batch([16], 0, 9)
    layout = make_layout(batch, 1)
    parts = []
    for depth in range(DEPTHS):
        weights = tuple(float(depth == d) for d in range(DEPTHS))
        train_step(drafter, head, batch, layout, 10.0, replace(SETTINGS, depth_weights=weights))
        parts.append(gradients(drafter))
    train_step(drafter, head, batch, layout, 10.0, replace(SETTINGS, depth_weights=(1.0, 0.5, 0.25, 0.0)))
    for name, gradient in gradients(drafter).items():
        expected = parts[0][name] + 0.5 * parts[1][name] + 0.25 * parts[2][name]
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13, msg=name)


def test_pruned_vocabulary_counts_choices_outside_it_as_missed():
    drafter, head, batch = make_drafter("llama", 10), make_head(VOCAB), make_batch([20], 0, 10)
    ids = torch.arange(0, VOCAB, 4)
    restricted = head.restricted(ids)
    choices = verifier_choices(head, head.normed(batch.last_states), ids, 3)
    full_choice = head.logits(head.normed(batch.last_states)).argmax(-1)
    inside = torch.isin(full_choice, ids)
    assert torch.equal(choices >= 0, inside)
    assert torch.equal(ids[choices[inside]], full_choice[inside])
    layout = full(batch.is_supervised, batch.document_ids, DEPTHS)
    result = validate_step(drafter, restricted, batch, layout, SETTINGS, choices)
    all_missed = validate_step(drafter, restricted, batch, layout, SETTINGS, torch.full_like(choices, -1))
    assert (result.correct <= inside.sum()).all()
    assert all_missed.correct.sum() == 0
    torch.testing.assert_close(result.loss_sum, all_missed.loss_sum)


@pytest.mark.parametrize("draft_ids", [list(range(VOCAB)), [i for i in range(VOCAB) if i % 4]], ids=["whole", "pruned"])
@pytest.mark.parametrize("block", [1, 9, WHOLE])
def test_what_chooses_checkpoint_best_equals_a_count_slot_by_slot(draft_ids, block):
    head, batch = make_head(VOCAB), make_batch([30, 18], 0, 12)
    drafter, ids = make_drafter("llama", len(draft_ids)), torch.tensor(draft_ids)
    layout = full(batch.is_supervised, batch.document_ids, DEPTHS)
    normed = head.normed(batch.last_states)
    with torch.no_grad():  # a head fitted to the verifier's choices: about half of the slots are right
        states, anchor, depth = dense_states(drafter, batch, layout)
        label = batch.label_of_pair[anchor + depth]
        is_choice = ids == head.logits(normed).argmax(-1)[label][:, None]
        fits = (label >= 0) & is_choice.any(1)
        drafter.lm_head.weight.copy_(torch.linalg.lstsq(states[fits], is_choice[fits].double()).solution.T)
    choices = verifier_choices(head, normed, ids, 3) if len(ids) < VOCAB else None
    settings = replace(SETTINGS, block_slots=block)
    result = validate_step(drafter, head.restricted(ids), batch, layout, settings, choices)
    correct, total, prefix = dense_counts(drafter, head, batch, layout, draft_ids)
    assert (result.correct.tolist(), result.total.tolist()) == (correct, total)
    assert result.prefix_correct.tolist() == prefix
    assert 0 < prefix[-1] < prefix[0] < total[0], "this problem would not tell a wrong count"
    assert all(0 < p < c for p, c in zip(prefix[1:], correct[1:])), "this problem would not tell a wrong count"


def test_a_trained_head_gets_the_gradient_of_the_dense_definition():
    drafter, head, batch = make_drafter("llama", VOCAB), make_head(VOCAB), make_batch([14], 0, 13)
    drafter.lm_head.weight.requires_grad_(True)
    layout = make_layout(batch, 3)
    dense_loss(drafter, head, batch, layout, "kl_div").backward()
    expected = gradients(drafter)["lm_head.weight"]
    train_step(drafter, head, batch, layout, num_supervised(batch, layout), replace(SETTINGS, block_slots=8))
    torch.testing.assert_close(gradients(drafter)["lm_head.weight"], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc_trim")
def test_pages_go_back_between_the_parts_of_a_long_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(step.ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=calls.append))
    cpu = torch.device("cpu")
    for num_pairs, device in [(100, cpu), (step.LONG_PACK, torch.device("cuda")), (step.LONG_PACK, cpu)]:
        step.give_back_pages(num_pairs, device)
    assert calls == [0]
