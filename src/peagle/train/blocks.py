"""A pack's plan: everything about a step that follows from the layout alone, made on the CPU in the data thread.

Blocks and their rows in label order, chunks of the head, parts of attention and FlexAttention's block lists. The step
then reads no index back from its device: a GPU would finish all queued work first, some twenty times a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from peagle.drafter.model_config import DrafterConfig
from peagle.hidden_states.batch import Batch
from peagle.kernels import cpu as kernels
from peagle.layout.cod import CodLayout
from peagle.train import flex
from peagle.train.attention import AttentionName, MaskSlots
from peagle.train.eagle3 import ChainPlan, plan_chains
from peagle.train.flex import FlexBlocks
from peagle.train.loss import LabelPlan, LossName, plan_labels

Made = TypeVar("Made")

# Queries of one attention call: a call's slots see one another's keys only inside their chains, so fewer of them waste
# less, and more of them make larger matrix products. Measured on a CPU at 2,048 tokens; flat between 96 and 256.
PART_SLOTS = 160
FLEX_CHAIN_SLOTS = 1024


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step is computed. Only `loss` and `depth_weights` change what is computed."""

    loss: LossName
    depth_weights: tuple[float, ...]
    """Weight of each depth's slots in the loss, depth 0 first."""
    attention: AttentionName
    block_slots: int
    """Slots of depth >= 1 of a block; at least one anchor's."""
    chunk_rows: int
    """Rows whose logits are held at a time."""
    checkpoint_base: bool
    """Keep one hidden state per layer and token of the base pass, and recompute the rest in its backward."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Neighbouring anchors whose slots run together, and their rows of the head."""

    first_anchor: int
    last_anchor: int
    """Anchors first_anchor .. last_anchor-1."""
    anchor: Tensor
    """Of the block's slots of depth >= 1, int64, [num_slots]."""
    depth: Tensor
    """int64, [num_slots]."""
    rope_pos: Tensor
    """int64, [num_slots]."""
    parts: tuple[tuple[slice, MaskSlots], ...]
    """P-EAGLE: the slots of each call of attention."""
    chains: ChainPlan | None
    """EAGLE-3: the chains step by step."""
    pairs: Tensor
    """Supervised pair slots, int64, [num_supervised_pairs]."""
    chosen: Tensor
    """Which of the slots are supervised, int64, [num_supervised_slots]."""
    order: Tensor
    """Rows (`pairs`, then `chosen`) sorted by label, int64, [num_rows]."""
    row_anchor: Tensor
    """In that order, counted from `first_anchor`, int64, [num_rows]."""
    row_depth: Tensor
    """In that order, int64, [num_rows]."""
    labels: LabelPlan


@dataclass(frozen=True, kw_only=True)
class PackPlan:
    """One pack's."""

    num_pairs: int
    """Pair slots without padding."""
    num_rows: int
    """Supervised slots, all depths."""
    bounds: tuple[tuple[int, int], ...]
    """Range of pair slots of each document."""
    total: Tensor
    """Supervised slots of each depth, int64, [num_depths]."""
    base_flex: FlexBlocks | None
    """Of the base pass."""
    blocks: tuple[BlockPlan, ...]


