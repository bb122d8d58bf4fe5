"""A drafter before its first step: the verifier's embedding, head and final norm, `mask_hidden` like a real state, and
layers that are random, or the verifier's own last ones, of which the first is fitted to what a drafter is given.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter, rotate
from peagle.errors import VerifierError
from peagle.hidden_states.batch import StoredRow
from peagle.train.batches import Rows, generator
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.weights import TensorFiles, VerifierHead

# Positions from which the mean and spread of verifier states are taken: their error is then below one percent.
NUM_STATISTICS_POSITIONS = 16_384
# An unused embedding row may be zeros, at which the norm behind it has no useful gradient.
_TINY_ROW = 0.1
# Families whose layers are of a drafter's own type: same tensors, same norms, no biases, one dense MLP.
SAME_LAYERS = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
# Shares of the last and the last but one auxiliary state in what `fc` passes on at first; the rest is small noise.
_LAST, _BEFORE, _NOISE = 0.7, 0.3, 0.2
# Positions to fit on for each input of the widest solve, and the most of them: they are held in memory, as stored.
_POSITIONS_PER_INPUT, _MOST_POSITIONS = 24, 65_536
# Share of an input's mean square that is added to each.
_RIDGE = 1e-3
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def first_rows(rows: Rows, num_positions: int) -> list[StoredRow]:
    """The first rows with their states, as many as have `num_positions` together (or all)."""
    stored, count = [], 0
    for row_id in rows.extents():
        row = rows.read(row_id)
        if not torch.isfinite(row.aux_states[-1]).all():  # nothing is drafted from it, so nobody looked
            row = replace(row, aux_states=row.aux_states[:-1])
        stored.append(row)
        count += stored[-1].aux_states.shape[0]
        if count >= num_positions:
            break
    return stored


def empty(config: DrafterConfig, draft_ids: Tensor | None, device: torch.device) -> Drafter:
    """A drafter whose weights are still to come, from another rank: nothing is drawn, read or fitted for it."""
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.to_empty(device=device)
    drafter.set_frequencies()
    _set_vocabulary(drafter, draft_ids)
    return drafter


def _set_vocabulary(drafter: Drafter, draft_ids: Tensor | None) -> None:
    if draft_ids is not None:
        drafter.d2t.copy_(draft_ids - torch.arange(draft_ids.numel()))
        drafter.t2d.zero_()
        drafter.t2d[draft_ids] = True


def initialise(
    config: DrafterConfig,
    embedding: Tensor,
    head: VerifierHead,
    draft_ids: Tensor | None,
    stored: list[StoredRow],
    seed: int,
) -> Drafter:
    """Make a new drafter in float32 on the CPU.

    Args:
        config: its shape.
        embedding: the verifier's, its scale folded in, [vocab_size, hidden_size].
        head: the verifier's whole head. Its scale is folded into the drafter's.
        draft_ids: verifier ids of the draft vocabulary, ascending, int64, [draft_vocab_size]; None if not pruned.
        stored: real states, for the scale of `mask_hidden`; see `first_rows`.
        seed: of the random weights and of the noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(embedding)
        drafter.norm.weight.copy_(head.norm_weight)
        weight = head.weight if draft_ids is None else head.restricted(draft_ids).weight
        drafter.lm_head.weight.copy_(weight.float() * head.logit_scale)
        _set_vocabulary(drafter, draft_ids)
        if drafter.mask_hidden is not None:
            drafter.mask_hidden.copy_(mask_hidden(stored, seed).view_as(drafter.mask_hidden))
            _wake_row(drafter.embed_tokens.weight, config.mask_token_id or 0, seed)
    return drafter


