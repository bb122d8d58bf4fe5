"""Claims about drafters that start from other ones."""

from __future__ import annotations

import pytest
import torch

from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.drafter.warm_start import check_layers, check_source, warm_start
from peagle.errors import CheckpointError
from tests.fakes import drafter_config
from tests.train.problem import HIDDEN, VOCAB


def shape(kind: str, num_layers: int, **changes) -> DrafterConfig:
    return drafter_config(num_layers=num_layers, speculators_model_type=kind, **changes)


def filled(config: DrafterConfig, seed: int) -> Drafter:
    torch.manual_seed(seed)
    made = Drafter(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return made


def states(drafter: Drafter) -> torch.Tensor:
    """The base pass over a few pairs."""
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB - 1, (9,), generator=made)
    aux = torch.randn(9, 3 * HIDDEN, generator=made)

    def attend(_layer, q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~torch.ones(9, 9).tril().bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", (scores * q.shape[-1] ** -0.5).softmax(-1), v).flatten(1)

    entered = drafter.enter(*drafter.embed_pairs(ids, aux))
    return drafter.norm(drafter.carried_pass(entered, torch.arange(9), attend))


@pytest.mark.parametrize("num_layers", [2, 4])
@pytest.mark.parametrize(("kind", "target_kind"), [("eagle3", "peagle"), ("peagle", "peagle"), ("peagle", "eagle3")])
def test_at_first_the_drafter_computes_what_its_source_did(kind, target_kind, num_layers):
    source = filled(shape(kind, 2), 1)
    target = filled(shape(target_kind, num_layers), 2)
    warm_start(target, source, "old")
    torch.testing.assert_close(states(target), states(source))


def test_what_is_new_is_named_and_keeps_its_initial_value():
    source = filled(shape("eagle3", 1), 1)
    target = filled(shape("peagle", 3), 2)
    assert target.mask_hidden is not None
    mask_hidden, row = target.mask_hidden.clone(), target.embed_tokens.weight[VOCAB - 1].clone()
    begun = warm_start(target, source, "old")
    assert set(begun.taken) == set(source.state_dict())
    assert begun.left == ()
    assert [name.split(" ")[0] for name in begun.new] == [
        f"embed_tokens.weight[{VOCAB - 1}]",
        "mask_hidden",
        "layers.1",
    ]
    assert torch.equal(target.mask_hidden, mask_hidden)
    assert torch.equal(target.embed_tokens.weight[VOCAB - 1], row)
    assert torch.equal(target.embed_tokens.weight[: VOCAB - 1], source.embed_tokens.weight[: VOCAB - 1])
    assert not torch.equal(
        target.layers[1].mlp.gate_proj.weight, torch.zeros_like(target.layers[1].mlp.gate_proj.weight)
    )


def test_an_earlier_peagle_drafter_is_taken_whole():
    source, target = filled(shape("peagle", 2), 1), filled(shape("peagle", 2), 2)
    begun = warm_start(target, source, "old")
    assert begun.new == begun.left == ()
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


def test_what_has_no_place_is_named():
    source = filled(shape("peagle", 1), 1)
    target = filled(shape("eagle3", 1), 2)
    assert warm_start(target, source, "old").left == ("mask_hidden",)


def test_another_draft_vocabulary_is_refused():
    source, target = (
        filled(shape("eagle3", 1, draft_vocab_size=20), 1),
        filled(shape("eagle3", 1, draft_vocab_size=20), 2),
    )
    source.d2t[5:] = 1
    with pytest.raises(CheckpointError, match="its draft vocabulary is another one"):
        warm_start(target, source, "old")


def test_F17_other_widths_vocabularies_and_layers_are_refused_in_one_line():
    source = shape("eagle3", 1)
    check_source(source, "old", "verifier", HIDDEN, VOCAB)
    with pytest.raises(CheckpointError, match="old: its hidden size is 16, that of verifier is 64"):
        check_source(source, "old", "verifier", 64, VOCAB)
    with pytest.raises(CheckpointError, match="old: its vocabulary is 32, that of verifier is 64"):
        check_source(source, "old", "verifier", HIDDEN, 64)
    check_layers(source, "old", (1, 2, 3))
    with pytest.raises(CheckpointError, match=r"it reads layers 1, 2, 3 .* layers 1, 2, 4; .*--target-layer-ids 1 2 3"):
        check_layers(source, "old", (1, 2, 4))
