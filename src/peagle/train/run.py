"""`peagle train`: from prepared rows and their states to checkpoints. Decide, load, initialise, fit, record."""

import contextlib
import logging
import math
import time
from dataclasses import asdict

import torch

from peagle import log
from peagle.drafter.card import refresh_card
from peagle.drafter.checkpoint import DTYPES
from peagle.drafter.checkpoint import load as load_drafter
from peagle.drafter.network import Drafter
from peagle.drafter.warm_start import warm_start
from peagle.errors import ConfigError, DiskError
from peagle.files import free_bytes, lock_file, sweep
from peagle.train.batches import Rows
from peagle.train.checkpoints import LAST, Keeper, discover, remove_all
from peagle.train.config import TrainConfig
from peagle.train.decision import Decision, decide
from peagle.train.loop import FitResult, fit
from peagle.train.masters import HEAD, choose_trained
from peagle.train.metrics import Trackers
from peagle.train.parallel import COLLECTIVE_TIMEOUT_S, World, join_ranks, leave_ranks
from peagle.train.plan import TrainPlan, resolve, settle
from peagle.train.sources import OpenRows, open_rows
from peagle.train.start import (
    NUM_STATISTICS_POSITIONS,
    empty,
    first_rows,
    fit_first_layer,
    initialise,
    positions_wanted,
    start_from_verifier,
)
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.weights import VerifierHead, load_embedding, load_head

logger = logging.getLogger(__name__)

_GB = 1e9


def main(config: TrainConfig) -> int:
    """`peagle train`: 0, or as shells count 128 and the signal that stopped it, since it is not done yet."""
    result = train(config)
    return 0 if result.signal_number is None else 128 + result.signal_number


def train(config: TrainConfig) -> FitResult:
    """Train a drafter and write its checkpoints.

    Returns:
        What was done; `signal_number` tells whether a signal ended it.

    Raises:
        PeagleError: what does not fit, before any weights are loaded; a full disk; gradients that stay not finite.
    """
    began_s = time.monotonic()
    config = settle(config)
    if config.save_path.exists() and not config.save_path.is_dir():
        raise ConfigError(f"--save-path {config.save_path}: is a file, expected a folder")
    world = join_ranks(config.device, COLLECTIVE_TIMEOUT_S)
    if config.fsdp_shard and world.size == 1:
        raise ConfigError(
            "--fsdp-shard: one process has no others to shard over; start several with `torchrun --standalone "
            "--nproc_per_node N -m peagle train ...`, or omit it"
        )
    with contextlib.ExitStack() as held:
        held.callback(leave_ranks)
        # 1. Rank 0 decides for all; every rank settles the same plan, and rank 0 takes the folder.
        decision = Decision(**world.from_main("decision", lambda: asdict(decide(config))))
        plan = resolve(config, decision.drafter_config(), world)
        config = plan.settled(config)
        for warning in decision.warnings if world.is_main else []:
            logger.warning("%s", warning)
        trackers = _trackers(config, world)
        world.from_main("save_path", lambda: _prepare_save_path(config, held))
        # 2. Weights and rows, on each rank.
        drafter, head, rows = _load(config, decision, world)
        with contextlib.closing(rows):
            world.from_main("disk", lambda: _check_disk(config, decision, drafter))
            counts = {
                "num_rows": len(decision.train),
                "num_supervised_tokens": sum(values[1] for values in decision.train.values()),
            }
            keeper = Keeper(
                save_path=config.save_path,
                dtype=decision.save_dtype,
                keep_last=config.keep_last,
                fingerprint=decision.fingerprint(config),
                counts=counts,
                world=world,
            )
            # 3. Train.
            _greet(config, plan, decision, drafter, world)
            result = fit(
                drafter=drafter,
                head=head,
                rows=rows.train,
                validation_rows=rows.held_out,
                settings=plan,
                world=world,
                keeper=keeper,
                metrics_path=config.save_path / "metrics.jsonl",
                trackers=trackers,
            )
        # 4. Record what was done.
        if world.is_main:
            _record(
                config=config,
                decision=decision,
                world=world,
                result=result,
                refused=rows.refused,
                counts=counts,
                seconds=time.monotonic() - began_s,
            )
        if trackers is not None:
            trackers.close()
        return result


