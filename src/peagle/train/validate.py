"""Validation: every depth of every anchor of the held-out rows, no sampling, so that its figures are not noise."""

from __future__ import annotations

import time

import torch

from peagle.drafter import Drafter
from peagle.train.batches import Ready, ahead, lay_out
from peagle.train.config import FitConfig
from peagle.train.distributed import World
from peagle.train.loss import verifier_choices
from peagle.train.metrics import Validation, add_up, sums_of
from peagle.train.order import Pack, packs, share
from peagle.train.rows import Rows
from peagle.train.step import StepResult, StepSettings, validate_step
from peagle.verifier.weights import VerifierHead


def validation_packs(lengths: dict[str, int], config: FitConfig) -> list[Pack]:
    """The held-out rows in a fixed order."""
    return packs(lengths, config.total_seq_len, config.seed, None)


def validate(
    drafter: Drafter,
    head: VerifierHead,
    full_head: VerifierHead | None,
    rows: Rows,
    held_out: list[Pack],
    config: FitConfig,
    settings: StepSettings,
    dtype: torch.dtype,
    world: World,
    step: int,
    epoch: int,
) -> Validation:
    """Score the drafter. Collective: each rank takes its share of the packs.

    Args:
        drafter: its parameters whole.
        head: the verifier's head, restricted to the draft vocabulary.
        full_head: the whole one, with a pruned vocabulary: a choice outside counts as missed. None if not pruned.
        rows, held_out: the validation rows.
        config, settings, dtype: as in training.
        world: the ranks.
        step, epoch: for the record.

    Raises:
        Exception: what a rank's data raised, on that rank, after the others were met.
    """
    began_s = time.monotonic()
    mine = [held_out[i] for i in share(held_out, world.size)[world.rank]]
    rows.expect([row_id for one in mine for row_id in one.row_ids])
    results: list[StepResult] = []
    error: Exception | None = None
    ready: Ready
    for ready in ahead(mine, lambda one: lay_out(rows, one, config, None)):
        if ready.made is None:
            error = ready.error
            break
        batch, slots = ready.made.batch.to(world.device, dtype), ready.made.layout.to(world.device)
        choices = None
        if full_head is not None:
            with torch.no_grad():
                draft_ids = torch.arange(drafter.d2t.numel(), device=world.device) + drafter.d2t
                choices = verifier_choices(
                    full_head, full_head.normed(batch.last_states), draft_ids, settings.chunk_rows
                )
        results.append(validate_step(drafter, head, batch, slots, settings, choices))
    added = add_up(results, config.num_depths, world.device)
    world.check(error)
    sums = sums_of(world.sum(added))
    return Validation(
        step,
        epoch,
        sums.mean_loss,
        sums.accuracy,
        sums.acceptance_length if sums.total[0] else float("nan"),
        sum(sums.total),
        time.monotonic() - began_s,
    )
