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
from peagle.train.attention import HEADS, AttentionName, BasePass, base_attention, rollout_attention, zeros_for_sums
from peagle.train.blocks import BlockPlan, PackPlan, StepSettings, plan_pack, upload
from peagle.train.eagle3 import chain_rollout
from peagle.train.loss import Targets, head_loss
from peagle.verifier.weights import VerifierHead

# Pair slots from which pages go back to the system between the parts of a step.
LONG_PACK = 6144
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


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


def train_step(
    drafter: Drafter,
    head: VerifierHead,
    batch: Batch,
    layout: CodLayout,
    total_supervised: float,
    settings: StepSettings,
    plan: PackPlan | None = None,
) -> StepResult:
    """Add the gradient of sum(loss of supervised slots) / total_supervised to each parameter's `.grad`.

    Args:
        drafter: parameters with `requires_grad` are trained; `lm_head` is included only if it asks for gradients.
        head: the verifier's, restricted to the draft vocabulary.
        batch: packed pair slots; if none is supervised, nothing is added.
        layout: slots of depth >= 1 of this batch.
        total_supervised: the count of supervised slots of the WHOLE optimizer step, over batches and ranks.
        settings: see `StepSettings`.
        plan: what `plan_pack` made of batch and layout with these sizes and this attention, on their device. None: made
            here, which reads their indices back.
    """
    plan = plan or _planned(drafter, batch, layout, settings)
    result = _step(drafter, head, batch, plan, settings, total_supervised=total_supervised, choices=None)
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
    plan: PackPlan | None = None,
) -> StepResult:
    """The same sums without gradients; `choices` is the verifier's choice per label (`Targets.choices`), or None."""
    plan = plan or _planned(drafter, batch, layout, settings)
    return _step(drafter, head, batch, plan, settings, total_supervised=None, choices=choices)


def num_supervised(batch: Batch, layout: CodLayout) -> int:
    """Supervised slots of a batch, over all depths."""
    return int(batch.is_supervised.sum()) + int(layout.is_supervised.sum())


def _planned(drafter: Drafter, batch: Batch, layout: CodLayout, settings: StepSettings) -> PackPlan:
    device, dtype = batch.aux_states.device, batch.aux_states.dtype
    if device.type != "cpu":
        indices = ("pair_ids", "rope_pos", "document_ids", "label_of_pair")
        batch = replace(batch, **{name: getattr(batch, name).cpu() for name in indices})
    return upload(plan_pack(batch, layout.to(torch.device("cpu")), settings, drafter.config), device, dtype)


def _step(
    drafter: Drafter,
    head: VerifierHead,
    batch: Batch,
    plan: PackPlan,
    settings: StepSettings,
    *,
    total_supervised: float | None,
    choices: Tensor | None,
) -> StepResult:
    """One batch; `total_supervised` None computes no gradients."""
    sums = _Sums(plan.total)
    if plan.num_rows == 0:
        return sums.result()
    with_grad = total_supervised is not None

    # 1. What the loss compares with: one row per label.
    with torch.no_grad():
        targets = Targets(head.normed(batch.last_states), head, choices)  # [num_labels, hidden_size]

    # 2. Base pass over the pair slots, padding left out.
    num_pairs = plan.num_pairs
    embeds, hidden = drafter.embed_pairs(batch.pair_ids[:num_pairs], batch.aux_states[:num_pairs])
    cos, sin = drafter.rotary(batch.rope_pos[:num_pairs], hidden.dtype)  # [num_pairs, 1, head_dim]
    attend = base_attention(settings.attention, plan.bounds, plan.base_flex)
    carried, keys, values = drafter.base_pass(
        embeds=embeds, hidden=hidden, cos=cos, sin=sin, attend=attend,
        checkpoint=settings.checkpoint_base and with_grad,
    )  # fmt: skip
    give_back_pages(num_pairs, carried.device)
    states = drafter.norm(carried)  # [num_pairs, hidden_size]
    states_read, state_grad = states.detach(), torch.zeros_like(states) if with_grad else None
    has_slots = any(block.anchor.numel() for block in plan.blocks)
    base = BasePass(
        embeds=embeds,
        carried=drafter.fed_back(carried, states),
        keys=keys,
        values=values,
        with_grad=with_grad and has_slots,
    )
    masks = _MaskLayer0(drafter, with_grad) if has_slots and drafter.mask_hidden is not None else None
    weight = drafter.lm_head.weight
    weight_grad = zeros_for_sums(weight) if with_grad and weight.requires_grad else None
    longest = max(chunk.end - chunk.begin for block in plan.blocks for chunk in block.labels.chunks)
    logits_buffer = weight.new_empty(longest, weight.shape[0])
    exact = torch.promote_types(states.dtype, torch.float32)
    depth_weight = torch.tensor(settings.depth_weights, dtype=exact, device=states.device) / (total_supervised or 1.0)

    for block in plan.blocks:
        # 3. States of the block's mask slots, or of its chains' steps.
        rolled = None
        with torch.set_grad_enabled(with_grad):  # -> [num_slots, hidden_size]
            if block.chains is not None:
                # A chain's steps lie apart among the keys: no closed form for flex.
                heads = HEADS["sdpa" if settings.attention == "flex" else settings.attention]
                rolled = chain_rollout(drafter, batch, base, block.chains, heads)
            elif masks is not None and block.parts:
                rolled = _rollout(drafter, masks, base, block, settings.attention)

        # 4. Rows of the head: the block's supervised pair slots, then its supervised mask slots; sorted by label.
        read = states_read[block.pairs]
        if rolled is not None:
            read = torch.cat([read, rolled.detach()[block.chosen]])  # [num_rows, hidden_size]

        # 5. Loss, and its gradient by the states that the head reads.
        with torch.no_grad():
            rows = head_loss(
                states=read[block.order],
                weight=weight,
                plan=block.labels,
                row_weight=depth_weight[block.row_depth],
                targets=targets,
                loss=settings.loss,
                logits_buffer=logits_buffer,
                with_grad=with_grad,
                weight_grad=weight_grad,
            )
        sums.add(rows.loss, rows.is_correct, block)
        if rows.grad is None or state_grad is None:
            continue

        # 6. Backward through the block; what it asks of the base pass is collected.
        read_grad = torch.empty_like(read)
        read_grad[block.order] = rows.grad
        num_read = block.pairs.numel()
        state_grad[block.pairs] += read_grad[:num_read]
        if rolled is not None and block.chosen.numel():
            rolled_grad = torch.zeros_like(rolled)
            rolled_grad[block.chosen] = read_grad[num_read:]
            torch.autograd.backward([rolled], [rolled_grad])
            base.collect()
            if masks is not None:
                masks.collect()
        del rows, read, read_grad, rolled

    # 7. One backward through the base pass, and through layer 0 of the mask slots.
    if state_grad is not None:
        give_back_pages(num_pairs, carried.device)
        needed = [(root, grad) for root, grad in [(states, state_grad), *base.gradients()] if root.requires_grad]
        torch.autograd.backward([root for root, _ in needed], [grad for _, grad in needed])
        if masks is not None:
            masks.backward()
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
            weight.grad = weight_grad if weight.grad is None else weight.grad.add_(weight_grad)
    return sums.result()


