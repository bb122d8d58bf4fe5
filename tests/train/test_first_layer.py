"""Layer 0 fitted before the first step: what a linear map can know of the next state, the drafter then knows."""

from __future__ import annotations

import pytest
import torch

from peagle.data.records import TokenRow
from peagle.hidden_states.batch import StoredRow
from peagle.train.sources import MemoryRows
from peagle.train.start import fit_first_layer, start_from_verifier
from peagle.verifier.model_config import load_verifier_config
from tests import fakes
from tests.train.test_verifier_layers import new_drafter


def linear_rows(hidden: int, vocab: int, num_rows: int, num_tokens: int) -> MemoryRows:
    """Rows whose middle state at i + 1 is a fixed linear map of all states at i."""
    generator = torch.Generator().manual_seed(0)
    onward = torch.randn(3 * hidden, hidden, generator=generator) / (3 * hidden) ** 0.5
    rows = []
    for index in range(num_rows):
        states = torch.randn(num_tokens, 3 * hidden, generator=generator)
        for i in range(1, num_tokens):
            states[i, hidden : 2 * hidden] = states[i - 1] @ onward
        ids = torch.randint(4, vocab, (num_tokens,), generator=generator).tolist()
        row = TokenRow(f"row{index}", "made", ids, [1] * num_tokens, False, 0)
        positions = torch.tensor(row.label_positions())
        rows.append(StoredRow(row, states, positions, torch.zeros(len(positions), hidden)))
    return MemoryRows(rows)


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
    stored = rows.read("row3")
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