def _load(config: TrainConfig, decision: Decision, world: World) -> tuple[Drafter, VerifierHead, OpenRows]:
    """The drafter before its first step, the verifier's head, and the two sets of rows. Each rank reads its own."""
    loaded: list[tuple[Drafter, VerifierHead, OpenRows]] = []

    def load() -> None:
        train, held_out = decision.extents(decision.train), decision.extents(decision.held_out)
        rows = open_rows(config, decision.store_spec(), train, held_out, world)
        try:
            verifier = load_verifier_config(
                config.verifier_name_or_path, config.trust_remote_code, config.verifier_tensors
            )
            head = load_head(verifier)
            if world.is_main:
                drafter = _first_drafter(config, decision, verifier, head, rows.train, world.device)
            else:  # its weights come from rank 0, before the first step
                drafter = empty(decision.drafter_config(), _draft_ids(decision), world.device)
            loaded.append((drafter, head, rows))
        except BaseException:
            rows.close()
            raise

    world.together("load", load)
    return loaded[0]


def _draft_ids(decision: Decision) -> torch.Tensor | None:
    return None if decision.draft_ids is None else torch.tensor(decision.draft_ids)


def _first_drafter(
    config: TrainConfig,
    decision: Decision,
    verifier: VerifierConfig,
    head: VerifierHead,
    rows: Rows,
    device: torch.device,
) -> Drafter:
    """Made new, from the verifier's last layers or random ones, or taken over from a checkpoint."""
    shape = decision.drafter_config()
    starts_from_verifier = config.init_layers == "verifier" and config.from_pretrained is None
    num_positions = max(NUM_STATISTICS_POSITIONS, positions_wanted(shape) if starts_from_verifier else 0)
    stored = first_rows(rows, num_positions)
    drafter = initialise(shape, load_embedding(verifier), head, _draft_ids(decision), stored, config.seed)
    if starts_from_verifier:
        hindrance = start_from_verifier(drafter, verifier)
        origin = f"random numbers: {hindrance}"
        if hindrance is None:
            num_fitted = fit_first_layer(drafter.to(device), stored, verifier.num_layers - config.num_layers)
            origin = f"the verifier's last layers, the first one fitted on {num_fitted} positions"
        logger.info("layers start from %s", origin)
    if config.from_pretrained is not None:
        source = load_drafter(config.from_pretrained, torch.float32, torch.device("cpu"))
        start = warm_start(drafter, source, config.from_pretrained)
        left = f"; left behind: {', '.join(start.left)}" if start.left else ""
        new = "; ".join(start.new) or "nothing"
        logger.info(f"started from {config.from_pretrained}: {len(start.taken)} tensors taken; new: {new}{left}")
    return drafter


def _trackers(config: TrainConfig, world: World) -> Trackers | None:
    opened: list[Trackers] = []

    def start() -> None:
        config.save_path.mkdir(parents=True, exist_ok=True)
        settings = config.model_dump(mode="json")
        opened.append(Trackers(config.log_to, config.save_path, config.save_path.name, settings))

    if config.log_to:
        world.from_main("trackers", start)
    return opened[0] if opened else None


def _prepare_save_path(config: TrainConfig, held: contextlib.ExitStack) -> None:
    """Make the folder and lock it; without resuming, remove the checkpoints that an earlier run left there."""
    try:
        config.save_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--save-path {config.save_path}: cannot be made ({error.strerror})") from None
    held.enter_context(lock_file(config.save_path / ".lock", f"training into {config.save_path}"))
    leftovers = sweep(config.save_path)
    if leftovers:
        logger.info("removed what a killed process left in %s: %s", config.save_path, ", ".join(leftovers))
    if not config.resume_from_checkpoint:
        gone = remove_all(config.save_path)
        if gone:
            logger.info("--no-resume-from-checkpoint: removed checkpoints %s of an earlier run", ", ".join(gone))


def checkpoint_bytes(config: TrainConfig, save_dtype: str, drafter: Drafter) -> int:
    """What one checkpoint takes on disk: the drafter, its float32 masters, the optimizer's state."""
    choose_trained(drafter, config.train_embeddings, config.train_lm_head)
    saved = masters = 0
    for name, parameter in drafter.named_parameters():
        saved += parameter.numel() * DTYPES[save_dtype].itemsize
        if parameter.requires_grad:
            whole = parameter.dim() != 2 or name in ("embed_tokens.weight", HEAD) or config.optimizer == "adamw"
            masters += parameter.numel() * 4 * (3 if whole else 2)
    tables = sum(buffer.numel() * buffer.element_size() for buffer in drafter.buffers())
    return saved + masters + tables


