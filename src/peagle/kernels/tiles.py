"""Attention on a CPU as plain matrix products, a tile of queries at a time: what `sdpa` is in float32 and float64.

A tile's queries see a run of context keys, all of them but for the last few, and of their own those of their chain.
So scores are two matrix products into one buffer, the mask touches the end of it only, and keys and values are read
where they lie. Probabilities are kept for the backward while they are few, and formed again otherwise. PyTorch's fused
kernel reads a mask of every score and always forms the scores again: against it, tiles take 0.65 to 0.85 of the time,
forward and backward, at 1,024 to 8,192 keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.kernels import native
from peagle.kernels.native import Tile

# Probabilities of one call that are kept for its backward, in bytes; more are formed again, for a sixth more work. The
# base pass keeps as much in every layer.
KEEP_BYTES = 64 << 20
# Keys whose scores are held at a time: a megabyte of scores stays near the core, at any context length. Not a power of
# two, at which reading columns of scores is a third slower.
PART_KEYS = 1008
# Queries of a tile: flat between 96 and 320 with PyTorch's products, which meet every key for every query; ours pass
# over what a few neighbours do not see, so that only the keys count, which each tile reads once.
TILE_ROWS, NATIVE_TILE_ROWS = 160, 168


def fits(q: Tensor) -> bool:
    """Whether tiles serve these queries."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)


def rows_of_tile(q: Tensor) -> int:
    """Queries to put into a tile, of queries such as these, [..., heads, head_dim]."""
    return NATIVE_TILE_ROWS if native.does_attention(q) else TILE_ROWS


def attend(
    q: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor] | None,
    tiles: Sequence[Tile],
    sinks: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attention of queries to context keys, and to their own.

    Args:
        q: [num_queries, heads, head_dim].
        context: keys and values, each [num_keys, kv_heads, head_dim].
        own: keys and values of the queries themselves, each [num_queries, kv_heads, head_dim]; None if the context
            holds them.
        tiles: in order, covering the queries.
        sinks: the backward adds the gradients of the context's keys and values here, shaped like them; None sends them
            on through the graph.

    Returns:
        [num_queries, heads * head_dim]
    """
    own_k, own_v = own if own is not None else (None, None)
    solve = _Native if native.does_attention(q) else _Tiled
    out: Tensor = solve.apply(q, *context, own_k, own_v, tuple(tiles), sinks)
    return out.flatten(1)


class _Native(torch.autograd.Function):
    """By our own kernel, which keeps no probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        context_k: Tensor,
        context_v: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
        tiles: tuple[Tile, ...],
        sinks: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        out, log_sum = native.attention_forward(q, native.Seen(context_k, context_v, own_k, own_v), tiles)
        ctx.save_for_backward(q, context_k, context_v, own_k, own_v, out, log_sum)
        ctx.tiles, ctx.sinks = tiles, sinks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, context_k, context_v, own_k, own_v, out, log_sum = ctx.saved_tensors
        k_grad, v_grad = ctx.sinks or (context_k.new_zeros(context_k.shape), context_v.new_zeros(context_v.shape))
        own_grads = (None, None) if own_k is None else (own_k.new_zeros(own_k.shape), own_v.new_zeros(own_v.shape))
        seen, found = native.Seen(context_k, context_v, own_k, own_v), native.Seen(k_grad, v_grad, *own_grads)
        q_grad = native.attention_backward(q, seen, ctx.tiles, out, log_sum, grads[0], found)
        return q_grad, *((None, None) if ctx.sinks is not None else (k_grad, v_grad)), *own_grads, None, None


