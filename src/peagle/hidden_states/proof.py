"""That states are the verifier's own, shown per row, whoever made them.

Each row by itself: its ids, shapes and numbers; no state that is constant, mostly zeros, that of another token, layer
or row; and the verifier's next-token choice wherever it is known. What only a second computation shows (another layer,
states late by a token, another row's) is compared with the first tokens of the row computed again, from the verifier's
weights or by a second server: for the first row of each server before it is trusted, then as often as `MOST_TIME`
allows."""

import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from peagle.data.records import TokenRow
from peagle.errors import StoreError
from peagle.hidden_states.store import StoreSpec
from peagle.verifier.source import RowStates, first_difference
from peagle.verifier.weights import VerifierHead

logger = logging.getLogger(__name__)

PREFIX_TOKENS = 128
"""Of a row, computed again: causal attention gives them the same states as in the whole row."""
MOST_TIME = 0.04
"""Share of a run's time that proofs may take before the next row is computed again."""
TOLERANCE = {torch.float32: 5e-3, torch.float16: 0.03, torch.bfloat16: 0.08}
"""Largest median over positions of a layer's relative error. Measured between kernels (vLLM and Transformers, eleven
families): 2e-4 in float32, 0.016 in bfloat16, where single tokens of a mixture of experts differ by 0.8; a neighbouring
layer differs by 0.2 and more."""
_QUANTISED_TOLERANCE = 0.25  # activations are quantised by one engine and not by the other
_CHUNK = 256  # positions whose logits over the whole vocabulary are held at once
_SAMPLED_TOKENS = 1024  # of the vocabulary, which a choice must beat where the whole head would take too long
_MOST_ZEROS = 0.1
_ROWS_REMEMBERED = 4096

Recompute = Callable[[list[int], str], Mapping[int, Tensor] | None]
"""Token ids, and the origin of what came for them, to states by layer id, on the CPU, [num_tokens, hidden_size] each:
of all layers, or at least those wanted. None if that turns out to be impossible here."""


class StateProof:
    """Judges every row of one run; from any thread.

    Args:
        spec: what states must be like.
        head: the verifier's, float32 on the CPU; None: choices are not compared.
        again: computes tokens again; None: nothing here can, which is logged.
        is_quantised: the verifier's layers are.
        checks_all: compare choices over the whole vocabulary, however long that takes (`--validate-outputs`).
    """

    def __init__(
        self,
        *,
        spec: StoreSpec,
        head: VerifierHead | None,
        again: Recompute | None,
        is_quantised: bool,
        checks_all: bool,
    ) -> None:
        self._spec, self._head, self._again, self._checks_all = spec, head, again, checks_all
        dtype = spec.torch_dtype
        self._tolerance = _QUANTISED_TOLERANCE if is_quantised else TOLERANCE[dtype]
        self._sample = None if head is None else head.restricted(_sampled_ids(head))
        self._lock, self._once = threading.Lock(), threading.Lock()
        self._proved: set[str] = set()
        self._last_proved = ""
        self._remembered: OrderedDict[tuple[int, int], tuple[int, str]] = OrderedDict()
        self._started_s = time.monotonic()
        self.num_rows = self.num_recomputed = 0
        self.seconds = self.first_s = self._last_s = 0.0
        """Of all proofs, of the first row computed again, which is always done, and of the latest."""

    def fault(self, answer: RowStates, row: TokenRow) -> str | None:
        """Tell what is wrong with a row's states, in one phrase; None: nothing.

        Raises:
            StoreError: computed again, they are others: no row of that verifier can be trusted.
        """
        started_s = time.monotonic()
        # 1. by itself
        wrong = answer.fault or row_fault(answer, row, self._spec) or self._of_another_row(answer)
        if wrong is None and self._head is not None:
            sample = self._sample if self._is_behind(0.0) and not self._checks_all else None
            wrong = choice_fault(answer, self._head, self._spec.torch_dtype, sample)
        # 2. computed again: one at a time, and nothing of a verifier passes before its first
        if wrong is None and self._is_due(answer.origin):
            with self._once:
                if self._is_due(answer.origin):
                    self._compare(answer)
        with self._lock:
            self.seconds += time.monotonic() - started_s
            self.num_rows += wrong is None
        return wrong

    def summary(self) -> str:
        """What was shown and what it cost, for the log."""
        whole_s = time.monotonic() - self._started_s
        later_s = self.seconds - self.first_s
        return (
            f"{self.num_rows} rows proved, {self.num_recomputed} of them computed again, in {later_s:.1f} s "
            f"({later_s / max(whole_s, 1e-9):.1%} of the time), and {self.first_s:.1f} s for the first"
        )

    def _is_behind(self, needed_s: float) -> bool:
        """Whether proofs would take too much of the run with so many seconds more."""
        spent_s = self.seconds - self.first_s
        return spent_s + needed_s > MOST_TIME * (time.monotonic() - self._started_s)

    def _is_due(self, origin: str) -> bool:
        return self._again is not None and (origin not in self._proved or not self._is_behind(self._last_s))

    def _compare(self, answer: RowStates) -> None:
        """Compare the row's first tokens with what the verifier gives here."""
        assert self._again is not None
        ids, spec = answer.input_ids[:PREFIX_TOKENS], self._spec
        started_s = time.monotonic()
        own = self._again(ids, answer.origin)
        self._last_s = time.monotonic() - started_s
        self.first_s = self.first_s or self._last_s
        if own is None:
            self._again = None
            return
        states = torch.cat([answer.aux_states, answer.last_states], -1)[: len(ids)].view(len(ids), -1, spec.hidden_size)
        wrong = layer_fault(states, (*spec.aux_layer_ids, spec.num_layers), own, self._tolerance)
        if wrong is not None:
            since = f"; rows after {self._last_proved} were not compared: remove them" if self._last_proved else ""
            raise StoreError(
                f"row {answer.row_id}: {wrong}{f' ({answer.origin.split()[0]})' if answer.origin else ''}{since}"
            )
        self._proved.add(answer.origin)
        self._last_proved = answer.row_id
        self.num_recomputed += 1

    def _of_another_row(self, answer: RowStates) -> str | None:
        """Find a row with other tokens that came with the very states of this one, at the same position."""
        ids, last = answer.input_ids, len(answer.input_ids) - 1
        wrong = None
        for position in sorted({last, *(p for p in (7, 31, 127, 511, 2047) if p < last)}):
            state = answer.last_states[position].contiguous()
            key = (position, hash(state.view(torch.uint8).numpy().tobytes()))
            mine = hash(tuple(ids[: position + 1]))
            with self._lock:
                theirs, row_id = self._remembered.setdefault(key, (mine, answer.row_id))
                if len(self._remembered) > _ROWS_REMEMBERED:
                    self._remembered.popitem(last=False)
            if theirs != mine:
                wrong = f"it came with another row's states, those of {row_id} at position {position}"
        return wrong


