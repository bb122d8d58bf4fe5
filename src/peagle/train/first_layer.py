"""A head start, continued: layer 0 and `fc` fitted so that the verifier's layers meet the states they were made for.

The drafter's layers begin as the verifier's last ones (`verifier_layers`). Those continue the residual stream of the
token just read, x_{i+1}; the drafter is given the stream of the token before it, g_i, and the new token's embedding.
So, by least squares over real rows, before the first step:

1. `fc` predicts from g_i the stream s_{i+1} that the first copied layer would read one position later;
2. layer 0's projections are the verifier's, applied to the best linear guess of normed s_{i+1} out of both its inputs;
3. layer 0's output projection also adds what attention knows (of the new token above all) and `fc` could not.

Three solves over some thousand positions: less compute than two steps of training. Measured in docs/recipe.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from peagle.drafter import Drafter, DrafterConfig
from peagle.drafter.rope import rotate
from peagle.train.rows import Rows

# Positions to fit on for each input of the widest solve, and the most of them: they are held in memory, as stored.
_POSITIONS_PER_INPUT, _MOST_POSITIONS = 24, 65_536
# Share of an input's mean square that is added to each.
_RIDGE = 1e-3
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class _Document:
    """A row's pair slots."""

    pair_ids: Tensor
    """x_{i+1}, int64, [num_pairs]."""
    aux_states: Tensor
    """g_i of one position more than there are pair slots, [num_pairs + 1, aux_size]."""


def fit_first_layer(drafter: Drafter, rows: Rows, first_layer: int) -> int:
    """Fit `fc` and layer 0's projections, in place.

    Args:
        drafter: float32, on the CPU, its layers the verifier's from `first_layer` on.
        rows: real states; those of the first rows are read until there are enough positions.
        first_layer: the verifier's layer that layer 0 came from.

    Returns:
        Positions that were fitted on.
    """
    ids = drafter.config.aux_layer_ids
    # The stream that the first copied layer reads, or of the nearest layer whose stream is known.
    place = min(range(len(ids)), key=lambda k: abs(ids[k] - first_layer))
    documents = _read(rows, positions_wanted(drafter.config))
    with torch.no_grad():
        _fit(drafter, documents, place)
    return sum(len(one.pair_ids) for one in documents)


def positions_wanted(config: DrafterConfig) -> int:
    """How many positions the fit asks for."""
    return min(_POSITIONS_PER_INPUT * config.aux_size, _MOST_POSITIONS)


def _read(rows: Rows, num_positions: int) -> list[_Document]:
    documents, count = [], 0
    for row_id in rows.extents():
        stored = rows.read(row_id)
        states = stored.aux_states
        pair_ids = torch.tensor(stored.row.input_ids[1 : len(states)], dtype=torch.int64)
        documents.append(_Document(pair_ids, states[: len(pair_ids) + 1]))
        count += len(pair_ids)
        if count >= num_positions:
            break
    return documents


def _fit(drafter: Drafter, documents: list[_Document], place: int) -> None:
    hidden = drafter.config.hidden_size
    layer = drafter.decoder()[0]
    attention = layer.self_attn
    own = [getattr(attention, name).weight[:, -hidden:].clone() for name in _PROJECTIONS]
    own_output = attention.o_proj.weight.clone()

    def wanted(one: _Document) -> Tensor:
        return one.aux_states[1:, place * hidden : (place + 1) * hidden].float()

    def read(one: _Document) -> tuple[Tensor, Tensor]:
        states = one.aux_states[:-1].float()
        return layer.enter(*drafter.embed_pairs(one.pair_ids, states))

    solve = _Solve()
    for one in documents:
        states, share = one.aux_states[:-1].float(), _share(wanted(one))
        states = states if drafter.input_norm is None else drafter.input_norm(states)
        solve.add(states * share, wanted(one) * share)
    drafter.fc.weight.copy_(solve.weight())

    solve = _Solve()
    for one in documents:
        solve.add(read(one)[0], layer.hidden_norm(wanted(one)))
    lift = solve.weight()
    for name, weight in zip(_PROJECTIONS, own):
        getattr(attention, name).weight.copy_(weight @ lift)

    solve = _Solve()
    fitted = [getattr(attention, name).weight for name in _PROJECTIONS]
    for one in documents:
        entered, residual = read(one)
        state, share = wanted(one), _share(wanted(one))
        attended = _attended(drafter, entered, fitted)
        right = state + _attended(drafter, layer.hidden_norm(state), own) @ own_output.T
        solve.add(attended * share, (right - residual - attended @ own_output.T) * share)
    attention.o_proj.weight.add_(solve.weight())


class _Solve:
    """Least squares with a small ridge, from sums: W of least |x W' - y|^2 over all rows (x, y) added."""

    def __init__(self) -> None:
        self._gram: Tensor | None = None
        self._cross: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows: [num_rows, num_inputs] and [num_rows, num_outputs]."""
        if self._gram is None or self._cross is None:
            self._gram, self._cross = x.T @ x, x.T @ y
        else:
            self._gram.addmm_(x.T, x)
            self._cross.addmm_(x.T, y)

    def weight(self) -> Tensor:
        """[num_outputs, num_inputs], float32."""
        assert self._gram is not None
        assert self._cross is not None
        gram = self._gram.double()
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean() + 1e-12)
        return torch.linalg.solve(gram, self._cross.double()).T.float()


def _share(states: Tensor) -> Tensor:
    """Weight of each position: errors count relative to the state's size, so that a few huge states do not decide."""
    return states.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()


def _attended(drafter: Drafter, entered: Tensor, projections: list[Tensor]) -> Tensor:
    """Causal attention of layer 0 over one document: [num_pairs, input] -> [num_pairs, num_heads * head_dim]."""
    attention = drafter.decoder()[0].self_attn
    q, k, v = ((entered @ weight.T).unflatten(-1, (-1, attention.head_dim)) for weight in projections)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    cos, sin = drafter.rotary(torch.arange(len(entered)), entered.dtype)
    q, k, v = (one.transpose(0, 1) for one in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return found.transpose(0, 1).flatten(1)