class _Tiled(torch.autograd.Function):
    """By the matrix products of PyTorch's library."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        context_k: Tensor,
        context_v: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
        tiles: tuple[Tile, ...],
        sinks: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        out, group, scale = torch.empty_like(q), q.shape[1] // context_k.shape[1], q.shape[-1] ** -0.5
        is_kept = any(ctx.needs_input_grad) and _bytes(q, own_k, tiles) <= KEEP_BYTES
        kept: list[Tensor] = []
        log_sums: list[Tensor] = []
        space = _Space(q, group, tiles)
        for tile in tiles:
            parts = _parts(tile)
            for head in range(context_k.shape[1]):
                rows = _rows(q, tile, head, group) * scale
                probs_of, found_of, log_sum_of = [], [], []
                for part in parts:
                    scores = _scores(space, rows, context_k, own_k, tile, head, part)
                    probs = torch.softmax(scores, -1, out=None if is_kept else space.take(1, scores))
                    found = probs[:, : part.stop - part.start] @ context_v[part, head]
                    if own_v is not None and part.stop == tile.context.stop:
                        found.addmm_(probs[:, part.stop - part.start :], own_v[tile.own, head])
                    probs_of.append(probs)
                    found_of.append(found)
                    if len(parts) > 1 or not is_kept:
                        log_sum_of.append(_log_sum(scores, probs))
                found = found_of[0]
                if len(parts) > 1:
                    # Each part was normed by itself: its share of the whole is exp(its log sum - the whole's).
                    log_sum = torch.logsumexp(torch.stack(log_sum_of), 0)
                    shares = [(own - log_sum).exp_() for own in log_sum_of]
                    found = torch.stack(found_of).mul_(torch.stack(shares)).sum(0)
                    log_sum_of = [log_sum]
                    if is_kept:
                        for probs, share in zip(probs_of, shares):
                            probs.mul_(share)
                if is_kept:
                    kept.extend(probs_of)
                else:
                    log_sums.extend(log_sum_of)
                _put(out, tile, head, group, found)
        ctx.save_for_backward(q, context_k, context_v, own_k, own_v, out, *log_sums, *kept)
        ctx.tiles, ctx.sinks, ctx.is_kept = tiles, sinks, is_kept
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, context_k, context_v, own_k, own_v, out, *rest = ctx.saved_tensors
        q_grad = torch.empty_like(q)
        k_grad, v_grad = ctx.sinks or (torch.zeros_like(context_k), torch.zeros_like(context_v))
        own_grads = None if own_k is None else (torch.empty_like(own_k), torch.empty_like(own_v))
        group, scale = q.shape[1] // context_k.shape[1], q.shape[-1] ** -0.5
        saved, space = iter(rest), _Space(q, group, ctx.tiles)
        for tile in ctx.tiles:
            parts = _parts(tile)
            for head in range(context_k.shape[1]):
                rows, grad = _rows(q, tile, head, group) * scale, _rows(grads[0], tile, head, group)
                # d loss / d scores = probs * (d loss / d probs - sum over keys of probs * d loss / d probs)
                pull = torch.linalg.vecdot(grad, _rows(out, tile, head, group))[:, None]
                log_sum, found = None if ctx.is_kept else next(saved), torch.zeros_like(rows)
                for part in parts:
                    keys, values, num_keys = context_k[part, head], context_v[part, head], part.stop - part.start
                    if log_sum is None:
                        probs = next(saved)
                    else:
                        scores = _scores(space, rows, context_k, own_k, tile, head, part)
                        probs = torch.exp(scores.sub_(log_sum), out=space.take(1, scores))
                    inner = space.take(0, probs)
                    torch.mm(grad, values.t(), out=inner[:, :num_keys])
                    v_grad[part, head].addmm_(probs[:, :num_keys].t(), grad)
                    has_own = part.stop == tile.context.stop
                    if own_grads is not None and has_own:
                        torch.mm(grad, own_v[tile.own, head].t(), out=inner[:, num_keys:])
                        own_grads[1][tile.own, head] = probs[:, num_keys:].t() @ grad
                    inner.sub_(pull).mul_(probs)
                    found.addmm_(inner[:, :num_keys], keys)
                    k_grad[part, head].addmm_(inner[:, :num_keys].t(), rows)
                    if own_grads is not None and has_own:
                        found.addmm_(inner[:, num_keys:], own_k[tile.own, head])
                        own_grads[0][tile.own, head] = inner[:, num_keys:].t() @ rows
                _put(q_grad, tile, head, group, found.mul_(scale))
        context_grads = (None, None) if ctx.sinks is not None else (k_grad, v_grad)
        return q_grad, *context_grads, *(own_grads or (None, None)), None, None


class _Space:
    """Room for two blocks of scores, made once per call: fresh pages cost as much as what is written to them."""

    def __init__(self, q: Tensor, group: int, tiles: tuple[Tile, ...]) -> None:
        size = max(
            group
            * (tile.own.stop - tile.own.start)
            * (max(p.stop - p.start for p in _parts(tile)) + tile.mask.shape[1])
            for tile in tiles
        )
        self._rooms = q.new_empty(size), q.new_empty(size)

    def take(self, index: int, like: Tensor) -> Tensor:
        """Room as large as a block; what was there is overwritten."""
        return self.shaped(index, *like.shape)

    def shaped(self, index: int, num_rows: int, num_columns: int) -> Tensor:
        """The same by size."""
        return self._rooms[index][: num_rows * num_columns].view(num_rows, num_columns)


def _log_sum(scores: Tensor, probs: Tensor) -> Tensor:
    """log(sum(exp(scores))) per row, [num_rows, 1]: the largest of the probabilities is exp(largest score - that)."""
    return scores.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()


def _bytes(q: Tensor, own_k: Tensor | None, tiles: tuple[Tile, ...]) -> int:
    """What the probabilities of a call take."""
    found = 0
    for tile in tiles:
        num_own = tile.own.stop - tile.own.start
        found += num_own * (tile.context.stop - tile.context.start + (num_own if own_k is not None else 0))
    return int(found * q.shape[1] * q.element_size())


def _parts(tile: Tile) -> list[slice]:
    """A tile's context keys, `PART_KEYS` at a time or a little more; the last part is long enough for the mask."""
    first, last = tile.context.start, tile.context.stop
    ends = list(range(first + PART_KEYS, last - tile.mask.shape[1], PART_KEYS))
    return [slice(begin, end) for begin, end in zip([first, *ends], [*ends, last])]


