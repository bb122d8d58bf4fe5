"""A drafter before its first step: the verifier's embedding, head and final norm, `mask_hidden` like a real state, and
random layers."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.drafter import Drafter, DrafterConfig
from peagle.train.order import generator
from peagle.train.rows import Rows
from peagle.verifier.weights import VerifierHead

# Positions from which the mean and spread of verifier states are taken: their error is then below one percent.
_NUM_POSITIONS = 16_384
# An unused embedding row may be zeros, at which the norm behind it has no useful gradient.
_TINY_ROW = 0.1


def initialise(
    config: DrafterConfig,
    embedding: Tensor,
    head: VerifierHead,
    draft_ids: Tensor | None,
    rows: Rows,
    seed: int,
) -> Drafter:
    """Make a new drafter in float32 on the CPU.

    Args:
        config: its shape.
        embedding: the verifier's, its scale folded in, [vocab_size, hidden_size].
        head: the verifier's whole head. Its scale is folded into the drafter's.
        draft_ids: verifier ids of the draft vocabulary, ascending, int64, [draft_vocab_size]; None if not pruned.
        rows: real states, for the scale of `mask_hidden`.
        seed: of the random weights and of the noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(embedding)
        drafter.norm.weight.copy_(head.norm_weight)
        weight = head.weight if draft_ids is None else head.restricted(draft_ids).weight
        drafter.lm_head.weight.copy_(weight.float() * head.logit_scale)
        if draft_ids is not None:
            drafter.d2t.copy_(draft_ids - torch.arange(draft_ids.numel()))
            drafter.t2d.zero_()
            drafter.t2d[draft_ids] = True
        if drafter.mask_hidden is not None:
            drafter.mask_hidden.copy_(mask_hidden(rows, seed).view_as(drafter.mask_hidden))
            _wake_row(drafter.embed_tokens.weight, config.mask_token_id or 0, seed)
    return drafter


def mask_hidden(rows: Rows, seed: int) -> Tensor:
    """A start for `mask_hidden` that looks like a real state: their mean, and noise of their spread, by dimension.

    Args:
        rows: where states are; those of the smallest ids' hash are read until there are enough positions.
        seed: of the noise.

    Returns:
        float32, [num_aux_layers * hidden_size].
    """
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for row_id in rows.extents():
        states = rows.read(row_id).aux_states.double()
        count, total, squares = count + states.shape[0], total + states.sum(0), squares + states.square().sum(0)
        if count >= _NUM_POSITIONS:
            break
    mean = total / count
    spread = (squares / count - mean.square()).clamp(min=0).sqrt()
    noise = torch.randn(mean.shape, generator=generator("mask_hidden", seed), dtype=torch.float64)
    return (mean + spread * noise).float()


def _wake_row(embedding: Tensor, row: int, seed: int) -> None:
    """Give the mask token's row the scale of the others if it has (almost) none, as rows that no token uses may."""
    scale = embedding.square().mean(1).sqrt()
    usual = scale.median()
    if scale[row] < _TINY_ROW * usual:
        noise = torch.randn(embedding.shape[1], generator=generator("mask_token", seed))
        embedding[row] = noise.to(embedding.dtype) * usual
