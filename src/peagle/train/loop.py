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
from peagle.errors import ConfigError, PeagleError, TrainingError
from peagle.train.batches import Laid, Pack, Ready, ahead, lay_out, packs, share
from peagle.train.checkpoints import INTERRUPTED, Keeper, Progress
from peagle.train.config import FitConfig
from peagle.train.loss import verifier_choices
from peagle.train.masters import Masters, choose_trained
from peagle.train.memory import choose_sizes, default_budget, keep_pages, least_budget
from peagle.train.metrics import MetricsLog, StepMetrics, Sums, Trackers, Validation, add_up, sums_of
from peagle.train.optimizer import Optimizer, make
from peagle.train.parallel import World
from peagle.train.plan import for_drafter
from peagle.train.sources import Rows
from peagle.train.step import StepResult, StepSettings, train_step, validate_step
from peagle.verifier.weights import VerifierHead

logger = logging.getLogger(__name__)

# A run whose gradients are not finite so often in a row has a cause that more steps do not cure.
_MOST_NOT_FINITE = 3


@dataclass
class FitResult:
    """What a run did."""

    steps: list[StepMetrics] = field(default_factory=list)
    """Of this call; a resumed run's earlier steps are in metrics.jsonl."""
    validations: list[Validation] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    signal_number: int | None = None
    """The signal that stopped it, or None if it came to its end."""