def _rows(x: Tensor, tile: Tile, head: int, group: int) -> Tensor:
    """A tile's rows of the query heads that share a key head, head by head: [group * num_own, head_dim]."""
    return x[tile.own, head * group : (head + 1) * group].transpose(0, 1).flatten(0, 1)


def _put(x: Tensor, tile: Tile, head: int, group: int, rows: Tensor) -> None:
    """Write what `_rows` reads."""
    x[tile.own, head * group : (head + 1) * group] = rows.unflatten(0, (group, -1)).transpose(0, 1)


def _scores(
    space: _Space, rows: Tensor, context_k: Tensor, own_k: Tensor | None, tile: Tile, head: int, part: slice
) -> Tensor:
    """Scores of scaled queries, masked, [group * num_own, num_keys]; the last part has the own keys too."""
    keys, is_last = context_k[part, head], part.stop == tile.context.stop
    num_keys, num_masked = keys.shape[0], tile.mask.shape[1]
    own = own_k[tile.own, head] if own_k is not None and is_last else None
    scores = space.shaped(0, rows.shape[0], num_keys + (0 if own is None else own.shape[0]))
    torch.mm(rows, keys.t(), out=scores[:, :num_keys])
    if own is not None:
        torch.mm(rows, own.t(), out=scores[:, num_keys:])
    if is_last:
        scores.unflatten(0, (-1, tile.mask.shape[0]))[:, :, scores.shape[1] - num_masked :].add_(tile.mask)
    return scores


def causal_tiles(bounds: list[tuple[int, int]], like: Tensor) -> list[Tile]:
    """Tiles of causal attention, document by document; the keys are the context.

    Args:
        bounds: range of rows of each document, covering all of them.
        like: queries; masks are made in their dtype.
    """
    rows = rows_of_tile(like)
    triangle = torch.full((rows, rows), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)
    tiles = []
    for first, last in bounds:
        for begin in range(first, last, rows):
            end = min(begin + rows, last)
            tiles.append(Tile(slice(begin, end), slice(first, end), triangle[: end - begin, : end - begin]))
    return tiles
