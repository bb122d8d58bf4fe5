"""The two-pass step: exact gradients, one block's activations in memory at a time.

1. Base pass: the pair slots as a causal language model; each layer's keys and values are kept.
2. Blocks of neighbouring anchors: their mask slots (EAGLE-3: their chains, `eagle3.py`) run against detached keys and
   values, the loss of the block (its pair slots included) is formed and sent backward at once; gradients of keys,
   values and states add up.
3. One backward through the base pass with what was collected.

No N x N mask and no [num_slots, vocab_size] logits exist anywhere. Source: the paper's Algorithm 1 (sequence
partitioning), arXiv 2602.01469, without its recomputation of the context for every segment.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.network import Drafter, Entered
from peagle.hidden_states.batch import Batch
from peagle.kernels import cpu as kernels
from peagle.kernels.cpu import Tile
from peagle.layout.cod import CodLayout
from peagle.train.attention import HEADS, AttentionName, BasePass, MaskSlots, base_attention, rollout_attention
from peagle.train.eagle3 import chain_rollout
from peagle.train.loss import LossName, Targets, head_loss, plan_labels
from peagle.verifier.weights import VerifierHead

# Queries of one attention call: a call's slots see one another's keys only inside their chains, so fewer of them waste
# less, and more of them make larger matrix products. Measured at 2,048 tokens; flat between 96 and 256.
PART_SLOTS = 160
FLEX_CHAIN_SLOTS = 1024
# Pair slots from which pages go back to the system between the parts of a step.
LONG_PACK = 6144
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step is computed. Only `loss` and `depth_weights` change what is computed."""

    loss: LossName
    depth_weights: tuple[float, ...]
    """Weight of each depth's slots in the loss, depth 0 first."""
    attention: AttentionName
    block_slots: int
    """Slots (pair slots that are supervised, and mask slots) of a block; at least one anchor's."""
    chunk_rows: int
    """Rows whose logits are held at a time."""
    checkpoint_base: bool
    """Keep one hidden state per layer and token of the base pass, and recompute the rest in its backward."""


@dataclass(frozen=True)
class StepResult:
    """Sums over supervised slots; divide by counts once all batches and ranks are added."""

    loss_sum: Tensor
    """Sum of each depth's losses, not weighted, float64, [num_depths]."""
    correct: Tensor
    """Slots of each depth whose choice is the verifier's, int64, [num_depths]."""
    total: Tensor
    """Supervised slots of each depth, int64, [num_depths]."""
    prefix_correct: Tensor
    """Chains whose slots of depths 0 .. k all are correct, int64, [num_depths]; only with the full layout a measure."""


@dataclass(frozen=True)
class _Block:
    """Anchors first .. last-1 of the pack, and the range of the layout's slots that hang on them."""

    first_anchor: int
    last_anchor: int
    first_slot: int
    last_slot: int


def train_step(
    drafter: Drafter,
    head: VerifierHead,
    batch: Batch,
    layout: CodLayout,
    total_supervised: float,
    settings: StepSettings,
) -> StepResult:
    """Add the gradient of sum(loss of supervised slots) / total_supervised to each parameter's `.grad`.

    Args:
        drafter: parameters with `requires_grad` are trained; `lm_head` is included only if it asks for gradients.
        head: the verifier's, restricted to the draft vocabulary.
        batch: packed pair slots; if none is supervised, nothing is added.
        layout: slots of depth >= 1 of this batch.
        total_supervised: the count of supervised slots of the WHOLE optimizer step, over batches and ranks.
        settings: see `StepSettings`.
    """
    result = _step(drafter, head, batch, layout, settings, total_supervised=total_supervised, choices=None)
    give_back_pages(batch.pair_ids.numel(), batch.pair_ids.device)
    return result


@torch.no_grad()
def validate_step(
    drafter: Drafter,
    head: VerifierHead,
    batch: Batch,
    layout: CodLayout,
    settings: StepSettings,
    choices: Tensor | None,
) -> StepResult:
    """The same sums without gradients; `choices` is the verifier's choice per label (`Targets.choices`), or None."""
    return _step(drafter, head, batch, layout, settings, total_supervised=None, choices=choices)


def num_supervised(batch: Batch, layout: CodLayout) -> int:
    """Supervised slots of a batch, over all depths."""
    return int(batch.is_supervised.sum()) + int(layout.is_supervised.sum())