def compute_dtype(config: FitConfig, device: torch.device) -> torch.dtype:
    """The type that the network computes in."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[config.dtype]


def step_settings(config: FitConfig, drafter: Drafter, num_pairs: int, world: World) -> StepSettings:
    """How steps are computed on this machine, for packs of up to `num_pairs` pair slots."""
    attention = config.attention
    is_parallel = drafter.config.speculators_model_type == "peagle"
    if attention == "auto":
        attention = "flex" if world.device.type == "cuda" and is_parallel else "sdpa"
    if attention == "flex" and not is_parallel:
        raise ConfigError("--attention flex: EAGLE-3 chains are trained with sdpa or reference")
    shape = drafter.config
    wanted = shape.hidden_size, shape.intermediate_size, shape.draft_vocab_size, num_pairs
    budget = default_budget(world.device) if config.memory_budget is None else int(config.memory_budget * 1e9)
    if config.memory_budget is not None and budget < least_budget(*wanted):
        least = math.ceil(least_budget(*wanted) / 1e7) / 100
        raise ConfigError(
            f"--memory-budget {config.memory_budget:g}: the smallest blocks of this drafter, with packs of {num_pairs} "
            f"tokens, need {least:g} (GB); give that or more"
        )
    sizes = choose_sizes(budget, *wanted)
    weights = None
    if config.depth_loss_decay != 1.0:
        weights = tuple(config.depth_loss_decay**depth for depth in range(config.num_depths))
    return StepSettings(
        config.loss_fn, weights, attention, sizes.block_slots, sizes.chunk_rows, config.activation_checkpointing
    )


def fit(
    drafter: Drafter,
    head: VerifierHead,
    rows: Rows,
    validation_rows: Rows,
    config: FitConfig,
    world: World,
    keeper: Keeper | None,
    metrics_path: Path | None,
    trackers: Trackers | None,
) -> FitResult:
    """Train a drafter in place.

    Args:
        drafter: float32 weights; `build.initialise` starts them from the verifier. On return it is on the device, in
            the compute dtype, on every rank (with `fsdp_shard`: sharded).
        head: the verifier's whole head.
        rows: what to train on. Rows without a supervised slot are passed over.
        validation_rows: what to score on; may be empty.
        config: everything else; what it leaves to the drafter's size is settled here (`kinds.for_drafter`).
        world: the ranks (`World(0, 1, torch.device("cpu"))` for one process).
        keeper: where to save, and to resume from; None writes no checkpoint.
        metrics_path: `metrics.jsonl`, or None.
        trackers: further places for the metrics, or None.

    Raises:
        TrainingError: nothing to train on, or gradients that stay not finite.
        DataError: a row longer than a pack.
    """
    if world.device.type == "cpu":
        keep_pages()
    config = for_drafter(config, drafter.config)
    return _Loop(drafter, head, rows, validation_rows, config, world, keeper, metrics_path, trackers).run()


@dataclass(frozen=True)
class _Item:
    """One optimizer step, as this rank sees it."""

    epoch: int
    group: list[Pack]
    mine: list[Pack]
    packs_before: int
    packs_in_epoch: int


class _Loop:
    """The state of one run on one rank."""

    def __init__(
        self,
        drafter: Drafter,
        head: VerifierHead,
        rows: Rows,
        validation_rows: Rows,
        config: FitConfig,
        world: World,
        keeper: Keeper | None,
        metrics_path: Path | None,
        trackers: Trackers | None,
    ) -> None:
        self.drafter, self.rows, self.validation_rows = drafter, rows, validation_rows
        self.config, self.world, self.keeper = config, world, keeper
        self.dtype = compute_dtype(config, world.device)
        lengths = _lengths(rows)
        if not lengths:
            raise TrainingError("no row has a supervised token; look at the loss masks with `peagle inspect`")
        self.lengths, self.held_out = lengths, validation_packs(_lengths(validation_rows), config)
        drafter.to(world.device)
        choose_trained(drafter, config.train_embeddings, config.train_lm_head)
        row = drafter.config.mask_token_id if config.train_embeddings == "mask-token" else None
        self.masters = Masters(drafter, self.dtype, row, world, config.fsdp_shard)
        self.optimizer = Optimizer(config, self.masters)
        whole_head = head.to(world.device, self.dtype)
        self.head, self.full_head = whole_head, None
        if drafter.config.is_pruned:
            self.head, self.full_head = whole_head.restricted(drafter.draft_ids), whole_head
        lm_head = drafter.lm_head.weight
        is_same = not lm_head.requires_grad and lm_head.dtype == self.head.weight.dtype
        if is_same and torch.equal(lm_head, self.head.weight):
            lm_head.data = self.head.weight  # one copy of the largest frozen matrix
        self.settings = step_settings(config, drafter, config.total_seq_len, world)
        self.result = FitResult()
        restored = keeper.restore(self.masters, self.optimizer) if keeper is not None else None
        self.progress = self.result.progress = restored or Progress()
        self.per_step = (config.batch_size or world.size) * config.gradient_accumulation_steps
        if config.batch_size is None and self.progress.packs_per_step:
            self.per_step = self.progress.packs_per_step  # of the run that is resumed, maybe by other ranks
        self.progress.packs_per_step = self.per_step
        planned = self._num_taken() + self._num_left()
        self.num_steps = min(planned, config.max_steps or planned)
        self.schedule = make(
            config.scheduler_type,
            config.scheduler_warmup_ratio,
            config.scheduler_warmup_steps,
            config.scheduler_total_steps or self.num_steps,
        )
        self.log = MetricsLog(metrics_path if world.is_main else None, self.progress.step, trackers)
        self._not_finite_in_a_row = 0

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

    def _num_taken(self) -> int:
        """Steps behind us, those included that learned nothing."""
        return self.progress.step + self.progress.num_empty + self.progress.num_not_finite

    def _num_left(self) -> int:
        """Steps that the rest of the epochs has."""
        left, done = 0, self.progress.packs_done
        for epoch in range(self.progress.epoch, self.config.epochs):
            order = packs(self.lengths, self.config.total_seq_len, self.config.seed, epoch)
            left += max(0, math.ceil((len(order) - done) / self.per_step))
            done = 0
        return left

    def _items(self) -> Iterator[_Item]:
        """The optimizer steps still to take."""
        done = self.progress.packs_done
        for epoch in range(self.progress.epoch, self.config.epochs):
            order = packs(self.lengths, self.config.total_seq_len, self.config.seed, epoch)
            items = []
            for first in range(done, len(order), self.per_step):
                group = order[first : first + self.per_step]
                mine = [group[i] for i in share(group, self.world.size)[self.world.rank]]
                items.append(_Item(epoch, group, mine, first, len(order)))
            left = items[: max(0, self.num_steps - self.progress.step)]
            self.rows.expect([row_id for item in left for one in item.mine for row_id in one.row_ids])
            yield from items
            done = 0

    def _load(self, item: _Item) -> list[Laid]:
        return [lay_out(self.rows, one, self.config, item.epoch) for one in item.mine]

    def _step(self, ready: Ready[_Item, list[Laid]], interrupt: Interrupt) -> StepMetrics | None:
        """One optimizer step; None if nothing in it was supervised, or its gradient was thrown away."""
        began_s, world, device = time.monotonic(), self.world, self.world.device
        laid = ready.made or []
        by_depth = [one.supervised_by_depth for one in laid]
        counts = world.sum(
            torch.tensor(
                [
                    *(float(sum(depths[d] for depths in by_depth)) for d in range(self.config.num_depths)),
                    float(sum(one.num_pairs for one in laid)),
                    float(ready.error is not None),
                    float(interrupt.signal_number or 0),
                ],
                dtype=torch.float64,
                device=device,
            )
        ).tolist()
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
        results = []
        divisor, settings = self._normalised(totals)
        with self.masters.step():
            for one in laid:
                batch, slots = one.batch.to(device, self.dtype), one.layout.to(device)
                results.append(train_step(self.drafter, self.head, batch, slots, divisor, settings, None))
        sums = sums_of(world.sum(add_up(results, self.config.num_depths, device)))
        norm = float(self.masters.norm())
        if not self._is_finite(sums, norm, ready.item):
            return None
        if self.config.max_grad_norm and norm > self.config.max_grad_norm:
            self.masters.scale(self.config.max_grad_norm / norm)
        factor = self.schedule.factor(self.progress.step)
        self.optimizer.step(factor)
        self.masters.publish()
        self.progress.step += 1
        return StepMetrics(
            self.progress.step,
            ready.item.epoch,
            sums.mean_loss,
            sums.accuracy,
            factor * self.optimizer.groups[0].lr,
            norm,
            num_supervised,
            num_tokens,
            time.monotonic() - began_s + ready.waited_s,
            ready.waited_s,
        )

    def _normalised(self, totals: list[int]) -> tuple[float, StepSettings]:
        """What a step's loss is divided by: P-EAGLE's slots by their one count, EAGLE-3's steps each by its own."""
        if self.drafter.config.speculators_model_type == "peagle":
            return float(sum(totals)), self.settings
        weights = self.settings.depth_weights or (1.0,) * len(totals)
        return 1.0, replace(self.settings, depth_weights=tuple(w / max(1, n) for w, n in zip(weights, totals)))

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
            is_last = item.epoch + 1 == self.config.epochs
            return is_last or self.config.checkpoint_freq <= 1 or (item.epoch + 1) % self.config.checkpoint_freq == 0
        if self.config.checkpoint_freq >= 1:
            return False
        share_before, share_after = (x / item.packs_in_epoch / self.config.checkpoint_freq for x in (before, after))
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
                    found = validate(
                        self.drafter,
                        self.head,
                        self.full_head,
                        self.validation_rows,
                        self.held_out,
                        self.config,
                        self.settings,
                        self.dtype,
                        self.world,
                        self.progress.step,
                        epoch,
                    )
            except PeagleError:  # raised on every rank: what was trained is kept, and validated when the run goes on
                self.progress.due = name
                self._save(INTERRUPTED, is_best=False)
                raise
            self.result.validations.append(found)
            self.log.write("validation", found)
            is_best, warning = self.progress.best.update(found.acceptance_length, found.loss, name)
            rates = " ".join(f"{rate:.3f}" for rate in found.accuracy)
            logger.info(
                "checkpoint %s: validation loss %.4f  accuracy %s  acceptance length %.3f%s",
                name,
                found.loss,
                rates,
                found.acceptance_length,
                " (best)" if is_best else "",
            )
            if warning and self.world.is_main:
                logger.warning("%s", warning)
        self._save(name, is_best)

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


# ---- Validation: every depth of every anchor of the held-out rows, no sampling, so that its figures are not noise.


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


# ---- SIGTERM and Ctrl-C during training: noted, answered between two optimizer steps, with everything saved.


class Interrupt:
    """Inside the context the first SIGTERM or SIGINT sets `signal_number`; a second SIGINT ends the process."""

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