def _rollout(
    drafter: Drafter, masks: _MaskLayer0, base: BasePass, block: BlockPlan, attention: AttentionName
) -> Tensor:
    """One block's mask slots: their states, [num_slots, hidden_size]."""
    is_native = attention == "native"
    context = slice(block.parts[0][1].first, block.parts[-1][1].last)
    tiles = []
    if is_native:
        for own, slots in block.parts:
            tiles.append(Tile(own, slice(slots.first - context.start, slots.last - context.start), slots.tile_mask))
    # In layer 0 mask slots are one vector turned by position: those at one position are equal queries.
    first_tiles = [
        replace(tile, distinct_id=block.rope_pos[tile.own].unique(return_inverse=True)[1].int()) for tile in tiles
    ]

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = base.keys[index], base.values[index]
        if is_native:
            (base_k, k_grad), (base_v, v_grad) = keys.rows_and_grad(context), values.rows_and_grad(context)
            grads = None if k_grad is None or v_grad is None else (k_grad, v_grad)
            return kernels.attend(q, (base_k, base_v), (k, v), tiles if index else first_tiles, grads)
        out = []
        for own, slots in block.parts:
            seen = slice(slots.first, slots.last)
            pairs = keys.read(seen), values.read(seen)
            out.append(rollout_attention(attention, q[own], pairs, (k[own], v[own]), slots))
        return out[0] if len(out) == 1 else torch.cat(out)

    return drafter.norm(drafter.carried_pass(masks.entered, block.rope_pos, attend))


class _MaskLayer0:
    """Layer 0 of the mask slots, computed once; blocks add their gradients to detached copies."""

    def __init__(self, drafter: Drafter, with_grad: bool) -> None:
        embeds, hidden = drafter.embed_masks(1)
        made = drafter.enter(embeds, hidden)
        self._roots = [made.q, made.k, made.v, made.residual]
        self._leaves = [root.detach().requires_grad_(with_grad and root.requires_grad) for root in self._roots]
        self._totals = [zeros_for_sums(root) for root in self._roots]
        self.entered = Entered(*self._leaves)

    def collect(self) -> None:
        """Take in the gradients of one block."""
        for total, leaf in zip(self._totals, self._leaves):
            if leaf.grad is not None:
                total += leaf.grad
                leaf.grad = None

    def backward(self) -> None:
        """Send what the blocks collected on to `mask_hidden`, `fc`, layer 0 and the mask token's embedding."""
        pairs = [(root, total.to(root.dtype)) for root, total in zip(self._roots, self._totals) if root.requires_grad]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])


class _Sums:
    """Adds up a step's rows by depth."""

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self.loss = torch.zeros(total.shape, dtype=torch.float64, device=total.device)
        self.correct, self.prefix = torch.zeros_like(total), torch.zeros_like(total)

    def add(self, loss: Tensor, is_correct: Tensor, block: BlockPlan) -> None:
        """A block's rows, in the order of its labels."""
        self.loss.index_add_(0, block.row_depth, loss.to(torch.float64))
        table = self.total.new_zeros(block.last_anchor - block.first_anchor, self.total.numel())
        table[block.row_anchor, block.row_depth] = is_correct.to(torch.int64)
        self.correct += table.sum(0)
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