def row_fault(answer: RowStates, row: TokenRow, spec: StoreSpec) -> str | None:
    """Compare a source's answer with the row it is for: None, or what is wrong with its ids, shapes or numbers.

    A state that is constant over its dimensions, a layer of which a tenth is zeros, two layers that are equal anywhere,
    and equal states of different tokens do not come from a verifier. (Layer 0, the embedding, may give two tokens one
    state, and one without weights a zero.)"""
    if answer.input_ids != row.input_ids:
        return f"the verifier read other token ids, first at index {first_difference(answer.input_ids, row.input_ids)}"
    num_tokens, hidden = len(row.input_ids), spec.hidden_size
    ids = torch.tensor(row.input_ids)
    layers: dict[int, Tensor] = {}
    sums: dict[int, Tensor] = {}  # layer id -> a number per position, which equal states have in common
    for name, whole, layer_ids in (
        ("aux_states", answer.aux_states, spec.aux_layer_ids),
        ("last_states", answer.last_states, (spec.num_layers,)),
    ):
        # 1. shape and numbers
        expected = [num_tokens, len(layer_ids) * hidden]
        if list(whole.shape) != expected:
            return f"{name} have shape {list(whole.shape)}, expected {expected}"
        states = whole.to(spec.torch_dtype).view(num_tokens, len(layer_ids), hidden)
        least, most = torch.aminmax(states, dim=-1)
        broken = ~(torch.isfinite(least) & torch.isfinite(most)).all(-1)
        if broken.any():
            return f"{name} hold NaN or infinity, first at position {int(broken.nonzero()[0])}"
        num_zeros = hidden * num_tokens - torch.count_nonzero(states, dim=(0, 2))
        # 2. what no verifier computes
        for place, layer_id in enumerate(layer_ids):
            layer = layers[layer_id] = states[:, place]
            sums[layer_id] = layer[:, :: max(1, hidden // 16)].double() @ _weights(hidden)
            if layer_id:
                flat = (least[:, place] == most[:, place]).nonzero()
                if len(flat):
                    value = float(most[int(flat[0]), place])
                    return f"states of layer {layer_id} are {value:g} throughout, first at position {int(flat[0])}"
                if num_zeros[place] > _MOST_ZEROS * hidden * num_tokens:
                    share = float(num_zeros[place]) / (hidden * num_tokens)
                    return f"states of layer {layer_id} are zero in {share:.0%} of their numbers"
                if (twin := _twin(sums[layer_id], ids, layer)) is not None:
                    return f"states of layer {layer_id} repeat: those of positions {twin[0]} and {twin[1]} are equal"
    for place, layer_id in enumerate(spec.aux_layer_ids):
        for other in (*spec.aux_layer_ids[place + 1 :], spec.num_layers):
            same = (sums[layer_id] == sums[other]).nonzero() if other != layer_id else ()
            if len(same) and torch.equal(layers[layer_id][same[0]], layers[other][same[0]]):
                return f"states of layers {layer_id} and {other} are equal, first at position {int(same[0])}"
    return None


@functools.cache
def _weights(hidden: int) -> Tensor:
    count = len(range(0, hidden, max(1, hidden // 16)))
    return torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5


def _twin(sums: Tensor, ids: Tensor, states: Tensor) -> tuple[int, int] | None:
    """Two positions of different tokens with equal states; None if there are none."""
    ordered, order = sums.sort(stable=True)
    equal = (ordered[1:] == ordered[:-1]) & (ids[order[1:]] != ids[order[:-1]])
    for place in equal.nonzero()[:, 0].tolist():
        one, other = sorted((int(order[place]), int(order[place + 1])))
        if torch.equal(states[one], states[other]):
            return one, other
    return None


def choice_fault(answer: RowStates, head: VerifierHead, dtype: torch.dtype, sample: VerifierHead | None) -> str | None:
    """Check that head(norm(last_states)) reproduces the verifier's own next-token choice, computed in `dtype`.

    `sample` is the head of some tokens: only those are asked whether one of them wins over the choice.

    Returns:
        None, or the first position at which another token clearly wins, or at which half of the vocabulary ties, so
        that any choice would do. A tie within the rounding of `dtype` is none: the tolerance is four units in the last
        place of the largest logit, and 1e-3 of it in float32.
    """
    slack = 1e-3 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for start in range(0, len(answer.choice_pos), _CHUNK):
        positions = answer.choice_pos[start : start + _CHUNK]
        ids = torch.tensor(answer.choice_ids[start : start + _CHUNK], device=head.weight.device)
        normed = head.normed(answer.last_states[positions].to(head.weight.device))
        logits = (sample or head).logits(normed).float()
        if sample is None:
            chosen = logits.gather(-1, ids[:, None])[:, 0]
        else:
            chosen = head.restricted(ids).logits(normed).float().diagonal()
        best, best_ids = logits.max(-1)
        allowed = slack * torch.maximum(logits.abs().amax(-1), chosen.abs())
        num_best = (logits >= (best - allowed)[:, None]).sum(-1)
        ties = (4 * num_best > 3 * logits.shape[-1]).nonzero()
        if len(ties):
            where = positions[int(ties[0])]
            return f"head(norm(last_states)) chooses no token after position {where}: most of its logits tie"
        wrong = (best - chosen > allowed).nonzero()
        if len(wrong):
            at = int(wrong[0])
            best_id = int(best_ids[at]) if sample is None else int(_sampled_ids(head)[best_ids[at]])
            return (
                f"head(norm(last_states)) chooses token {best_id} after position {positions[at]}, the verifier itself "
                f"{int(ids[at])} (logits differ by {float(best[at] - chosen[at]):.3g}): wrong norm, head or layer"
            )
    return None


def _sampled_ids(head: VerifierHead) -> Tensor:
    size = head.weight.shape[0]
    return torch.arange(0, size, max(1, size // _SAMPLED_TOKENS))


def layer_fault(states: Tensor, layer_ids: Sequence[int], own: Mapping[int, Tensor], tolerance: float) -> str | None:
    """Compare states with those computed again, `own`: None, or the first layer that is another, and which one it is.

    A layer is the one asked for if the median over positions of its relative error is within `tolerance`, no other
    layer is nearer, and at most a quarter of the positions are plainly others (routers of experts in bfloat16 may
    decide otherwise at a few).

    Args:
        states: [num_tokens, num_layers, hidden_size]
        layer_ids: of `states`.
    """
    for place, layer_id in enumerate(layer_ids):
        mine = states[:, place].float()
        errors = {one: _errors(mine, theirs.float()) for one, theirs in own.items()}
        medians = {one: float(error.median()) for one, error in errors.items()}
        nearest = min(medians, key=lambda one: medians[one])
        error = medians[layer_id]
        if error <= tolerance and error <= medians[nearest] and (errors[layer_id] > 0.5).float().mean() <= 0.25:
            continue
        if medians[nearest] <= tolerance and nearest != layer_id:
            return (
                f"what came as layer {layer_id} is the verifier's layer {nearest} (error {medians[nearest]:.2g}; of "
                f"{layer_id}: {error:.2g}): the layers asked for were not extracted"
            )
        late = len(mine) > 1 and float(_errors(mine[1:], own[layer_id][:-1].float()).median()) <= tolerance
        why = "they are late by one token" if late else f"off by {error:.2g} of their size, allowed is {tolerance:g}"
        return f"states of layer {layer_id} are not what the verifier gives here: {why}"
    return None


def _errors(states: Tensor, own: Tensor) -> Tensor:
    """Relative error of each position, [num_tokens]."""
    return (states - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-12)