def _step(
    drafter: Drafter,
    head: VerifierHead,
    batch: Batch,
    layout: CodLayout,
    settings: StepSettings,
    *,
    total_supervised: float | None,
    choices: Tensor | None,
) -> StepResult:
    """One batch; `total_supervised` None computes no gradients."""
    sums = _Sums(layout.num_depths, batch.pair_ids.device)
    num_rows = num_supervised(batch, layout)
    if num_rows == 0:
        return sums.result()
    with_grad = total_supervised is not None

    # 1. What the loss compares with: one row per label.
    with torch.no_grad():
        targets = Targets(head.normed(batch.last_states), head, choices)  # [num_labels, hidden_size]

    # 2. Base pass over the pair slots, padding left out.
    num_pairs = int((batch.document_ids >= 0).sum())
    bounds = _document_bounds(batch.document_ids[:num_pairs])
    embeds, hidden = drafter.embed_pairs(batch.pair_ids[:num_pairs], batch.aux_states[:num_pairs])
    cos, sin = drafter.rotary(batch.rope_pos[:num_pairs], hidden.dtype)  # [num_pairs, 1, head_dim]
    attend = base_attention(settings.attention, bounds, hidden.device)
    carried, keys, values = drafter.base_pass(
        embeds=embeds, hidden=hidden, cos=cos, sin=sin, attend=attend,
        checkpoint=settings.checkpoint_base and with_grad,
    )  # fmt: skip
    give_back_pages(num_pairs, carried.device)
    states = drafter.norm(carried)  # [num_pairs, hidden_size]
    states_read, state_grad = states.detach(), torch.zeros_like(states) if with_grad else None
    base = BasePass(
        embeds=embeds,
        carried=drafter.fed_back(carried, states),
        keys=keys,
        values=values,
        bounds=bounds,
        with_grad=with_grad and layout.num_slots > 0,
    )
    masks = _MaskLayer0(drafter, with_grad) if layout.num_slots and drafter.mask_hidden is not None else None
    weight = drafter.lm_head.weight
    weight_grad = torch.zeros_like(weight) if with_grad and weight.requires_grad else None
    logits_buffer = weight.new_empty(min(settings.chunk_rows, num_rows), weight.shape[0])

    for block in _blocks(batch.is_supervised[:num_pairs], layout, settings.block_slots):
        # 3. States of the block's mask slots, or of its chains' steps.
        slots = slice(block.first_slot, block.last_slot)
        anchor, depth = layout.anchor_pos[slots], layout.depth[slots]
        rolled = None
        if anchor.numel():
            with torch.set_grad_enabled(with_grad):  # -> [num_slots, hidden_size]
                if masks is not None:
                    rolled = _rollout(
                        drafter, masks, batch, base, anchor=anchor, depth=depth, attention=settings.attention
                    )
                else:
                    # A chain's steps lie apart among the keys: no closed form for flex, so sdpa, in larger parts.
                    is_flex = settings.attention == "flex"
                    heads = HEADS["sdpa" if is_flex else settings.attention]
                    part_slots = FLEX_CHAIN_SLOTS if is_flex else PART_SLOTS
                    rolled = chain_rollout(
                        drafter, batch, base, anchor=anchor, depth=depth, heads=heads, part_slots=part_slots
                    )

        # 4. Rows of the head: the block's supervised pair slots, then its supervised mask slots; sorted by label.
        pairs = torch.arange(block.first_anchor, block.last_anchor, device=anchor.device)
        pairs = pairs[batch.is_supervised[pairs]]
        chosen = layout.is_supervised[slots].nonzero()[:, 0]
        row_depth = torch.cat([torch.zeros_like(pairs), depth[chosen]])  # [num_rows]
        row_anchor = torch.cat([pairs, anchor[chosen]])
        label_rows = batch.label_of_pair[row_anchor + row_depth]
        order = torch.argsort(label_rows, stable=True)
        read = states_read[pairs]
        if rolled is not None:
            read = torch.cat([read, rolled.detach()[chosen]])  # [num_rows, hidden_size]
        row_weight = torch.full_like(label_rows, 1.0, dtype=read.dtype) / (total_supervised or 1.0)
        row_weight = row_weight * row_weight.new_tensor(settings.depth_weights)[row_depth]

        # 5. Loss, and its gradient by the states that the head reads.
        plan = plan_labels(label_rows[order].cpu(), settings.chunk_rows, weight.shape[0])
        plan = replace(plan, labels=plan.labels.to(order.device), label_of_row=plan.label_of_row.to(order.device))
        with torch.no_grad():
            rows = head_loss(
                states=read[order],
                weight=weight,
                plan=plan,
                row_weight=row_weight[order],
                targets=targets,
                loss=settings.loss,
                logits_buffer=logits_buffer,
                with_grad=with_grad,
                weight_grad=weight_grad,
            )
        sums.add(rows.loss, rows.is_correct, row_anchor[order], row_depth[order])
        if rows.grad is None or state_grad is None:
            continue

        # 6. Backward through the block; what it asks of the base pass is collected.
        read_grad = torch.empty_like(read)
        read_grad[order] = rows.grad
        state_grad[pairs] += read_grad[: pairs.numel()]
        if rolled is not None and chosen.numel():
            rolled_grad = torch.zeros_like(rolled)
            rolled_grad[chosen] = read_grad[pairs.numel() :]
            torch.autograd.backward([rolled], [rolled_grad])
            base.collect()

    # 7. One backward through the base pass, and through layer 0 of the mask slots.
    if state_grad is not None:
        give_back_pages(num_pairs, carried.device)
        needed = [(root, grad) for root, grad in [(states, state_grad), *base.gradients()] if root.requires_grad]
        torch.autograd.backward([root for root, _ in needed], [grad for _, grad in needed])
        if masks is not None:
            masks.backward()
        if weight_grad is not None:
            weight.grad = weight_grad if weight.grad is None else weight.grad.add_(weight_grad)
    return sums.result()


