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
from peagle.train.attention import BasePass, Heads


@dataclass(frozen=True)
class ChainPart:
    """Chains first .. last-1 of a block, whose attention is one call per step, and the pair slots they may see."""

    first: int
    last: int
    seen: slice


@dataclass(frozen=True, kw_only=True)
class ChainStep:
    """One step of a block's chains: those that reach this depth."""

    chains: Tensor
    """Which chains, ascending, int64, [num_going]."""
    reaching: Tensor
    """Their places among those of the step before, int64, [num_going]."""
    anchor: Tensor
    """Their anchors, int64, [num_going]."""
    doc_start: Tensor
    """First pair slot of their documents, int64, [num_going]."""
    bounds: tuple[tuple[int, int], ...]
    """Range of `chains` that each part has."""


@dataclass(frozen=True, kw_only=True)
class ChainPlan:
    """A block's chains; made on a CPU, see `plan_chains`."""

    anchor: Tensor
    """Of each chain, int64, [num_chains]."""
    parts: tuple[ChainPart, ...]
    steps: tuple[ChainStep, ...]
    order: Tensor
    """Brings the steps' slots, one step after another, into the order of the block's, int64, [num_slots]."""


def plan_chains(anchor: Tensor, depth: Tensor, doc_start: Tensor, part_slots: int) -> ChainPlan:
    """Who goes on in which step of a block.

    Args:
        anchor, depth: the block's slots on the CPU, sorted by (anchor, depth), no chain with a gap, int64, [num_slots].
        doc_start: first pair slot of each pair slot's document, int64, [num_pairs].
        part_slots: about how many chains one call of attention takes.
    """
    starts = (depth == 1).nonzero()[:, 0]
    first_anchor = anchor[starts]
    lengths = torch.diff(starts, append=starts.new_tensor([anchor.numel()]))
    cuts = [*range(0, max(1, starts.numel() - part_slots // 2), part_slots), starts.numel()]
    begins, anchors = doc_start[first_anchor].tolist(), first_anchor.tolist()
    parts = tuple(ChainPart(a, b, slice(begins[a], anchors[b - 1] + 1)) for a, b in pairwise(cuts))
    edges = torch.tensor([edge for part in parts for edge in (part.first, part.last)])
    going = torch.arange(starts.numel())
    steps, slots = [], []
    for step in range(1, int(lengths.max()) + 1):
        reaching = (lengths[going] >= step).nonzero()[:, 0]
        going = going[reaching]
        places = torch.searchsorted(going, edges).tolist()
        at = first_anchor[going]
        steps.append(
            ChainStep(
                chains=going,
                reaching=reaching,
                anchor=at,
                doc_start=doc_start[at],
                bounds=tuple(zip(places[::2], places[1::2])),
            )
        )
        slots.append(starts[going] + step - 1)
    return ChainPlan(anchor=first_anchor, parts=parts, steps=tuple(steps), order=torch.argsort(torch.cat(slots)))


def chain_rollout(drafter: Drafter, batch: Batch, base: BasePass, plan: ChainPlan, heads: Heads) -> Tensor:
    """Run the chains of one block.

    Args:
        drafter, batch, base: an EAGLE-3 drafter, a pack and its base pass.
        plan: the block's chains, on the device.
        heads: attention.

    Returns:
        States after the final norm, in the order of the block's slots, [num_slots, hidden_size].
    """
    seen = [[(k.read(part.seen), v.read(part.seen)) for part in plan.parts] for k, v in zip(base.keys, base.values)]
    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in base.keys]
    masks: list[Tensor] = []
    done: list[ChainStep] = []
    carried = base.carried.read(plan.anchor)
    states = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own[layer].append((k, v))
        out = []
        for index, (first, last) in enumerate(done[-1].bounds):
            if first == last:
                continue
            ranges = [slice(*step.bounds[index]) for step in done]
            base_k, base_v = seen[layer][index]
            all_k = torch.cat([base_k, *(keys[rows] for (keys, _), rows in zip(own[layer], ranges))])
            all_v = torch.cat([base_v, *(values[rows] for (_, values), rows in zip(own[layer], ranges))])
            out.append(heads(q[first:last], all_k, all_v, masks[index]))
        return out[0] if len(out) == 1 else torch.cat(out)

    for number, step in enumerate(plan.steps, 1):
        carried = carried[step.reaching]
        done.append(step)
        masks[:] = [_seen_by_chains(part, done, index) for index, part in enumerate(plan.parts)]
        entered = drafter.enter(base.embeds.read(step.anchor + number), carried)
        raw = drafter.carried_pass(entered, batch.rope_pos[step.anchor] + number, attend)
        states.append(drafter.norm(raw))
        carried = drafter.fed_back(raw, states[-1])
    return torch.cat(states)[plan.order]


def _seen_by_chains(part: ChainPart, steps: list[ChainStep], index: int) -> Tensor:
    """What the last step's chains of a part see: pair slots first, then the part's own slots step by step.

    The closed form of `layout.visible`: pair slots of the document up to the anchor, and the chain's own.
    bool, [num_going, num_pairs + num_own]
    """
    last = steps[-1]
    mine = slice(*last.bounds[index])
    pairs = torch.arange(part.seen.start, part.seen.stop, device=last.anchor.device)
    context = (pairs <= last.anchor[mine, None]) & (pairs >= last.doc_start[mine, None])
    chains = torch.cat([step.chains[slice(*step.bounds[index])] for step in steps])
    return torch.cat([context, chains == last.chains[mine, None]], 1)