def plan_pack(batch: Batch, layout: CodLayout, settings: StepSettings, drafter: DrafterConfig) -> PackPlan:
    """Plan a step over one pack.

    Args:
        batch, layout: on the CPU; only the batch's indices are read.
        settings: sizes, and the attention.
        drafter: its kind and its vocabulary.
    """
    is_parallel = drafter.speculators_model_type == "peagle"
    num_pairs = int((batch.document_ids >= 0).sum())
    document_ids = batch.document_ids[:num_pairs]
    is_supervised = batch.is_supervised[:num_pairs]
    _, counts = torch.unique_consecutive(document_ids, return_counts=True)
    ends = counts.cumsum(0)
    starts = ends - counts
    doc_start = starts.repeat_interleave(counts)  # [num_pairs]
    total = torch.bincount(layout.depth[layout.is_supervised], minlength=layout.num_depths)
    total[0] = is_supervised.sum()
    is_flex = settings.attention == "flex"
    blocks = []
    for first, last, slots in _block_ranges(is_supervised, layout, settings.block_slots):
        anchor, depth = layout.anchor_pos[slots], layout.depth[slots]
        parts: tuple[tuple[slice, MaskSlots], ...] = ()
        chains = None
        if anchor.numel() and is_parallel:
            part_slots = None if is_flex else kernels.TILE_ROWS if settings.attention == "native" else PART_SLOTS
            parts = _attention_parts(anchor, depth, doc_start, part_slots)
        elif anchor.numel():
            # A chain's steps lie apart among the keys: no closed form for flex, so sdpa, in larger parts.
            chains = plan_chains(anchor, depth, doc_start, FLEX_CHAIN_SLOTS if is_flex else PART_SLOTS)
        pairs = first + is_supervised[first:last].nonzero()[:, 0]
        chosen = layout.is_supervised[slots].nonzero()[:, 0]
        row_depth = torch.cat([torch.zeros_like(pairs), depth[chosen]])  # [num_rows]
        row_anchor = torch.cat([pairs, anchor[chosen]])
        label_rows = batch.label_of_pair[row_anchor + row_depth]
        order = torch.argsort(label_rows, stable=True)
        blocks.append(
            BlockPlan(
                first_anchor=first,
                last_anchor=last,
                anchor=anchor,
                depth=depth,
                rope_pos=batch.rope_pos[anchor] + depth,
                parts=parts,
                chains=chains,
                pairs=pairs,
                chosen=chosen,
                order=order,
                row_anchor=row_anchor[order] - first,
                row_depth=row_depth[order],
                labels=plan_labels(label_rows[order], settings.chunk_rows, drafter.draft_vocab_size),
            )
        )
    own = torch.arange(num_pairs)
    return PackPlan(
        num_pairs=num_pairs,
        num_rows=int(total.sum()),
        bounds=tuple(zip(starts.tolist(), ends.tolist())),
        total=total,
        base_flex=flex.plan_blocks(own, None, doc_start, 0, num_pairs) if is_flex and num_pairs else None,
        blocks=tuple(blocks),
    )


def _block_ranges(is_supervised: Tensor, layout: CodLayout, block_slots: int) -> list[tuple[int, int, slice]]:
    """Cut the anchors into blocks of about `block_slots` slots of depth >= 1; an anchor's chain is never cut.

    Pair slots cost a block no more than their rows of the head. Blocks without a supervised row are left out.
    """
    num_pairs = is_supervised.numel()
    per_anchor = torch.bincount(layout.anchor_pos, minlength=num_pairs)
    slots_before = [0, *per_anchor.cumsum(0).tolist()]
    rows_before = [0, *(per_anchor + is_supervised.to(torch.int64)).cumsum(0).tolist()]
    cuts, first = [0], 0
    for anchor in range(num_pairs):
        if slots_before[anchor + 1] - slots_before[first] > block_slots and anchor > first:
            cuts.append(anchor)
            first = anchor
    ranges = zip(cuts, [*cuts[1:], num_pairs])
    return [(a, b, slice(slots_before[a], slots_before[b])) for a, b in ranges if rows_before[b] > rows_before[a]]