def _document_bounds(document_ids: Tensor) -> list[tuple[int, int]]:
    """Range of pair slots of each document, in order."""
    _, counts = torch.unique_consecutive(document_ids, return_counts=True)
    ends = counts.cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends))


def _rollout(
    drafter: Drafter,
    masks: _MaskLayer0,
    batch: Batch,
    base: BasePass,
    anchor: Tensor,
    depth: Tensor,
    attention: AttentionName,
) -> Tensor:
    """One block's mask slots: their states, [num_slots, hidden_size]."""
    is_native = attention == "native"
    part_slots = None if attention == "flex" else kernels.TILE_ROWS if is_native else PART_SLOTS
    parts = _attention_parts(anchor, depth, base.bounds, batch.document_ids, part_slots)
    context = slice(parts[0][1].first, parts[-1][1].last)
    rope_pos = batch.rope_pos[anchor] + depth
    tiles = []
    if is_native:
        for own, slots in parts:
            tiles.append(Tile(own, slice(slots.first - context.start, slots.last - context.start), slots.tile_mask))
    # In layer 0 mask slots are one vector turned by position: those at one position are equal queries.
    first_tiles = [replace(tile, distinct_id=rope_pos[tile.own].unique(return_inverse=True)[1].int()) for tile in tiles]

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = base.keys[index], base.values[index]
        if is_native:
            (base_k, k_grad), (base_v, v_grad) = keys.rows_and_grad(context), values.rows_and_grad(context)
            grads = None if k_grad is None or v_grad is None else (k_grad, v_grad)
            return kernels.attend(q, (base_k, base_v), (k, v), tiles if index else first_tiles, grads)
        out = []
        for own, slots in parts:
            seen = slice(slots.first, slots.last)
            pairs = keys.read(seen), values.read(seen)
            out.append(rollout_attention(attention, q[own], pairs, (k[own], v[own]), slots))
        return out[0] if len(out) == 1 else torch.cat(out)

    return drafter.norm(drafter.carried_pass(masks.entered, rope_pos, attend))


def _attention_parts(
    anchor: Tensor, depth: Tensor, bounds: list[tuple[int, int]], document_ids: Tensor, part_slots: int | None
) -> list[tuple[slice, MaskSlots]]:
    """Cut a block's slots into parts of one document and about `part_slots`, never inside a chain.

    Smaller parts mask away less. None: one part, of however many documents.
    """
    starts = (depth == 1).nonzero()[:, 0]
    documents = document_ids[anchor[starts]].tolist()
    cuts, begin, document = [], 0, documents[0]
    for here, after, own_document in zip(starts.tolist(), [*starts[1:].tolist(), anchor.numel()], documents):
        is_full = part_slots is not None and (own_document != document or after - begin > part_slots)
        if is_full and here > begin:
            cuts.append((begin, here))
            begin = here
        document = own_document
    cuts.append((begin, anchor.numel()))
    doc_start = torch.tensor([first for first, _ in bounds], device=anchor.device)[document_ids[anchor]]
    parts = []
    for begin, end in cuts:
        own, last = slice(begin, end), int(anchor[end - 1]) + 1
        slots = MaskSlots(
            anchor=anchor[own], depth=depth[own], doc_start=doc_start[own], first=int(doc_start[begin]), last=last
        )
        parts.append((own, slots))
    return parts