def mask_hidden(stored: list[StoredRow], seed: int) -> Tensor:
    """A start for `mask_hidden` that looks like a real state: their mean, and noise of their spread, by dimension.

    Args:
        stored: real states, of which the first `NUM_STATISTICS_POSITIONS` or a few more are taken.
        seed: of the noise.

    Returns:
        float32, [num_aux_layers * hidden_size].
    """
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for row in stored:
        states = row.aux_states.double()
        count, total, squares = count + states.shape[0], total + states.sum(0), squares + states.square().sum(0)
        if count >= NUM_STATISTICS_POSITIONS:
            break
    mean = total / count
    spread = (squares / count - mean.square()).clamp(min=0).sqrt()
    noise = torch.randn(mean.shape, generator=generator("mask_hidden", seed), dtype=torch.float64)
    return (mean + spread * noise).float()


def _wake_row(embedding: Tensor, row: int, seed: int) -> None:
    """Give the mask token's row the scale of the others if it has (almost) none, as rows that no token uses may."""
    scale = embedding.square().mean(1).sqrt()
    usual = scale.median()
    if scale[row] < _TINY_ROW * usual:
        noise = torch.randn(embedding.shape[1], generator=generator("mask_token", seed))
        embedding[row] = noise.to(embedding.dtype) * usual


def start_from_verifier(drafter: Drafter, verifier: VerifierConfig) -> str | None:
    """Copy the verifier's last layers into a new drafter (float32, on the CPU), in place.

    Layer 0 reads [embedding, state]: the state's half takes the verifier's projections, the embedding's half stays
    random.

    Returns:
        None if done; else why not, in a few words, and nothing is changed.
    """
    config = drafter.config
    if SAME_LAYERS.get(verifier.model_type) != config.layer_type or config.attention_bias:
        return f"{verifier.model_type} layers are of another type than the drafter's ({config.layer_type})"
    if verifier.quantization is not None:
        return f"the verifier is quantised ({verifier.quantization})"
    if config.num_layers > verifier.num_layers:
        return f"the verifier has {verifier.num_layers} layers only"
    try:
        layers = _layers(drafter, verifier)
    except VerifierError as error:
        return str(error)
    hidden = config.hidden_size
    with torch.no_grad():
        own = drafter.state_dict()
        for name, weight in layers.items():
            target = own[name]
            if target.shape == weight.shape:
                target.copy_(weight)
            else:
                target[:, hidden:].copy_(weight)
        drafter.fc.weight.mul_(_NOISE)
        passed = torch.eye(hidden)
        drafter.fc.weight[:, -hidden:].add_(passed * (_LAST if len(config.aux_layer_ids) > 1 else 1.0))
        if len(config.aux_layer_ids) > 1:
            drafter.fc.weight[:, -2 * hidden : -hidden].add_(passed * _BEFORE)
    return None


def _layers(drafter: Drafter, verifier: VerifierConfig) -> dict[str, Tensor]:
    """The verifier's tensors under the drafter's names; a VerifierError says what does not fit."""
    files = TensorFiles.open(verifier.name_or_path)
    first = verifier.num_layers - drafter.config.num_layers
    prefix = next((p for p in _PREFIXES if f"{p}layers.{first}.input_layernorm.weight" in files.file_of), None)
    if prefix is None:
        raise VerifierError("no tensors under the usual layer names")
    found: dict[str, Tensor] = {}
    for name, target in drafter.state_dict().items():
        if not name.startswith("layers."):
            continue
        _, index, leaf = name.split(".", 2)
        is_first = index == "0"
        if is_first and leaf == "input_layernorm.weight":
            continue  # of the embedding; the state's norm is `hidden_norm`
        theirs = "input_layernorm.weight" if is_first and leaf == "hidden_norm.weight" else leaf
        source = f"{prefix}layers.{first + int(index)}.{theirs}"
        if source not in files.file_of:
            raise VerifierError(f"no tensor {source}")
        weight = files.read(source).float()
        halves = is_first and weight.dim() == 2 and target.shape == (weight.shape[0], 2 * weight.shape[1])
        if weight.shape != target.shape and not halves:
            raise VerifierError(f"{source} is {list(weight.shape)}, the drafter's is {list(target.shape)}")
        found[name] = weight
    return found