def _attention_parts(
    anchor: Tensor, depth: Tensor, doc_start: Tensor, part_slots: int | None
) -> tuple[tuple[slice, MaskSlots], ...]:
    """Cut a block's slots into parts of one document and about `part_slots`, never inside a chain.

    Smaller parts mask away less. None: one part, of however many documents, with FlexAttention's lists.
    """
    starts = (depth == 1).nonzero()[:, 0]
    own_start = doc_start[anchor]  # [num_slots]
    documents = own_start[starts].tolist()
    cuts, begin, document = [], 0, documents[0]
    for here, after, own_document in zip(starts.tolist(), [*starts[1:].tolist(), anchor.numel()], documents):
        is_full = part_slots is not None and (own_document != document or after - begin > part_slots)
        if is_full and here > begin:
            cuts.append((begin, here))
            begin = here
        document = own_document
    cuts.append((begin, anchor.numel()))
    parts = []
    for begin, end in cuts:
        own, first, last = slice(begin, end), int(own_start[begin]), int(anchor[end - 1]) + 1
        lists = None
        if part_slots is None:
            lists = flex.plan_blocks(anchor[own], depth[own], own_start[own], first, last - first)
        slots = MaskSlots(
            anchor=anchor[own], depth=depth[own], doc_start=own_start[own], first=first, last=last, flex=lists
        )
        parts.append((own, slots))
    return tuple(parts)


# -------------------- upload


def upload(made: Made, device: torch.device, dtype: torch.dtype) -> Made:
    """Records of tensors (batch, layout, plan) on a device: floats in `dtype`, all integers of one type in one copy.

    From page-locked memory the copies run beside the host and beside other streams' kernels.
    """
    if device.type == "cpu":
        return _each_tensor(made, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    indices: dict[torch.dtype, list[Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            indices.setdefault(tensor.dtype, []).append(tensor)
        return tensor

    _each_tensor(made, note)
    moved = {}
    for kind, tensors in indices.items():
        whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
        whole = (whole.pin_memory() if device.type == "cuda" else whole).to(device, non_blocking=True)
        parts = whole.split([tensor.numel() for tensor in tensors])
        moved[kind] = iter([part.view(tensor.shape) for part, tensor in zip(parts, tensors)])
    # Narrower or wider floats are converted where that is quick.
    return _each_tensor(
        made,
        lambda t: t.to(device, non_blocking=True).to(dtype) if t.is_floating_point() else next(moved[t.dtype]),
    )


class Uploads:
    """Packs on their way to the device: the next one is copied while the one before is computed.

    On a GPU they go from page-locked memory over a stream of their own; a CPU is where they are already.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stage(self, packs: list[Made]) -> list[Made]:
        """In the data thread: into page-locked memory."""
        if self._stream is None:
            return packs
        with torch.cuda.stream(self._stream):  # a thread's own device is the first one
            return _each_tensor(packs, lambda tensor: tensor.pin_memory() if tensor.is_floating_point() else tensor)

    def begin(self, pack: Made) -> tuple[Made, torch.cuda.Event | None]:
        """Start a copy, in any thread."""
        if self._stream is None:
            return upload(pack, self.device, self.dtype), None
        with torch.cuda.stream(self._stream):
            return upload(pack, self.device, self.dtype), self._stream.record_event()

    def each(self, packs: list[Made], begun: tuple[Made, torch.cuda.Event | None] | None) -> Iterator[Made]:
        """Packs on the device, in order; of the first the copy may have `begun`."""
        for index, pack in enumerate(packs):
            moved, event = begun or self.begin(pack)
            begun = self.begin(packs[index + 1]) if index + 1 < len(packs) and self._stream is not None else None
            if event is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_event(event)
                _each_tensor(moved, partial(_used_by, stream=current))
            yield moved
            del moved


def _used_by(tensor: Tensor, *, stream: torch.cuda.Stream) -> Tensor:
    """Tell the allocator, which would otherwise reuse the memory for the next copy while `stream` still reads it."""
    tensor.record_stream(stream)
    return tensor


def _each_tensor(made: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A record with each of its tensors changed, in a fixed order, through records, tuples and lists."""
    if isinstance(made, Tensor):
        return change(made)
    if isinstance(made, tuple | list):
        return type(made)(_each_tensor(one, change) for one in made)
    if is_dataclass(made) and not isinstance(made, type):
        return replace(made, **{field.name: _each_tensor(getattr(made, field.name), change) for field in fields(made)})
    return made