class _MaskLayer0:
    """Layer 0 of the mask slots, computed once; blocks add their gradients to detached copies."""

    def __init__(self, drafter: Drafter, with_grad: bool) -> None:
        embeds, hidden = drafter.embed_masks(1)
        made = drafter.enter(embeds, hidden)
        self._roots = [made.q, made.k, made.v, made.residual]
        self._leaves = [root.detach().requires_grad_(with_grad and root.requires_grad) for root in self._roots]
        self.entered = Entered(*self._leaves)

    def backward(self) -> None:
        """Send what the blocks collected on to `mask_hidden`, `fc`, layer 0 and the mask token's embedding."""
        pairs = [(root, leaf.grad) for root, leaf in zip(self._roots, self._leaves) if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])


def _blocks(is_supervised: Tensor, layout: CodLayout, block_slots: int) -> list[_Block]:
    """Cut the anchors into blocks of about `block_slots` rows; an anchor's chain is never cut."""
    num_pairs = is_supervised.numel()
    per_anchor = torch.bincount(layout.anchor_pos, minlength=num_pairs)
    slots_before = [0, *per_anchor.cumsum(0).tolist()]
    rows_before = [0, *(per_anchor + is_supervised.to(torch.int64)).cumsum(0).tolist()]
    blocks, first = [], 0
    for anchor in range(num_pairs):
        if rows_before[anchor + 1] - rows_before[first] > block_slots and anchor > first:
            blocks.append(_Block(first, anchor, slots_before[first], slots_before[anchor]))
            first = anchor
    blocks.append(_Block(first, num_pairs, slots_before[first], slots_before[num_pairs]))
    return [b for b in blocks if rows_before[b.last_anchor] > rows_before[b.first_anchor]]


class _Sums:
    """Adds up a step's rows by depth."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self.loss = torch.zeros(num_depths, dtype=torch.float64, device=device)
        self.correct, self.total, self.prefix = (
            torch.zeros(num_depths, dtype=torch.int64, device=device) for _ in range(3)
        )

    def add(self, loss: Tensor, is_correct: Tensor, anchor: Tensor, depth: Tensor) -> None:
        """Rows in any order; all rows of an anchor come in one call."""
        self.loss.index_add_(0, depth, loss.to(torch.float64))
        self.correct.index_add_(0, depth, is_correct.to(torch.int64))
        self.total.index_add_(0, depth, torch.ones_like(depth))
        if not depth.numel():
            return
        base = int(anchor.min())
        table = torch.zeros(int(anchor.max()) - base + 1, self.total.numel(), dtype=torch.int64, device=depth.device)
        table[anchor - base, depth] = is_correct.to(torch.int64)
        self.prefix += table.cumprod(1).sum(0)

    def result(self) -> StepResult:
        return StepResult(self.loss, self.correct, self.total, self.prefix)


@functools.cache
def keep_pages() -> bool:
    """Have this process keep the memory that it frees, rather than give it back and ask for it again.

    By itself glibc's allocator maps each tensor of 32 MB or less anew once it was given back, and the system clears its
    pages: 3 to 6 % of a step on a CPU. The peak stays the same. Returns whether the allocator agreed (glibc only).
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    most = (1 << 31) - 1
    # Older releases take no threshold above 32 MB.
    mapped = mallopt(_M_MMAP_THRESHOLD, 1 << 30) or mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    return bool(mallopt(_M_TRIM_THRESHOLD, most) and mapped)


def give_back_pages(num_pairs: int, device: torch.device) -> None:
    """Between the parts of a step on a long pack: give the system the pages that no tensor lies in.

    One part's tensors leave holes that the next one's do not fit into, 0.36 of 2.1 GB at 8,192 tokens. It costs some
    tenths of a second: nothing beside a long pack, too much beside a short one.
    """
    if num_pairs >= LONG_PACK and device.type == "cpu":
        trim = _of_glibc("malloc_trim")
        if trim is not None:
            trim(0)


def _of_glibc(name: str) -> Any:
    """A function of the C library's allocator; None on other systems and with other libraries."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
