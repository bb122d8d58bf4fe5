"""Attention of the two passes, by name.

`reference` writes the definition out, `sdpa` is PyTorch's fused one, `native` our own C kernel on a CPU, `flex`
PyTorch's compiled one on a GPU.

Every implementation solves the same two problems: pair slots among themselves (causal, document by document), and a
part of a block's mask slots against the pair slots up to their anchors and their own chains. The latter read what the
base pass leaves (`BasePass`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels import cpu as kernels
from peagle.kernels.cpu import Tile
from peagle.train import flex
from peagle.train.flex import FlexBlocks

AttentionName = Literal["native", "sdpa", "reference", "flex"]
# heads(q [num_queries, heads, dim], k, v [num_keys, kv_heads, dim], mask [num_queries, num_keys] or None for causal)
#   -> [num_queries, heads * dim]
Heads = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's fused attention; `mask` None is causal over equally many queries and keys. See `Heads`."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1).flatten(1)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of masked scores, written out. See `Heads`."""
    if mask is None:
        mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).tril()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v).flatten(1)


def native(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Our own kernel. See `Heads`."""
    if mask is None:
        return kernels.attend(q, (k, v), None, kernels.causal_tiles([(0, q.shape[0])]), None)
    tile = Tile(slice(0, q.shape[0]), slice(0, k.shape[0]), minus_infinity_where_hidden(mask))
    return kernels.attend(q, (k, v), None, [tile], None)


HEADS: dict[AttentionName, Heads] = {"native": native, "sdpa": sdpa, "reference": reference}


def minus_infinity_where_hidden(is_visible: Tensor) -> Tensor:
    """What is added to scores: 0 where visible, -inf elsewhere, float32."""
    return torch.zeros(is_visible.shape, device=is_visible.device).masked_fill_(~is_visible, float("-inf"))


@dataclass(frozen=True, kw_only=True)
class MaskSlots:
    """A part of a block's mask slots and what they may see: pair slots `first` .. `last`-1 and their own chains.

    The masks are closed forms of `layout.visible`, made once for all layers.
    """

    anchor: Tensor
    """int64, [num_slots], ascending."""
    depth: Tensor
    """>= 1, ascending within an anchor, int64, [num_slots]."""
    doc_start: Tensor
    """First pair slot of each slot's document, int64, [num_slots]."""
    first: int
    last: int
    flex: FlexBlocks | None = None
    """The same for FlexAttention."""

    @cached_property
    def dense(self) -> Tensor:
        """bool, [num_slots, last - first + num_slots]."""
        return self._visible(self.first, 0)

    @cached_property
    def tile_mask(self) -> Tensor:
        """For native, over the pair slots after the first anchor and the slots themselves.

        Up to the first anchor all slots of one document see alike. float32, [num_slots, num_after + num_slots]
        """
        return minus_infinity_where_hidden(self._visible(int(self.anchor[0]) + 1, 0))

    @cached_property
    def padded(self) -> Tensor:
        """`dense` over keys as flex lays them out: pair slots padded to whole blocks."""
        return self._visible(self.first, -(self.last - self.first) % flex.BLOCK)

    def _visible(self, begin: int, padding: int) -> Tensor:
        pairs = torch.arange(begin, self.last, device=self.anchor.device)
        anchor, depth = self.anchor[:, None], self.depth[:, None]
        context = (pairs <= anchor) & (pairs >= self.doc_start[:, None])  # [num_slots, last - begin]
        own = (self.anchor == anchor) & (self.depth <= depth)  # [num_slots, num_slots]
        return torch.cat([F.pad(context, (0, padding)), own], 1)


def base_attention(
    name: AttentionName, bounds: Sequence[tuple[int, int]], lists: FlexBlocks | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of pair slots, document by document.

    Args:
        name: the implementation.
        bounds: range of pair slots of each document, covering all of them.
        lists: the same for flex, on the device.

    Returns:
        attend(q, k, v), each [num_pairs, heads, head_dim] -> [num_pairs, heads * head_dim].
    """
    if name == "native":
        tiles = kernels.causal_tiles(list(bounds))
        return lambda q, k, v: kernels.attend(q, (k, v), None, tiles, None)
    if name == "flex":
        assert lists is not None
        mask, position, start = lists.mask, torch.arange(bounds[-1][1]), lists.doc_start[: bounds[-1][1]]
        dense = (position <= position[:, None]) & (position >= start[:, None]) if start.device.type == "cpu" else None
        return lambda q, k, v: flex.attend(q, k, v, mask, dense)

    def by_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([HEADS[name](q[a:b], k[a:b], v[a:b], None) for a, b in bounds])

    return by_document


def rollout_attention(
    name: AttentionName, q: Tensor, base: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], slots: MaskSlots
) -> Tensor:
    """Attention of mask slots; `native` does not go through here but takes all parts of a block at once.

    Args:
        name: the implementation.
        q: of the slots, [num_slots, heads, head_dim].
        base: keys and values of pair slots `slots.first` .. `slots.last`-1, [last - first, kv_heads, head_dim].
        own: keys and values of the slots, [num_slots, kv_heads, head_dim].
        slots: who sees whom.

    Returns:
        [num_slots, heads * head_dim].
    """
    if name == "flex":
        padding = -base[0].shape[0] % flex.BLOCK
        base = F.pad(base[0], (0, 0, 0, 0, 0, padding)), F.pad(base[1], (0, 0, 0, 0, 0, padding))
    k, v = (torch.cat(both) for both in zip(base, own))
    if name == "flex":
        assert slots.flex is not None
        return flex.attend(q, k, v, slots.flex.mask, None if q.is_cuda else slots.padded)
    return HEADS[name](q, k, v, slots.dense)


def zeros_for_sums(like: Tensor) -> Tensor:
    """Where gradients of many blocks are added up: in bfloat16 the sum would lose what each adds."""
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


class GradientLeaf:
    """One tensor of the base pass's graph, read by blocks as a leaf whose gradients are collected.

    A block's forward and backward then touch no more than the block, and one backward through the base pass ends the
    step. Rows of the tensor are pair slots; without `with_grad` nothing is collected.
    """

    def __init__(self, tensor: Tensor, with_grad: bool) -> None:
        self.tensor = tensor
        self.grad: Tensor | None = None
        """What was collected; None if nothing was read."""
        self._with_grad = with_grad and tensor.requires_grad
        self._leaves: list[tuple[slice | Tensor, Tensor]] = []

    def read(self, where: slice | Tensor) -> Tensor:
        """Some rows, cut off the graph; an index tensor names each row once."""
        leaf = self.tensor.detach()[where]
        if self._with_grad:
            self._leaves.append((where, leaf.requires_grad_()))
        return leaf

    def rows_and_grad(self, where: slice) -> tuple[Tensor, Tensor | None]:
        """Some rows, cut off the graph, and where a kernel adds their gradients; None without gradients."""
        if not self._with_grad:
            return self.tensor.detach()[where], None
        if self.grad is None:
            self.grad = zeros_for_sums(self.tensor)
        return self.tensor.detach()[where], self.grad[where]

    def collect(self) -> None:
        """After a block's backward: take in what its leaves got."""
        for where, leaf in self._leaves:
            if leaf.grad is not None:
                if self.grad is None:
                    self.grad = zeros_for_sums(self.tensor)
                self.grad[where] += leaf.grad
                leaf.grad = None  # the block's graph may keep the leaf itself
        self._leaves.clear()


class BasePass:
    """The base pass of one batch.

    Args:
        embeds: token embeddings of the pair slots, [num_pairs, hidden_size].
        carried: what an EAGLE-3 chain starts from, [num_pairs, hidden_size].
        keys, values: of each layer, rotated, [num_pairs, num_kv_heads, head_dim].
        with_grad: whether rollouts send gradients back.
    """

    def __init__(
        self,
        *,
        embeds: Tensor,
        carried: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        with_grad: bool,
    ) -> None:
        self.embeds, self.carried = GradientLeaf(embeds, with_grad), GradientLeaf(carried, with_grad)
        self.keys = [GradientLeaf(k, with_grad) for k in keys]
        self.values = [GradientLeaf(v, with_grad) for v in values]
        self._leaves = [self.embeds, self.carried, *self.keys, *self.values]

    def collect(self) -> None:
        """Take in the gradients of one block."""
        for leaf in self._leaves:
            leaf.collect()

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors of the graph with what was collected for them, which is handed over."""
        found = []
        for leaf in self._leaves:
            if leaf.grad is not None:
                found.append((leaf.tensor, leaf.grad.to(leaf.tensor.dtype)))
                leaf.grad = None
        return found
