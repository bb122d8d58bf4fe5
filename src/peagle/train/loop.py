"""The training loop: optimizer steps over packs, validation, checkpoints. `fit` runs it.

An optimizer step takes a group of packs, whatever the number of ranks; each rank takes its share of them. Its loss is
the sum over all supervised slots of the group divided by their one count (EAGLE-3: step by step, the sum of the steps'
means), which is summed over ranks before anything runs forward. Every rank meets the others at the same three places of
a step: counts, gradients, sums.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from peagle import log
from peagle.drafter.network import Drafter
from peagle.errors import PeagleError, TrainingError
from peagle.train.batches import Pack, Ready, Rows, TrainingPack, ahead, lay_out, packs, share
from peagle.train.blocks import Uploads
from peagle.train.checkpoints import INTERRUPTED, Keeper, Progress
from peagle.train.config import FitConfig
from peagle.train.loss import verifier_choices
from peagle.train.masters import Masters, choose_trained
from peagle.train.metrics import MetricsLog, StepMetrics, Sums, Trackers, Validation, add_up, sums_of
from peagle.train.optimizer import Optimizer, schedule
from peagle.train.parallel import World
from peagle.train.plan import TrainPlan, resolve
from peagle.train.step import StepResult, keep_pages, train_step, validate_step
from peagle.verifier.weights import VerifierHead

logger = logging.getLogger(__name__)

# A run whose gradients are not finite so often in a row has a cause that more steps do not cure.
_MOST_NOT_FINITE = 3
# Packs of more tokens are not copied to the device before their step: two of them at once would cost it gigabytes.
_LONG_PACK = 32_768


@dataclass
class FitResult:
    """What a run did."""

    steps: list[StepMetrics] = field(default_factory=list)
    """Of this call; a resumed run's earlier steps are in metrics.jsonl."""
    validations: list[Validation] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    signal_number: int | None = None
    """The signal that stopped it, or None if it came to its end."""


def fit(
    drafter: Drafter,
    head: VerifierHead,
    rows: Rows,
    validation_rows: Rows,
    settings: FitConfig | TrainPlan,
    world: World,
    keeper: Keeper | None,
    metrics_path: Path | None,
    trackers: Trackers | None,
) -> FitResult:
    """Train a drafter in place.

    Args:
        drafter: float32 weights; `start.initialise` makes them. On return it is on the device, in the compute dtype, on
            every rank (with `fsdp_shard`: sharded).
        head: the verifier's whole head.
        rows: what to train on. Rows without a supervised slot are passed over.
        validation_rows: what to score on; may be empty.
        settings: everything else: a plan, or a config that `plan.resolve` makes one of.
        world: the ranks (`World(0, 1, torch.device("cpu"))` for one process).
        keeper: where to save, and to resume from; None writes no checkpoint.
        metrics_path: `metrics.jsonl`, or None.
        trackers: further places for the metrics, or None.

    Raises:
        TrainingError: nothing to train on, or gradients that stay not finite.
        DataError: a row longer than a pack.
    """
    keep_pages()
    plan = settings if isinstance(settings, TrainPlan) else resolve(settings, drafter.config, world)
    return _Loop(
        drafter=drafter,
        head=head,
        rows=rows,
        validation_rows=validation_rows,
        plan=plan,
        world=world,
        keeper=keeper,
        log=MetricsLog(metrics_path if world.is_main else None, trackers),
    ).run()


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One optimizer step, as this rank sees it."""

    epoch: int
    group: list[Pack]
    mine: list[Pack]
    packs_before: int
    packs_in_epoch: int


@dataclass(frozen=True)
class _Loaded:
    """This rank's packs of a step."""

    packs: list[TrainingPack]
    """Where they were read to."""
    first: tuple[TrainingPack, torch.cuda.Event | None] | None
    """The first one's copy on the device, begun while the step before is computed."""


