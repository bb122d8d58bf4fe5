"""What the base pass leaves for the rollouts: tensors of its graph, read as leaves whose gradients are collected.

A block's forward and backward then touch no more than the block, and one backward through the base pass ends the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


class Root:
    """One tensor of the base pass's graph.

    Args:
        tensor: rows are pair slots.
        with_grad: whether what is read of it collects gradients.
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

    def tap(self, where: slice) -> tuple[Tensor, Tensor | None]:
        """Some rows, cut off the graph, and where their gradients are to be added by hand; None without gradients."""
        if not self._with_grad:
            return self.tensor.detach()[where], None
        if self.grad is None:
            self.grad = self.tensor.new_zeros(self.tensor.shape)
        return self.tensor.detach()[where], self.grad[where]

    def collect(self) -> None:
        """After a block's backward: take in what its leaves got."""
        for where, leaf in self._leaves:
            if leaf.grad is not None:
                if self.grad is None:
                    self.grad = self.tensor.new_zeros(self.tensor.shape)
                self.grad[where] += leaf.grad
        self._leaves.clear()


class Base:
    """The base pass of one batch.

    Args:
        embeds: token embeddings of the pair slots, [num_pairs, hidden_size].
        carried: what an EAGLE-3 chain starts from, [num_pairs, hidden_size].
        keys, values: of each layer, rotated, [num_pairs, num_kv_heads, head_dim].
        bounds: range of pair slots of each document.
        with_grad: whether rollouts send gradients back.
    """

    def __init__(
        self,
        embeds: Tensor,
        carried: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        bounds: list[tuple[int, int]],
        with_grad: bool,
    ) -> None:
        self.embeds, self.carried = Root(embeds, with_grad), Root(carried, with_grad)
        self.keys, self.values = [Root(k, with_grad) for k in keys], [Root(v, with_grad) for v in values]
        self.bounds = bounds

    def first_visible(self, anchor: int) -> int:
        """The first pair slot of an anchor's document."""
        return next(first for first, end in self.bounds if first <= anchor < end)

    def collect(self) -> None:
        """Take in the gradients of one block."""
        for root in self._roots():
            root.collect()

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Roots with what was collected for them."""
        return [(root.tensor, root.grad) for root in self._roots() if root.grad is not None]

    def _roots(self) -> Iterator[Root]:
        yield from (self.embeds, self.carried, *self.keys, *self.values)