def _check_disk(config: TrainConfig, decision: Decision, drafter: Drafter) -> None:
    """Refuse to start where not even one checkpoint fits beside the one before; warn where not all of them will."""
    one = checkpoint_bytes(config, decision.save_dtype, drafter)
    free = free_bytes(config.save_path)
    # A checkpoint is written beside the one that it replaces or follows.
    if free < 1.02 * one:
        raise DiskError(
            f"{config.save_path}: a checkpoint takes {one / _GB:.2f} GB, {free / _GB:.2f} GB are free; free some, or "
            "take another --save-path"
        )
    written = len(discover(config.save_path))
    epochs = math.ceil(config.epochs / config.checkpoint_freq)
    expected = max(0, epochs - written if config.keep_last is None else config.keep_last + 2 - written)
    if free < 1.02 * one * expected:
        logger.warning(
            f"{config.save_path}: {expected} checkpoints of {one / _GB:.2f} GB are to come, {free / _GB:.2f} GB are "
            "free; --keep-last 1 needs three times one"
        )


def _greet(config: TrainConfig, plan: TrainPlan, decision: Decision, drafter: Drafter, world: World) -> None:
    shape = drafter.config
    millions = sum(p.numel() for p in drafter.parameters()) / 1e6
    if plan.is_parallel:
        name, how = "P-EAGLE", f"mask token {shape.mask_token_id} ({decision.mask_token_how})"
    else:
        name, how = "EAGLE-3", f"{config.ttt_steps} steps"
    logger.info(
        f"drafter: {name}, {shape.num_layers} {shape.layer_type} layer{'' if shape.num_layers == 1 else 's'}, hidden "
        f"{shape.hidden_size}, {millions:.1f} M parameters, draft vocabulary {shape.draft_vocab_size}, layers "
        f"{list(shape.aux_layer_ids)} of the verifier, {how}"
    )
    matrices = f" and {plan.matrix_lr:.3g} for matrices" if plan.is_muon else ""
    logger.info(f"optimizer: {config.optimizer}, learning rate {plan.lr:.3g}{matrices}, {plan.scheduler_type} schedule")
    logger.info(
        f"step: {plan.step.attention} attention in {str(plan.dtype).removeprefix('torch.')}, blocks of "
        f"{plan.step.block_slots} slots, {plan.step.chunk_rows} rows of the vocabulary at a time"
    )
    logger.info(
        f"rows: {len(decision.train)} to train on, {len(decision.held_out)} to validate, hidden states "
        f"{config.hidden_states}; {world.size} rank{'' if world.size == 1 else 's'} on {world.device.type}"
    )


def _record(
    *,
    config: TrainConfig,
    decision: Decision,
    world: World,
    result: FitResult,
    refused: dict[str, str],
    counts: dict[str, int],
    seconds: float,
) -> None:
    """`run.yaml`, `manifest.json`, and the last line."""
    progress = result.progress
    checkpoints = [one.folder.name for one in discover(config.save_path)]
    if not checkpoints:
        raise DiskError(f"{config.save_path}: no checkpoint was written")
    used = len(decision.train) + len(decision.held_out)
    dropped = dict(decision.dropped)
    if config.max_samples is not None:
        dropped["over --max-samples"] = decision.num_prepared - used - sum(decision.dropped.values())
    if refused:
        dropped["refused by the verifier"] = len(refused)
    log.write_run(
        config.save_path,
        "train",
        config,
        {
            "seed": config.seed,
            "inputs": decision.data,
            "rows_read": decision.num_prepared,
            "rows_trained": len(decision.train),
            "rows_validated": len(decision.held_out),
            "rows_dropped": dropped,
            "rows_refused": refused,
            **counts,
            "mask_token": {"id": decision.drafter["mask_token_id"], "how": decision.mask_token_how},
            "warnings": decision.warnings,
            "world_size": world.size,
            "device": str(world.device),
            "steps": progress.step,
            "steps_empty": progress.num_empty,
            "steps_not_finite": progress.num_not_finite,
            "checkpoints": checkpoints,
            "checkpoint_best": progress.best.name,
            "acceptance_length": progress.best.score,
            "seconds": round(seconds, 2),
        },
    )
    for name in checkpoints:
        refresh_card(config.save_path / name, decision.drafter_config(), None)
    why = "; ".join(f"{reason}: {count}" for reason, count in dropped.items() if count) or "none"
    logger.info("read %d rows, trained on %d and validated on %d, dropped %s; wrote checkpoints %s to %s in %s",
                decision.num_prepared, len(decision.train), len(decision.held_out), why, ", ".join(checkpoints),
                config.save_path, log.duration(seconds))  # fmt: skip
    if result.signal_number is not None:
        logger.info("stopped by signal %d after step %d; the same command goes on", result.signal_number, progress.step)
    elif progress.best.name is None:
        logger.warning("no validation score, so there is no checkpoint_best; %s is usable", config.save_path / LAST)
    else:
        logger.info(
            "best by validation: checkpoint %s, acceptance length %.3f", progress.best.name, progress.best.score
        )