class _Loop:
    """The state of one run on one rank."""

    def __init__(
        self,
        *,
        drafter: Drafter,
        head: VerifierHead,
        rows: Rows,
        validation_rows: Rows,
        plan: TrainPlan,
        world: World,
        keeper: Keeper | None,
        log: MetricsLog,
    ) -> None:
        self.drafter, self.rows, self.validation_rows = drafter, rows, validation_rows
        self.plan, self.world, self.keeper, self.log = plan, world, keeper, log
        self.result = FitResult()
        self.uploads = Uploads(world.device, plan.dtype)
        self._not_finite_in_a_row = 0
        # 1. The rows' lengths.
        self.lengths = _lengths(rows)
        if not self.lengths:
            raise TrainingError("no row has a supervised token; look at the loss masks with `peagle inspect`")
        self.held_out = packs(_lengths(validation_rows), plan.total_seq_len, plan.seed, None)
        # 2. The drafter on its device, its masters and its optimizer.
        drafter.to(world.device)
        choose_trained(drafter, plan.train_embeddings, plan.train_lm_head)
        row = plan.drafter.mask_token_id if plan.train_embeddings == "mask-token" else None
        self.masters = Masters(drafter, plan.dtype, row, world, plan.fsdp_shard)
        self.optimizer = Optimizer(plan, self.masters)
        # 3. The verifier's head, restricted to the draft vocabulary; one copy where the drafter's is the same.
        whole_head = head.to(world.device, plan.dtype)
        self.head, self.full_head = whole_head, None
        if plan.drafter.is_pruned:
            self.head, self.full_head = whole_head.restricted(drafter.draft_ids), whole_head
        lm_head = drafter.lm_head.weight
        is_same = not lm_head.requires_grad and lm_head.dtype == self.head.weight.dtype
        if is_same and torch.equal(lm_head, self.head.weight):
            lm_head.data = self.head.weight
        # 4. Where an interrupted run stopped, and how many steps are left.
        restored = keeper.restore(self.masters, self.optimizer) if keeper is not None else None
        self.progress = self.result.progress = restored or Progress()
        self.per_step = plan.packs_per_step
        if not plan.is_packs_per_step_given and self.progress.packs_per_step:
            self.per_step = self.progress.packs_per_step
        self.progress.packs_per_step = self.per_step
        taken = self.progress.step + self.progress.num_empty + self.progress.num_not_finite
        left = sum(max(0, math.ceil((len(order) - done) / self.per_step)) for _, order, done in self._epochs())
        self.num_steps = min(taken + left, plan.max_steps)
        self.schedule = schedule(plan, self.num_steps)
        self.log.begin(self.progress.step)

    def run(self) -> FitResult:
        """Train to the end, or to a signal."""
        left = self.num_steps - self.progress.step
        self._keep(max(0, self.progress.epoch - 1))
        with Interrupt() as interrupt, log.progress("train", max(left, 0), "steps") as meter:
            meter_tokens = 0
            began_s = time.monotonic()
            for ready in ahead(self._items(), self._load):
                if self.progress.step >= self.num_steps:
                    break
                metrics = self._step(ready, interrupt)
                item = ready.item
                self.progress.epoch, self.progress.packs_done = item.epoch, item.packs_before + len(item.group)
                at_end = self.progress.packs_done >= item.packs_in_epoch
                if metrics is not None:
                    self.result.steps.append(metrics)
                    self.log.write("train", metrics)
                    meter_tokens += metrics.num_tokens
                    meter.advance(1, _note(metrics, meter_tokens / (time.monotonic() - began_s)))
                if at_end:
                    self.progress.epoch, self.progress.packs_done = item.epoch + 1, 0
                if self._is_due(item) or self.progress.step >= self.num_steps:
                    self.progress.due = str(item.epoch) if at_end else f"step_{self.progress.step}"
                if self.result.signal_number is not None:
                    self._save(INTERRUPTED, is_best=False)
                    return self.result
                self._keep(item.epoch)
        return self.result

    def _epochs(self) -> Iterator[tuple[int, list[Pack], int]]:
        """Each epoch that is left: its number, its packs, and how many of them are done."""
        done = self.progress.packs_done
        for epoch in range(self.progress.epoch, self.plan.epochs):
            yield epoch, packs(self.lengths, self.plan.total_seq_len, self.plan.seed, epoch), done
            done = 0

    def _items(self) -> Iterator[_Item]:
        """The optimizer steps still to take."""
        for epoch, order, done in self._epochs():
            items = []
            for first in range(done, len(order), self.per_step):
                group = order[first : first + self.per_step]
                mine = [group[i] for i in share(group, self.world.size)[self.world.rank]]
                items.append(_Item(epoch=epoch, group=group, mine=mine, packs_before=first, packs_in_epoch=len(order)))
            left = items[: max(0, self.num_steps - self.progress.step)]
            self.rows.expect([row_id for item in left for one in item.mine for row_id in one.row_ids])
            yield from items

    def _load(self, item: _Item) -> _Loaded:
        packs = self.uploads.stage([lay_out(self.rows, one, self.plan, item.epoch) for one in item.mine])
        is_long = self.plan.total_seq_len > _LONG_PACK
        return _Loaded(packs, self.uploads.begin(packs[0]) if packs and not is_long else None)

    def _step(self, ready: Ready[_Item, _Loaded], interrupt: Interrupt) -> StepMetrics | None:
        """One optimizer step; None if nothing in it was supervised, or its gradient was thrown away."""
        began_s, world, device = time.monotonic(), self.world, self.world.device
        # 1. Counts over ranks, and whether one of them failed or was told to stop.
        loaded = ready.made.packs if ready.made is not None else []
        by_depth = [one.supervised_by_depth for one in loaded]
        counts = [float(sum(depths[d] for depths in by_depth)) for d in range(self.plan.num_depths)]
        counts += [
            float(sum(one.num_pairs for one in loaded)),
            float(ready.error is not None),
            float(interrupt.signal_number or 0),
        ]
        if world.size > 1:
            counts = world.sum(torch.tensor(counts, dtype=torch.float64, device=device)).tolist()
        *totals, num_tokens, num_failed, num_signals = (int(count) for count in counts)
        num_supervised = sum(totals)
        if num_failed:
            if self.progress.step:
                self._save(INTERRUPTED, is_best=False)  # the same command goes on at this very step
            raise ready.error or TrainingError("another rank failed; its own message says why")
        if num_signals:
            self.result.signal_number = interrupt.signal_number or 15
        if num_supervised == 0:
            self.progress.num_empty += 1
            return None
        # 2. Gradients of this rank's packs, then their sum over ranks.
        #    P-EAGLE's slots are divided by their one count, EAGLE-3's steps each by its own.
        results = []
        divisor, settings = float(num_supervised), self.plan.step
        if not self.plan.is_parallel:
            weights = (weight / max(1, count) for weight, count in zip(settings.depth_weights, totals))
            divisor, settings = 1.0, replace(settings, depth_weights=tuple(weights))
        with self.masters.step():
            for one in self.uploads.each(loaded, ready.made.first if ready.made is not None else None):
                results.append(train_step(self.drafter, self.head, one.batch, one.layout, divisor, settings, one.plan))
        sums = sums_of(world.sum(add_up(results, self.plan.num_depths, device)))
        norm = float(self.masters.norm())
        if not self._is_finite(sums, norm, ready.item):
            return None
        # 3. The optimizer.
        if norm > self.plan.max_grad_norm:
            self.masters.scale(self.plan.max_grad_norm / norm)
        factor = self.schedule.factor(self.progress.step)
        self.optimizer.step(factor)
        self.masters.publish()
        self.progress.step += 1
        return StepMetrics(
            step=self.progress.step,
            epoch=ready.item.epoch,
            loss=sums.mean_loss,
            accuracy=sums.accuracy,
            lr=factor * self.optimizer.groups[0].lr,
            grad_norm=norm,
            num_supervised=num_supervised,
            num_tokens=num_tokens,
            seconds=time.monotonic() - began_s + ready.waited_s,
            data_wait_s=ready.waited_s,
        )

    def _is_finite(self, sums: Sums, norm: float, item: _Item) -> bool:
        """Whether a step may be taken. If not, it is thrown away on every rank and counted; too many stop the run."""
        if math.isfinite(norm) and math.isfinite(sums.mean_loss):
            self._not_finite_in_a_row = 0
            return True
        self.masters.drop()
        self.progress.num_not_finite += 1
        self._not_finite_in_a_row += 1
        ids = [row_id for one in item.group for row_id in one.row_ids]
        shown = ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
        what = f"step {self.progress.step + 1}: loss {sums.mean_loss:.4g}, gradient norm {norm:.4g} (rows {shown})"
        if self._not_finite_in_a_row >= _MOST_NOT_FINITE:
            raise TrainingError(
                f"{what}: not finite {_MOST_NOT_FINITE} times in a row. The weights are those before; lower --lr (and "
                "--muon-lr), or look at these rows' states"
            )
        logger.warning("%s: not finite, thrown away", what)
        return False

    def _is_due(self, item: _Item) -> bool:
        """Whether a checkpoint falls on the end of this step."""
        before, after = item.packs_before, item.packs_before + len(item.group)
        if after >= item.packs_in_epoch:
            is_last = item.epoch + 1 == self.plan.epochs
            return is_last or self.plan.checkpoint_freq <= 1 or (item.epoch + 1) % self.plan.checkpoint_freq == 0
        if self.plan.checkpoint_freq >= 1:
            return False
        share_before, share_after = (x / item.packs_in_epoch / self.plan.checkpoint_freq for x in (before, after))
        return math.floor(share_after + 1e-9) > math.floor(share_before + 1e-9)

    def _keep(self, epoch: int) -> None:
        """If a checkpoint is due: validate, choose the best, save."""
        name, is_best = self.progress.due, False
        if name is None:
            return
        self.progress.due = None
        if self.held_out:
            try:
                with self.masters.whole():
                    scored = self._validate(epoch)
            except PeagleError:  # raised on every rank: what was trained is kept, and validated when the run goes on
                self.progress.due = name
                self._save(INTERRUPTED, is_best=False)
                raise
            self.result.validations.append(scored)
            self.log.write("validation", scored)
            is_best, warning = self.progress.best.update(scored.acceptance_length, scored.loss, name)
            rates, best = " ".join(f"{rate:.3f}" for rate in scored.accuracy), " (best)" if is_best else ""
            logger.info(
                f"checkpoint {name}: validation loss {scored.loss:.4f}  accuracy {rates}  acceptance length "
                f"{scored.acceptance_length:.3f}{best}"
            )
            if warning and self.world.is_main:
                logger.warning("%s", warning)
        self._save(name, is_best)

    def _validate(self, epoch: int) -> Validation:
        """Score the drafter on every depth of every anchor of the held-out rows: no sampling, so no noise. Collective.

        Raises:
            Exception: what a rank's data raised, on that rank, after the others were met.
        """
        began_s, world, plan = time.monotonic(), self.world, self.plan
        # 1. This rank's share of the packs, the next one read meanwhile.
        mine = [self.held_out[i] for i in share(self.held_out, world.size)[world.rank]]
        self.validation_rows.expect([row_id for one in mine for row_id in one.row_ids])
        results: list[StepResult] = []
        error: Exception | None = None
        ready: Ready
        for ready in ahead(mine, lambda one: self.uploads.stage([lay_out(self.validation_rows, one, plan, None)])):
            if ready.made is None:
                error = ready.error
                break
            (one,) = self.uploads.each(ready.made, None)
            # 2. With a pruned vocabulary, a choice outside it counts as missed.
            choices = None
            if self.full_head is not None:
                with torch.no_grad():
                    normed = self.full_head.normed(one.batch.last_states)
                    choices = verifier_choices(self.full_head, normed, self.drafter.draft_ids, plan.step.chunk_rows)
            results.append(validate_step(self.drafter, self.head, one.batch, one.layout, plan.step, choices, one.plan))
        # 3. Sums over ranks.
        added = add_up(results, plan.num_depths, world.device)
        world.check(error)
        sums = sums_of(world.sum(added))
        return Validation(
            step=self.progress.step,
            epoch=epoch,
            loss=sums.mean_loss,
            accuracy=sums.accuracy,
            acceptance_length=sums.acceptance_length if sums.total[0] else float("nan"),
            num_supervised=sum(sums.total),
            seconds=time.monotonic() - began_s,
        )

    def _save(self, name: str, is_best: bool) -> None:
        if self.keeper is not None:
            self.keeper.save(name, self.masters, self.optimizer, self.progress, is_best)


def _lengths(rows: Rows) -> dict[str, int]:
    """Tokens that training reads of each row, rows without a supervised slot left out."""
    return {row_id: extent.num_tokens for row_id, extent in rows.extents().items() if extent.num_tokens}


def _note(metrics: StepMetrics, tokens_per_s: float) -> str:
    """The live line's end: loss, accuracy at the first and the last depth, speed, waiting."""
    last = len(metrics.accuracy) - 1
    deepest = f"  accept@{last} {metrics.accuracy[last]:.2f}" if last else ""
    speed = f"{tokens_per_s / 1000:.1f}k" if tokens_per_s >= 10_000 else f"{tokens_per_s:.0f}"
    wait = 100 * metrics.data_wait_s / max(metrics.seconds, 1e-9)
    return (
        f"loss {metrics.loss:.3f}  accept@0 {metrics.accuracy[0]:.2f}{deepest}  {speed} tokens/s  data wait {wait:.0f}%"
    )


class Interrupt:
    """Inside the context the first SIGTERM or SIGINT sets `signal_number`; a second SIGINT ends the process.

    It is answered between two optimizer steps, with everything saved.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number
