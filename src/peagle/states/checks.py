"""What must hold of a row's states before they may be stored."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.data.rows import TokenRow
from peagle.states.batch import StoredRow
from peagle.states.store import StoreSpec
from peagle.verifier.source import RowStates
from peagle.verifier.weights import VerifierHead

_CHUNK = 256  # label positions whose logits over the whole vocabulary are held at once


def fault(found: RowStates, row: TokenRow, spec: StoreSpec) -> str | None:
    """Compare a source's answer with the row it is for.

    Args:
        found: the answer.
        row: the row that was asked for.
        spec: the store's.

    Returns:
        None, or what is wrong: other ids (with the first index that differs), another number of states than tokens,
        another width, NaN or infinity.
    """
    if found.input_ids != row.input_ids:
        pairs = zip(found.input_ids, row.input_ids)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found.input_ids), len(row.input_ids)))
        return f"the verifier read other token ids, first at index {first}"
    num_tokens, width = len(row.input_ids), spec.hidden_size
    for name, states, columns in (
        ("aux_states", found.aux_states, width * len(spec.aux_layer_ids)),
        ("last_states", found.last_states, width),
    ):
        if tuple(states.shape) != (num_tokens, columns):
            return f"{name} have shape {list(states.shape)}, expected {[num_tokens, columns]}"
        if not torch.isfinite(states.to(spec.torch_dtype)).all():
            position = int((~torch.isfinite(states.to(spec.torch_dtype))).any(-1).nonzero()[0])
            return f"{name} hold NaN or infinity, first at position {position}"
    return None


def choice_fault(found: RowStates, head: VerifierHead, dtype: torch.dtype) -> str | None:
    """Check that head(norm(last_states)) reproduces the verifier's own next-token choice.

    Args:
        found: states with `choice_pos` and `choice_ids`.
        head: from the verifier's files, on any device.
        dtype: in which the verifier computed.

    Returns:
        None, or the first position at which another token clearly wins. A tie within the rounding of `dtype` is none:
        the tolerance is four units in the last place of the largest logit, and 1e-3 of it in float32.
    """
    slack = 1e-3 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for start in range(0, len(found.choice_pos), _CHUNK):
        positions = found.choice_pos[start : start + _CHUNK]
        ids = torch.tensor(found.choice_ids[start : start + _CHUNK], device=head.weight.device)
        states = found.last_states[positions].to(head.weight.device)
        logits = head.logits(head.normed(states)).float()
        best, best_ids = logits.max(-1)
        gap = best - logits.gather(-1, ids[:, None])[:, 0]
        wrong = (gap > slack * logits.abs().amax(-1)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return (
                f"head(norm(last_states)) chooses token {int(best_ids[at])} after position {positions[at]}, the "
                f"verifier itself {int(ids[at])} (logits differ by {float(gap[at]):.3g}): wrong norm, head or layer"
            )
    return None


def to_stored(found: RowStates, row: TokenRow, dtype: torch.dtype) -> StoredRow:
    """Keep what training reads: all auxiliary states, and last states where a label needs them, in `dtype`."""
    label_pos = torch.tensor(row.label_positions(), dtype=torch.int64)
    return StoredRow(row, _kept(found.aux_states, dtype), label_pos, _kept(found.last_states[label_pos], dtype))


def _kept(states: Tensor, dtype: torch.dtype) -> Tensor:
    return states.to("cpu", dtype).contiguous()
