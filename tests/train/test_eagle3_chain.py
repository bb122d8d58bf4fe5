"""EAGLE-3's chains against an oracle that runs every anchor by itself, as decoding would."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from peagle import layout
from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import Batch
from peagle.layout import CodLayout
from peagle.train.step import train_step, validate_step
from peagle.verifier.weights import VerifierHead
from tests.fakes import drafter_config
from tests.train.problem import step_settings

HIDDEN, VOCAB, STEPS = 16, 24, 4


def drafter(norm_output: bool, num_layers: int = 2) -> Drafter:
    config = drafter_config(
        speculators_model_type="eagle3",
        hidden_size=HIDDEN,
        intermediate_size=20,
        num_layers=num_layers,
        head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        vocab_size=VOCAB,
        norm_before_fc=True,
        norm_output=norm_output,
        num_speculative_tokens=STEPS,
    )
    torch.manual_seed(3)
    made = Drafter(config).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def problem() -> tuple[Batch, VerifierHead]:
    generator = torch.Generator().manual_seed(4)
    lengths, padding = [11, 2, 19], 3
    total = sum(lengths) + padding
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    supervised = (torch.rand(total, generator=generator) < 0.85) & (documents >= 0)
    labels = torch.where(supervised, supervised.cumsum(0) - 1, -1)
    batch = Batch(
        pair_ids=torch.randint(0, VOCAB, (total,), generator=generator),
        aux_states=torch.randn(total, 3 * HIDDEN, generator=generator, dtype=torch.float64),
        rope_pos=torch.cat([torch.arange(n) for n in [*lengths, padding]]),
        document_ids=documents,
        label_of_pair=labels,
        last_states=torch.randn(int(supervised.sum()), HIDDEN, generator=generator, dtype=torch.float64),
        row_ids=("a", "b", "c"),
    )
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    return batch, VerifierHead(
        norm_weight=torch.ones(HIDDEN, dtype=torch.float64),
        norm_eps=1e-6,
        weight=weight,
        logit_scale=1.0,
        logit_softcap=None,
    )


def oracle_loss(model: Drafter, head: VerifierHead, batch: Batch, chains: CodLayout, weights: list[float]):
    """The weighted loss and the correct choices of each depth: every chain decoded by itself, with plain autograd."""

    def run(embeds, hidden, position, cache):
        def attend(layer, q, k, v):
            past = cache.setdefault(layer, [])
            past.append((k, v))
            keys = torch.cat([one for one, _ in past]).repeat_interleave(2, 1)
            values = torch.cat([one for _, one in past]).repeat_interleave(2, 1)
            scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)

        return model.carried_pass(model.enter(embeds, hidden), position, attend)

    deepest = dict.fromkeys(range(len(batch.pair_ids)), 0)
    for anchor, depth in zip(chains.anchor_pos.tolist(), chains.depth.tolist()):
        deepest[anchor] = max(deepest[anchor], depth)
    loss, correct = 0.0, torch.zeros(STEPS, dtype=torch.int64)
    cache: dict = {}
    document = None
    for slot in range(int((batch.document_ids >= 0).sum())):
        if batch.document_ids[slot] != document:
            document, cache = batch.document_ids[slot], {}
        at = slice(slot, slot + 1)
        carried = run(*model.embed_pairs(batch.pair_ids[at], batch.aux_states[at]), batch.rope_pos[at], cache)
        own, fed = {layer: list(past) for layer, past in cache.items()}, carried
        for depth in range(deepest[slot] + 1):
            if depth:
                embeds = model.embed_tokens(batch.pair_ids[slot + depth : slot + depth + 1])
                carried = run(embeds, fed, batch.rope_pos[at] + depth, own)
            normed = model.norm(carried)
            fed = normed if model.config.norm_output else carried
            label = batch.label_of_pair[slot + depth]
            if label >= 0:
                target = head.logits(head.normed(batch.last_states[label]))
                logits = model.lm_head(normed)[0]
                loss = loss + weights[depth] * F.kl_div(logits.log_softmax(-1), target.softmax(-1), reduction="sum")
                correct[depth] += logits.argmax() == target.argmax()
    return loss, correct


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("layout_kind", ["full", "sampled"])
@pytest.mark.parametrize("block", [1, 9, 10**9])
def test_chains_equal_decoding_each_anchor_by_itself(norm_output, layout_kind, block):
    batch, head = problem()
    model = drafter(norm_output)
    supervised = batch.is_supervised
    if layout_kind == "full":
        chains = layout.full(supervised, batch.document_ids, STEPS)
    else:
        generators = [torch.Generator().manual_seed(i) for i in range(3)]
        chains = layout.sample(supervised, batch.document_ids, STEPS, 0.7, 0.2, generators)
    assert chains.num_slots > 10
    weights = [1.0, 0.7, 0.5, 0.3]
    loss, correct = oracle_loss(model, head, batch, chains, weights)
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    settings = step_settings(depth_weights=tuple(weights), block_slots=block, chunk_rows=5)
    result = train_step(model, head, batch, chains, 1.0, settings)
    found = sum(w * x for w, x in zip(weights, result.loss_sum.tolist()))
    assert found == pytest.approx(loss.item(), rel=1e-12)
    assert torch.equal(result.correct, correct)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-11)
    scored = validate_step(model, head, batch, chains, settings, None)
    torch.testing.assert_close(scored.loss_sum, result.loss_sum)


def test_R13_the_head_reads_the_normed_state_and_the_option_decides_what_is_carried():
    """With and without `norm_output`, against the plain definition: the first step does not differ, the second does."""
    batch, head = problem()
    settings = step_settings(block_slots=50, chunk_rows=50)
    sums = {}
    for norm_output in (False, True):
        model = drafter(norm_output)
        chains = layout.full(batch.is_supervised, batch.document_ids, 2)
        sums[norm_output] = validate_step(model, head, batch, chains, settings, None).loss_sum
        assert sums[norm_output].sum().item() == pytest.approx(
            oracle_loss(model, head, batch, chains, [1.0] * STEPS)[0].item(), rel=1e-12
        )
    assert sums[False][0] == sums[True][0]
    assert sums[False][1] != sums[True][1]


def test_without_chains_the_step_is_the_base_pass_alone():
    batch, head = problem()
    model = drafter(False)
    chains = layout.full(batch.is_supervised, batch.document_ids, 1)
    assert chains.num_slots == 0
    settings = step_settings(block_slots=50, chunk_rows=50)
    loss, _ = oracle_loss(model, head, batch, chains, [1.0])
    result = train_step(model, head, batch, chains, 1.0, settings)
    assert result.loss_sum.sum().item() == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("part_slots", [1, 3, 160])
def test_parts_of_any_size_give_the_same_states(part_slots, monkeypatch):
    batch, head = problem()
    model = drafter(False)
    chains = layout.full(batch.is_supervised, batch.document_ids, STEPS)
    settings = step_settings(chunk_rows=50)
    whole = validate_step(model, head, batch, chains, settings, None)
    monkeypatch.setattr("peagle.train.blocks.PART_SLOTS", part_slots)
    torch.testing.assert_close(validate_step(model, head, batch, chains, settings, None).loss_sum, whole.loss_sum)
