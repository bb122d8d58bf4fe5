"""R08: a large vocabulary is never held in full, in training or in validation, and the loss is the naive one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peagle import layout
from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import Batch
from peagle.train.loss import verifier_choices
from peagle.train.step import train_step, validate_step
from peagle.verifier.weights import VerifierHead
from tests.fakes import drafter_config
from tests.train.problem import step_settings

TOKENS, VOCAB, DRAFT, HIDDEN = 512, 32_768, 2_048, 16
NAIVE_BYTES = TOKENS * VOCAB * 4
SETTINGS = step_settings(block_slots=128, chunk_rows=32)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside it that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
            if place in inputs or place in self._known or size == 0:
                continue
            self._known.add(place)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(tensor, self._free, place, size)
        return out

    def _free(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live -= size


@pytest.fixture(scope="module")
def problem():
    made = torch.Generator().manual_seed(0)
    draft_ids = torch.arange(DRAFT) * 16
    model = Drafter(drafter_config(num_layers=1, vocab_size=VOCAB, draft_vocab_size=DRAFT, mask_token_id=31))
    head = VerifierHead(
        norm_weight=torch.ones(HIDDEN),
        norm_eps=1e-6,
        weight=torch.randn(VOCAB, HIDDEN, generator=made),
        logit_scale=1.0,
        logit_softcap=None,
    )
    with torch.no_grad():
        model.d2t.copy_(draft_ids - torch.arange(DRAFT))
        model.lm_head.weight.copy_(head.weight[draft_ids])
    model.lm_head.weight.requires_grad_(False)
    batch = Batch(
        pair_ids=torch.randint(VOCAB, (TOKENS,), generator=made),
        aux_states=torch.randn(TOKENS, 3 * HIDDEN, generator=made),
        rope_pos=torch.arange(TOKENS),
        document_ids=torch.zeros(TOKENS, dtype=torch.int64),
        label_of_pair=torch.arange(TOKENS),
        last_states=torch.randn(TOKENS, HIDDEN, generator=made),
        row_ids=("row",),
    )
    return model, head, draft_ids, batch


def naive(model: Drafter, head: VerifierHead, draft_ids: torch.Tensor, batch: Batch) -> tuple[float, float]:
    """Loss sum and correct choices at depth 0, from whole logits."""

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        return out.transpose(0, 1).flatten(1)

    with torch.no_grad():
        entered = model.enter(*model.embed_pairs(batch.pair_ids, batch.aux_states))
        states = model.norm(model.carried_pass(entered, batch.rope_pos, attend))
        ours = F.log_softmax(model.logits(states), -1)
        whole = head.logits(head.normed(batch.last_states))
        theirs = F.log_softmax(whole[:, draft_ids], -1)
        loss = (theirs.exp() * (theirs - ours)).sum()
        correct = (draft_ids[ours.argmax(-1)] == whole.argmax(-1)).sum()
    return loss.item(), correct.item()


@pytest.mark.parametrize("training", [True, False])
def test_R08_the_vocabulary_is_never_held_in_full(problem, training):
    model, head, draft_ids, batch = problem
    drafted = head.restricted(draft_ids)
    slots = layout.full(batch.is_supervised, batch.document_ids, 1)
    with LiveBytes() as meter:
        choices = verifier_choices(head, head.normed(batch.last_states), draft_ids, SETTINGS.chunk_rows)
        if training:
            result = train_step(model, drafted, batch, slots, float(TOKENS), SETTINGS)
        else:
            result = validate_step(model, drafted, batch, slots, SETTINGS, choices)
    loss, correct = naive(model, head, draft_ids, batch)
    assert result.loss_sum.sum().item() == pytest.approx(loss, rel=1e-5)
    if not training:  # a step takes the best token inside the draft vocabulary for the verifier's choice
        assert result.correct.sum().item() == correct
    # The gradient of the embedding is as large as the embedding; what grows with tokens x vocabulary is what must not.
    embedding_bytes = 2 * VOCAB * HIDDEN * 4 if training else 0
    assert meter.peak - embedding_bytes < NAIVE_BYTES / 4


def test_the_meter_sees_what_is_held():
    with LiveBytes() as meter:
        one = torch.zeros(1000)
        two = one + 1
        del one
        three = two[:10] * 2
    assert meter.peak == 8000
    assert meter.live == 4040
    assert three.numel() == 10
