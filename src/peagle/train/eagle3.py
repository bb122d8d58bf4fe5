"""EAGLE-3's rollout: test-time training with teacher forcing, a block of neighbouring anchors at a time.

Where P-EAGLE fills slot (a, d) with the mask token, EAGLE-3 runs d steps: slot (a, d) reads the true token x_{a+d+1}
and the drafter's own state of slot (a, d - 1). Both see the same pair slots and their own chain, and predict x_{a+d+2};
the layout, the loss and what stays in memory are the same.

Worked example, anchor 3 of one document, two steps beyond the base pass (step 0, which is the pair slot):

    slot     token  state                 rotary  sees keys of                      predicts
    (3, 0)   x_4    g_3 through fc        3       pair slots 0 .. 3                 x_5
    (3, 1)   x_5    carried from (3, 0)   4       pair slots 0 .. 3, (3, 1)         x_6
    (3, 2)   x_6    carried from (3, 1)   5       pair slots 0 .. 3, (3, 1), (3, 2) x_7

Source: EAGLE-3, arXiv 2503.01840, section 3.2; equal to Speculators 0.9.0's Eagle3DraftModel on its recorded steps.
Differs: a chain never runs into the next document, and ends where its own supervision ends.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import Batch
from peagle.layout.cod import visible
from peagle.train.attention import BasePass, Heads


@dataclass(frozen=True)
class _ChainPart:
    """Chains first .. last-1 of a block, whose attention is one call per step, and the pair slots they may see."""

    first: int
    last: int
    seen: slice


@dataclass(frozen=True)
class _ChainStep:
    """One step of a block's chains: those that reach this depth."""

    chains: Tensor
    """Which chains, ascending, int64, [num_going]."""
    bounds: list[tuple[int, int]]
    """Range of `chains` that each part has."""
    masks: list[Tensor]
    """Of each part: what its chains see, pair slots first, then their own slots step by step."""


def chain_rollout(
    drafter: Drafter, batch: Batch, base: BasePass, anchor: Tensor, depth: Tensor, heads: Heads, part_slots: int
) -> Tensor:
    """Run the chains of one block.

    Args:
        drafter, batch, base: an EAGLE-3 drafter, a pack and its base pass.
        anchor, depth: the block's slots, sorted by (anchor, depth), no chain with a gap, int64, [num_slots].
        heads, part_slots: attention, and about how many chains one call of it takes.

    Returns:
        States after the final norm, in the order of the slots, [num_slots, hidden_size].
    """
    starts = (depth == 1).nonzero()[:, 0]
    first_anchor = anchor[starts]
    lengths = torch.diff(starts, append=starts.new_tensor([anchor.numel()]))
    parts = _parts(first_anchor.tolist(), base, part_slots)
    seen = [[(k.read(part.seen), v.read(part.seen)) for part in parts] for k, v in zip(base.keys, base.values)]
    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in base.keys]
    steps: list[_ChainStep] = []
    carried = base.carried.read(first_anchor)
    going = torch.arange(starts.numel(), device=anchor.device)
    states, slots = [], []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own[layer].append((k, v))
        out = []
        for index, (first, last) in enumerate(steps[-1].bounds):
            if first == last:
                continue
            ranges = [slice(*step.bounds[index]) for step in steps]
            base_k, base_v = seen[layer][index]
            all_k = torch.cat([base_k, *(keys[rows] for (keys, _), rows in zip(own[layer], ranges))])
            all_v = torch.cat([base_v, *(values[rows] for (_, values), rows in zip(own[layer], ranges))])
            out.append(heads(q[first:last], all_k, all_v, steps[-1].masks[index]))
        return out[0] if len(out) == 1 else torch.cat(out)

    for step in range(1, int(lengths.max()) + 1):
        reaching = (lengths[going] >= step).nonzero()[:, 0]
        going, carried = going[reaching], carried[reaching]
        steps.append(_step(going, steps, parts, first_anchor, batch.document_ids))
        at = first_anchor[going]
        entered = drafter.enter(base.embeds.read(at + step), carried)
        raw = drafter.carried_pass(entered, batch.rope_pos[at] + step, attend)
        states.append(drafter.norm(raw))
        slots.append(starts[going] + step - 1)
        carried = drafter.fed_back(raw, states[-1])
    return torch.cat(states)[torch.argsort(torch.cat(slots))]


def _parts(anchors: list[int], base: BasePass, part_slots: int) -> list[_ChainPart]:
    """Cut a block's chains into parts of about `part_slots`, and find the pair slots that each may see."""
    cuts = [*range(0, max(1, len(anchors) - part_slots // 2), part_slots), len(anchors)]
    return [
        _ChainPart(first, last, slice(base.first_visible(anchors[first]), anchors[last - 1] + 1))
        for first, last in pairwise(cuts)
    ]


def _step(
    going: Tensor, before: list[_ChainStep], parts: list[_ChainPart], anchors: Tensor, document_ids: Tensor
) -> _ChainStep:
    edges = torch.tensor([edge for part in parts for edge in (part.first, part.last)], device=going.device)
    places = torch.searchsorted(going, edges).tolist()
    bounds = list(zip(places[::2], places[1::2]))
    masks = []
    for index, part in enumerate(parts):
        mine = going[slice(*bounds[index])]
        keys = [step.chains[slice(*step.bounds[index])] for step in before] + [mine]
        pairs = torch.arange(part.seen.start, part.seen.stop, device=going.device)
        key_depth = [torch.full_like(chains, step) for step, chains in enumerate(keys, 1)]
        masks.append(
            visible(
                anchors[mine],
                torch.full_like(mine, len(keys)),
                torch.cat([pairs, *(anchors[chains] for chains in keys)]),
                torch.cat([torch.zeros_like(pairs), *key_depth]),
                document_ids,
            )
        )
    return _ChainStep(going, bounds, masks)