def positions_wanted(config: DrafterConfig) -> int:
    """How many positions `fit_first_layer` asks for."""
    return min(_POSITIONS_PER_INPUT * config.aux_size, _MOST_POSITIONS)


@torch.no_grad()
def fit_first_layer(drafter: Drafter, stored: list[StoredRow], first_layer: int) -> int:
    """Fit `fc` and layer 0's projections, in place.

    Args:
        drafter: float32, its layers the verifier's from `first_layer` on. For a drafter of 8B's shapes the fit is some
            70 TFLOP: seconds on a GPU, minutes on a CPU.
        stored: real states, of which `positions_wanted` or a few more are taken.
        first_layer: the verifier's layer that layer 0 came from.

    Returns:
        Positions that were fitted on.
    """
    config, layer, device = drafter.config, drafter.decoder()[0], drafter.fc.weight.device
    hidden, ids = config.hidden_size, config.aux_layer_ids
    # 1. Each row's pair slots: (x_{i+1} [num_pairs], g_i of one position more [num_pairs + 1, aux_size]).
    rows: list[tuple[Tensor, Tensor]] = []
    num_positions = 0
    for row in stored:
        if num_positions >= positions_wanted(config):
            break
        pair_ids = torch.tensor(row.row.input_ids[1 : len(row.aux_states)], dtype=torch.int64)
        rows.append((pair_ids, row.aux_states[: len(pair_ids) + 1]))
        num_positions += len(pair_ids)
    # 2. What is to be reached: the stream that the first copied layer reads, or the nearest that is known, one position
    # on, and what that layer makes of it.
    place = min(range(len(ids)), key=lambda k: abs(ids[k] - first_layer))
    projections = [getattr(layer.self_attn, name).weight for name in _PROJECTIONS]
    own = [weight[:, -hidden:].clone() for weight in projections]
    own_output = layer.self_attn.o_proj.weight.clone()

    def documents() -> Iterator[tuple[Tensor, Tensor]]:
        """One at a time on the device: all of them are some gigabytes."""
        for pair_ids, states in rows:
            yield pair_ids.to(device), states.to(device)

    def wanted(states: Tensor) -> Tensor:
        return states[1:, place * hidden : (place + 1) * hidden].float()

    def read(pair_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return layer.enter(*drafter.embed_pairs(pair_ids, states[:-1].float()))

    # 3. `fc`: from a position's states to the next one's stream.
    solve = _Solve()
    for _, states in documents():
        given, share = states[:-1].float(), _share(wanted(states))
        given = given if drafter.input_norm is None else drafter.input_norm(given)
        solve.add(given * share, wanted(states) * share)
    drafter.fc.weight.copy_(solve.weight())
    # 4. Queries, keys and values: what the verifier's projections read of the stream, from what layer 0 reads.
    solve = _Solve()
    for pair_ids, states in documents():
        solve.add(read(pair_ids, states)[0], layer.hidden_norm(wanted(states)))
    lift = solve.weight()
    for weight, theirs in zip(projections, own):
        weight.copy_(theirs @ lift)
    # 5. The output projection: what is still missing behind the attention.
    solve = _Solve()
    for pair_ids, states in documents():
        entered, residual = read(pair_ids, states)
        state, share = wanted(states), _share(wanted(states))
        attended = _attended(drafter, entered, projections)
        right = state + _attended(drafter, layer.hidden_norm(state), own) @ own_output.T
        solve.add(attended * share, (right - residual - attended @ own_output.T) * share)
    layer.self_attn.o_proj.weight.add_(solve.weight())
    return num_positions


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
    cos, sin = drafter.rotary(torch.arange(len(entered), device=entered.device), entered.dtype)
    q, k, v = (one.transpose(0, 1) for one in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return found.transpose(0, 1).flatten(1)
