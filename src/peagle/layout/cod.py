"""COD sampling (conditional drop-token): which slots of depth 1 and more a step trains, and who sees whom.

Worked example. One document of seven pair slots, of which 2, 3, 4 and 5 are supervised (a reply of five tokens):

    pair slot      0  1  2  3  4  5  6
    supervised     .  .  1  1  1  1  .
    run            0  0  4  3  2  1  0    supervised pair slots from here on, without a gap

Slot (a, d) is supervised iff run[a] > d (`layout/supervision.py` has the rule), so depth 1 has the anchors 2, 3 and 4,
depth 2 the anchors 2 and 3, depth 3 the anchor 2. With ratio 0.7 and no floor: n_1 = 3, depth 1 keeps
floor(3 * 0.7) = 2 of {2, 3, 4}; depth 2 keeps at most floor(3 * 0.49) = 1 of those that depth 1 kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.errors import LayoutError
from peagle.layout.supervision import supervised_run


@dataclass(frozen=True)
class CodLayout:
    """The slots of depth >= 1 of one packed batch, sorted by (anchor, depth). Depth 0 is every pair slot."""

    anchor_pos: Tensor
    """Index of the chain's pair slot in the pack, int64, [num_slots]."""
    depth: Tensor
    """1 .. num_depths - 1, int64, [num_slots]."""
    is_supervised: Tensor
    """Whether the slot counts in the loss, bool, [num_slots]. `sample` and `full` draw supervised slots only."""
    num_depths: int
    """Depths trained, 0 included."""

    @property
    def num_slots(self) -> int:
        """Slots of depth >= 1."""
        return self.anchor_pos.numel()

    def to(self, device: torch.device) -> CodLayout:
        """The same layout on `device`."""
        return CodLayout(
            self.anchor_pos.to(device), self.depth.to(device), self.is_supervised.to(device), self.num_depths
        )


def full(is_supervised: Tensor, document_ids: Tensor, num_depths: int) -> CodLayout:
    """Every supervised slot of every depth: no sampling. Validation uses it, so that its figures are not noise."""
    run = supervised_run(is_supervised, document_ids)
    depths = run.clamp(max=num_depths) - 1
    return _expand(depths.clamp(min=0), num_depths)


def sample(
    is_supervised: Tensor,
    document_ids: Tensor,
    num_depths: int,
    down_sample_ratio: float,
    down_sample_ratio_min: float,
    generators: list[torch.Generator],
) -> CodLayout:
    """Draw a layout: document by document, depth by depth, each depth out of the one before.

    Depth d keeps min(eligible, floor(n_1 * max(ratio^d, ratio_min))) anchors, n_1 = anchors with a supervised depth-1
    slot, eligible = anchors whose depth d-1 was kept and whose depth d is supervised.

    Args:
        is_supervised: whether pair slot (a, 0) counts, bool, [num_pairs], on the CPU.
        document_ids: ascending from 0, padding (-1) at the end, int64, [num_pairs].
        num_depths: depth 0 included, >= 1.
        down_sample_ratio, down_sample_ratio_min: in (0, 1] and [0, 1].
        generators: one for each document, so that a row's layout does not depend on what it was packed with.

    Source: P-EAGLE, arXiv 2602.01469, section 3.2; the floor is Speculators'.
    """
    num_documents = int(document_ids.max().item()) + 1 if document_ids.numel() else 0
    if len(generators) != num_documents:
        raise LayoutError(f"{num_documents} documents need as many generators, found {len(generators)}")
    run = supervised_run(is_supervised, document_ids)
    depths = torch.zeros_like(run)
    for document, generator in enumerate(generators):
        inside = (document_ids == document).nonzero()[:, 0]
        local = run[inside]
        num_first = int((local > 1).sum())
        kept = torch.arange(local.numel())
        for depth in range(1, num_depths):
            eligible = kept[local[kept] > depth]
            quota = math.floor(num_first * max(down_sample_ratio**depth, down_sample_ratio_min))
            if quota < eligible.numel():
                eligible = eligible[torch.randperm(eligible.numel(), generator=generator)[:quota]]
            depths[inside[eligible]] = depth
            kept = eligible
    return _expand(depths, num_depths)


def visible(
    query_anchor: Tensor, query_depth: Tensor, key_anchor: Tensor, key_depth: Tensor, document_ids: Tensor
) -> Tensor:
    """Tell which slots may attend to which.

    A slot sees the pair slots (depth 0) of its document up to its anchor, and its own chain up to its own depth. A pair
    slot is a chain's slot of depth 0, so for it this is ordinary causal attention.

    Args:
        query_anchor, query_depth: int64, [num_queries].
        key_anchor, key_depth: int64, [num_keys].
        document_ids: document of each pair slot, -1 for padding, int64, [num_pairs].

    Returns:
        True where attention is allowed, bool, [num_queries, num_keys]. Padding sees and shows nothing.

    Raises:
        LayoutError: an anchor lies outside [0, num_pairs), or a depth is negative.

    Source: P-EAGLE, arXiv 2602.01469, section 3. Differs: computed per sampled slot, not sliced from one full mask.
    """
    for anchor, depth in ((query_anchor, query_depth), (key_anchor, key_depth)):
        if anchor.numel() and (int(anchor.min()) < 0 or int(anchor.max()) >= document_ids.numel()):
            raise LayoutError(f"anchors must lie in [0, {document_ids.numel()})")
        if depth.numel() and int(depth.min()) < 0:
            raise LayoutError("depths must not be negative")
    query_document, key_document = document_ids[query_anchor][:, None], document_ids[key_anchor][None]
    same_document = (query_document == key_document) & (query_document >= 0)
    is_context = (key_depth[None] == 0) & (key_anchor[None] <= query_anchor[:, None])
    is_own_chain = (key_anchor[None] == query_anchor[:, None]) & (key_depth[None] <= query_depth[:, None])
    return same_document & (is_context | is_own_chain)


def _expand(depths: Tensor, num_depths: int) -> CodLayout:
    """Slots (a, 1) .. (a, depths[a]) of every anchor, sorted."""
    anchors = depths.nonzero()[:, 0]
    counts = depths[anchors]
    anchor_pos = anchors.repeat_interleave(counts)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    depth = torch.arange(anchor_pos.numel(), device=depths.device) - starts + 1
    return CodLayout(anchor_pos, depth, torch.ones_like(depth, dtype=torch.bool), num_depths)
