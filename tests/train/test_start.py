"""A drafter before its first step: from the verifier's embedding, head and norm, its last layers, and real states."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle.data.records import TokenRow
from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import StoredRow
from peagle.hidden_states.store import StoreReader
from peagle.train.decision import decide
from peagle.train.sources import MemoryRows, StoreRows
from peagle.train.start import first_rows, fit_first_layer, initialise, mask_hidden, start_from_verifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.weights import load_embedding, load_head
from tests import fakes
from tests.fakes import drafter_for
from tests.train.files import make_files
from tests.train.problem import rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("draft_ids", [None, [3, 7, 8, 20, 250]])
def test_a_drafter_starts_from_the_verifier_s_embedding_head_and_norm(files, tmp_path, draft_ids):
    verifier_config = load_verifier_config(str(files.verifier), False)
    embedding, head = load_embedding(verifier_config), load_head(verifier_config)
    decision = decide(files.config(tmp_path))
    shape = decision.drafter_config()
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    if draft_ids is not None:
        shape = shape.model_copy(update={"draft_vocab_size": len(draft_ids)})
    store = StoreRows(StoreReader.open(files.states), decision.extents(decision.train))
    stored = first_rows(store, 10**9)
    assert len(stored) == len(decision.train)
    assert len(first_rows(store, 1)) == 1
    made = initialise(shape, embedding, head, ids, stored, 1)
    others = [i for i in range(272) if i != shape.mask_token_id]
    assert torch.equal(made.embed_tokens.weight[others], embedding[others])
    assert torch.equal(made.norm.weight, head.norm_weight)
    assert torch.equal(made.lm_head.weight, head.weight if ids is None else head.weight[ids])
    if ids is not None:
        assert torch.equal(made.to_verifier_ids(torch.arange(5)), ids)
    again = initialise(shape, embedding, head, ids, stored, 1)
    assert all(torch.equal(a, b) for a, b in zip(made.state_dict().values(), again.state_dict().values()))
    assert not torch.equal(made.fc.weight, initialise(shape, embedding, head, ids, stored, 2).fc.weight)


def test_mask_hidden_starts_at_the_scale_of_real_states():
    made = rows(40)
    states = torch.cat([one.aux_states for one in made])
    found = mask_hidden(made, 3)
    assert found.shape == (48,)
    assert found.square().mean().sqrt().item() == pytest.approx(states.square().mean().sqrt().item(), rel=0.35)
    many = torch.stack([mask_hidden(made, seed) for seed in range(300)])
    torch.testing.assert_close(many.mean(0), states.mean(0), rtol=0, atol=0.35)
    torch.testing.assert_close(many.std(0), states.std(0), rtol=0.25, atol=0)


def test_a_mask_token_s_row_of_zeros_is_given_the_scale_of_the_others(files, tmp_path):
    verifier_config = load_verifier_config(str(files.verifier), False)
    embedding = load_embedding(verifier_config).clone()
    shape = decide(files.config(tmp_path)).drafter_config()
    embedding[shape.mask_token_id] = 0
    made = initialise(
        shape, embedding, load_head(verifier_config), None, _wide(rows(3), verifier_config.hidden_size), 1
    )
    row, usual = made.embed_tokens.weight[shape.mask_token_id], embedding.square().mean(1).sqrt().median()
    assert row.square().mean().sqrt().item() == pytest.approx(usual.item(), rel=0.3)


def _wide(made: list, hidden_size: int) -> list:
    return [dataclasses.replace(one, aux_states=torch.randn(len(one.aux_states), 3 * hidden_size)) for one in made]


def new_drafter(folder, **changes) -> Drafter:
    torch.manual_seed(0)
    return Drafter(drafter_for(folder, **changes))


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
        ("gemma3_text", {}, "another type"),
        ("qwen3_moe", {}, "another type"),
        ("qwen3", {"intermediate_size": 48}, r"mlp.*is \["),
        ("qwen3", {"num_layers": 9}, "8 layers only"),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_changes(tmp_path, family, changes, reason):
    fakes.tiny_verifier(tmp_path / "v", family, num_layers=8)
    drafter = new_drafter(tmp_path / "v", **changes)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    found = start_from_verifier(drafter, load_verifier_config(str(tmp_path / "v"), False))
    assert found is not None
    assert re.search(reason, found)
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in before.items())


def linear_rows(hidden: int, vocab: int, num_rows: int, num_tokens: int) -> list[StoredRow]:
    """Rows whose middle state at i + 1 is a fixed linear map of all states at i."""
    generator = torch.Generator().manual_seed(0)
    onward = torch.randn(3 * hidden, hidden, generator=generator) / (3 * hidden) ** 0.5
    rows = []
    for index in range(num_rows):
        states = torch.randn(num_tokens, 3 * hidden, generator=generator)
        for i in range(1, num_tokens):
            states[i, hidden : 2 * hidden] = states[i - 1] @ onward
        ids = torch.randint(4, vocab, (num_tokens,), generator=generator).tolist()
        row = TokenRow(
            row_id=f"row{index}",
            source="made",
            input_ids=ids,
            loss_mask=[1] * num_tokens,
            next_is_supervised=False,
            tail_length=0,
        )
        positions = torch.tensor(row.label_positions())
        rows.append(StoredRow(row, states, positions, torch.zeros(len(positions), hidden)))
    return rows


@pytest.mark.parametrize("changes", [{}, {"norm_before_fc": True}, {"norm_before_residual": True}])
def test_a_linear_map_to_the_next_state_is_found(tmp_path, changes):
    fakes.tiny_verifier(tmp_path / "v", "qwen3", num_layers=6)
    verifier_config = load_verifier_config(str(tmp_path / "v"), False)
    drafter = new_drafter(tmp_path / "v", **changes)  # reads layers 2, 4, 5; its first layer is the verifier's fifth
    assert start_from_verifier(drafter, verifier_config) is None
    hidden = drafter.config.hidden_size
    own = drafter.layers[0].self_attn.q_proj.weight[:, hidden:].clone()
    rows = linear_rows(hidden, verifier_config.vocab_size, 40, 160)
    assert fit_first_layer(drafter, rows, 4) >= 24 * 3 * hidden
    stored = rows[3]
    ids, states = torch.tensor(stored.row.input_ids[1:]), stored.aux_states
    wanted = states[1:, hidden : 2 * hidden]
    with torch.no_grad():
        embeds, guessed = drafter.embed_pairs(ids, states[:-1])
        assert (guessed - wanted).norm() < (0.02 if not changes.get("norm_before_fc") else 0.2) * wanted.norm()
        read, _ = drafter.layers[0].enter(embeds, guessed)
        query = read @ drafter.layers[0].self_attn.q_proj.weight.T
        expected = drafter.layers[0].hidden_norm(wanted) @ own.T
    assert (query - expected).norm() < 0.25 * expected.norm()


def test_the_same_rows_give_the_same_layer(tmp_path):
    fakes.tiny_verifier(tmp_path / "v", "llama", num_layers=6)
    verifier_config = load_verifier_config(str(tmp_path / "v"), False)
    rows = linear_rows(load_verifier_config(str(tmp_path / "v"), False).hidden_size, verifier_config.vocab_size, 4, 40)
    found = []
    for _ in range(2):
        drafter = new_drafter(tmp_path / "v")
        start_from_verifier(drafter, verifier_config)
        fit_first_layer(drafter, rows, 4)
        found.append(drafter.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(torch.isfinite(tensor).all() for tensor in found[0].values())


def test_R02_a_last_state_that_nothing_reads_starts_no_drafter_with_nan():
    made = rows(6)
    spoilt = [dataclasses.replace(one, aux_states=one.aux_states.clone()) for one in made]
    spoilt[2].aux_states[-1, 3] = float("nan")
    stored = first_rows(MemoryRows(spoilt), 10**9)
    assert [len(one.aux_states) for one in stored] == [len(one.aux_states) - (i == 2) for i, one in enumerate(made)]
    assert mask_hidden(stored, 0).isfinite().all()
