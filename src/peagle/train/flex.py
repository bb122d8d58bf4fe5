"""Attention of the two passes by FlexAttention: the mask as a function, its blocks in closed form from the layout.

Compiled on CUDA, once for all lengths: queries and keys are padded to whole blocks, at least two of each, so that four
graphs serve a whole run (base pass and rollouts, with and without gradients). Shorter calls would meet Inductor's
decoding kernel, which has no configuration for 33 to 127 queries of four heads to a key head (pytorch#185349), and a
dimension of one block, for which dynamic shapes compile again. On a CPU the forward is FlexAttention's own, uncompiled;
it has no backward there, so gradients come from the written-out reference (a check, not a way to train).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
# Compute capabilities whose 99 KB of shared memory do not hold FlexAttention's own pipeline at a head size of 128: RTX
# 30, 40 and 50, A10, L4, L40S.
_SMALL_SHARED_MEMORY = {(8, 6), (8, 9), (12, 0), (12, 1)}


def padded_length(length: int) -> int:
    """Rows of a call with `length` of them: whole blocks, at least two."""
    return max(2 * BLOCK, -(-length // BLOCK) * BLOCK)


def key_blocks(
    anchor: Tensor, depth: Tensor | None, doc_start: Tensor, first: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries touches: from the ends of its rows alone, no mask is evaluated.

    Queries are padded by repeating the last. Keys are the pair slots `first` .. `first + num_keys - 1`, padded to whole
    blocks, then (with `depth`) the queries' own keys. Queries are sorted by (anchor, depth), so a block of them lies
    between its first and its last row.

    Args:
        anchor: pair slot up to which each query sees, ascending, int64, [num_queries].
        depth: of mask slots, >= 1, int64, [num_queries]; None for pair slots, whose keys are all pair slots.
        doc_start: first pair slot of each query's document, int64, [num_queries].
        first: the first pair slot offered as a key.
        num_keys: how many pair slots are offered.

    Returns:
        (some, all), bool, [num_query_blocks, num_key_blocks]: blocks of which something, and everything, is seen.
        Where all is True, some is False.
    """
    num_queries = anchor.numel()
    begins = torch.arange(0, padded_length(num_queries), BLOCK, device=anchor.device)
    whole_rows = (begins + BLOCK <= num_queries)[:, None]
    own = (begins // BLOCK)[None]
    ends = (begins + BLOCK - 1).clamp(max=num_queries - 1)
    begins = begins.clamp(max=num_queries - 1)
    num_base = (padded_length(num_keys) if depth is None else -(-num_keys // BLOCK) * BLOCK) // BLOCK
    key_begin = torch.arange(num_base, device=anchor.device)[None] * BLOCK + first
    key_end = key_begin + BLOCK - 1
    lowest, highest = anchor[begins][:, None], anchor[ends][:, None]
    some = (key_begin <= highest) & (key_end >= doc_start[begins][:, None])
    # A short last block of queries or keys is never "all": its padding must stay unseen.
    everything = (key_end <= lowest) & (key_begin >= doc_start[ends][:, None]) & (key_end < first + num_keys)
    everything = everything & whole_rows
    if depth is not None:
        chain_begin = begins - (depth[begins] - 1)
        own_some = (own >= (chain_begin // BLOCK)[:, None]) & (own <= (ends // BLOCK)[:, None])
        some = torch.cat([some, own_some], 1)
        everything = torch.cat([everything, torch.zeros_like(own_some)], 1)
    return some & ~everything, everything


@dataclass(frozen=True, kw_only=True)
class FlexBlocks:
    """FlexAttention's mask as what it is made of, so that a CPU can plan it and a copy brings it: see `plan_blocks`."""

    lists: tuple[Tensor, ...]
    """Counts and indices of key blocks by query block, partly and wholly seen, then of query blocks by key block: the
    eight of a `BlockMask`, int32."""
    anchor: Tensor
    """int64, [padded_length(num_queries)], as are `doc_start` and `depth`."""
    doc_start: Tensor
    depth: Tensor | None
    first: int
    num_keys: int
    num_queries: int

    @cached_property
    def mask(self) -> BlockMask:
        """On the device of the tensors, without a kernel."""
        anchor, doc_start, depth = self.anchor, self.doc_start, self.depth
        first, num_keys, num_queries = self.first, self.num_keys, self.num_queries
        base_len = padded_length(num_keys) if depth is None else -(-num_keys // BLOCK) * BLOCK
        query_len = anchor.numel()

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            pair = key + first
            context = (key < num_keys) & (pair <= anchor[query]) & (pair >= doc_start[query])
            if depth is None:
                return context
            other = (key - base_len).clamp(min=0)
            is_own = (key >= base_len) & (other < num_queries)
            return context | (is_own & (anchor[other] == anchor[query]) & (depth[other] <= depth[query]))

        lengths = (query_len, base_len + (0 if depth is None else query_len))
        return BlockMask(lengths, *self.lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees)  # type: ignore[arg-type]


def plan_blocks(anchor: Tensor, depth: Tensor | None, doc_start: Tensor, first: int, num_keys: int) -> FlexBlocks:
    """FlexAttention's mask for queries over `[pair slots, padding to whole blocks, own keys]`; see `key_blocks`."""
    num_queries, query_len = anchor.numel(), padded_length(anchor.numel())
    some, everything = key_blocks(anchor, depth, doc_start, first, num_keys)
    # The mask reads padded tensors: one row would be a constant size, for which dynamic shapes compile again.
    repeated = torch.arange(query_len, device=anchor.device).clamp(max=num_queries - 1)
    return FlexBlocks(
        lists=(*_packed(some), *_packed(everything), *_packed(some.T), *_packed(everything.T)),
        anchor=anchor[repeated],
        doc_start=doc_start[repeated],
        depth=None if depth is None else depth[repeated],
        first=first,
        num_keys=num_keys,
        num_queries=num_queries,
    )


def _packed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, rows] and column indices [1, 1, rows, columns] (those that are set come first), int32."""
    order = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


@cache
def compiled(backend: str | Callable[..., Any] = "inductor") -> Any:
    """FlexAttention compiled once for all lengths: sizes are symbols, so a new length is no reason to compile again."""
    return torch.compile(flex_attention, dynamic=True, backend=backend)


@cache
def kernel_options(device: torch.device, head_dim: int, dtype: torch.dtype) -> dict[str, Any] | None:
    """Fewer pipeline stages, and smaller blocks of large rows, where shared memory is small; None elsewhere."""
    if torch.cuda.get_device_capability(device) not in _SMALL_SHARED_MEMORY:
        return None
    is_wide = dtype.itemsize > 2
    options = {"num_stages": 2, **({"BLOCK_M": 32} if is_wide else {})}
    if head_dim > 128:
        options |= {f"bwd_BLOCK_{side}": 16 if is_wide else 32 for side in ("M1", "N1", "M2", "N2")}
    return options


def padded_call(
    solve: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, **options: Any
) -> Tensor:
    """`solve`, a FlexAttention, over queries and keys padded as `mask` is; [1, heads, num_queries, head_dim]."""
    (query_len, key_len), num_queries = mask.seq_lengths, q.shape[2]
    q, k, v = (F.pad(x, (0, 0, 0, rows - x.shape[2])) for x, rows in ((q, query_len), (k, key_len), (v, key_len)))
    out = solve(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], **options)
    return out[:, :, :num_queries]


class _ForwardByFlex(torch.autograd.Function):
    """FlexAttention forward on a CPU; backward through the dense definition."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, dense: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, dense)
        q, k, v = q.detach(), k.detach(), v.detach()
        return padded_call(flex_attention, q, k, v, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, dense = (t.detach() for t in ctx.saved_tensors)
        with torch.enable_grad():
            q, k, v = (t.requires_grad_() for t in (q, k, v))
            group = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
            out = scores.masked_fill(~dense, float("-inf")).softmax(-1) @ v.repeat_interleave(group, 1)
            found = torch.autograd.grad(out, (q, k, v), grads[0])
        return (*found, None, None)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, dense: Tensor | None) -> Tensor:
    """One call of FlexAttention.

    Args:
        q: [num_queries, heads, head_dim].
        k, v: as the mask orders them, without the padding at the end, [num_keys, kv_heads, head_dim].
        mask: of `plan_blocks`.
        dense: the same mask written out, bool, [num_queries, num_keys]; needed on a CPU only, for gradients.

    Returns:
        [num_queries, heads * head_dim].
    """
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    if q.is_cuda:
        options = kernel_options(q.device, q.shape[-1], q.dtype)
        out = padded_call(compiled(), q, k, v, mask, kernel_options=options)
    else:
        out = _ForwardByFlex.apply(q.contiguous(), k.contiguous(), v.contiguous(), mask, dense)
    return out[0].transpose(0, 1).flatten(1)
