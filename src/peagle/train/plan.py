"""Settings resolved once: a config, the drafter's shape and the ranks give a `TrainPlan`, before any weight is loaded.

`settle` comes first: what the kind of drafter fixes, and what a checkpoint to start from brings along. Everything
behind a plan reads the plan, in which nothing is left open; no default is stated anywhere else.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

from peagle.drafter.checkpoint import CONFIG, DTYPES, find, read_config
from peagle.drafter.model_config import DrafterConfig
from peagle.errors import ConfigError
from peagle.kernels import cpu as kernels
from peagle.train.attention import AttentionName
from peagle.train.blocks import StepSettings
from peagle.train.config import CHAIN_SETTINGS, FitConfig, TrainConfig, flag_of
from peagle.train.parallel import World

# AdamW moves every number by about its rate, and an output sums `width` of them, so that the rate has to fall as the
# width grows: as 1 / width, by the rule of maximal-update parametrisation. Measured at a width of 192 alone, 2e-3
# (docs/recipe.md); at 4,096 this gives 9.4e-5, beside the 1e-4 of published EAGLE-3 recipes.
_ADAMW_LR_TIMES_WIDTH = 0.384
_LR_BESIDE_MUON = 8e-4
# Muon's step is scaled to AdamW's size (match_rms_adamw), yet it bears a larger rate.
_MUON_LR_RATIO = 10.0

# Slots of depth >= 1 of a block, rows of a chunk. On a CPU more of them gain nothing; a GPU's matrix products want
# thousands of rows, and every block adds each weight's gradient once.
MIN_BLOCK_SLOTS, MAX_BLOCK_SLOTS, MAX_GPU_BLOCK_SLOTS = 128, 640, 8192
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS, MAX_GPU_CHUNK_ROWS = 16, 1024, 2048
# A half of the budget for a block, an eighth for a chunk.
_BLOCK_PART, _CHUNK_PART = 2, 8

# Of a checkpoint that training starts from: flag -> field of its config.
_SHAPE = {
    "num_layers": "num_layers",
    "draft_arch": "layer_type",
    "intermediate_size": "intermediate_size",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
}


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """What the loop does, all of it settled."""

    drafter: DrafterConfig
    is_parallel: bool
    """P-EAGLE; else EAGLE-3."""
    dtype: torch.dtype
    step: StepSettings

    num_depths: int
    down_sample_ratio: float
    down_sample_ratio_min: float
    seed: int

    total_seq_len: int
    """Most tokens of a pack."""
    packs_per_step: int
    """Packs of an optimizer step, over all ranks."""
    is_packs_per_step_given: bool
    """Whether that was asked for; else a resumed run keeps the number that it began with, by whatever ranks."""
    epochs: int
    max_steps: int
    """Optimizer steps after which the run ends; `sys.maxsize` where only its epochs end it."""
    checkpoint_freq: float

    train_embeddings: Literal["all", "mask-token", "none"]
    train_lm_head: bool
    fsdp_shard: bool

    is_muon: bool
    lr: float
    """Peak rate of norms and `mask_hidden`."""
    matrix_lr: float
    """Peak rate of the layers' matrices."""
    embedding_lr: float
    """Peak rate of the embedding and of a trained head."""
    matrix_decay: float
    """Decoupled decay of the matrices; nothing else decays."""
    muon_momentum: float
    adam_beta2: float
    max_grad_norm: float
    """Infinite where nothing is clipped."""

    scheduler_type: Literal["linear", "cosine", "none"]
    warmup_ratio: float
    """Warm-up is this share of the schedule plus `warmup_steps`; one of the two is 0."""
    warmup_steps: int
    schedule_steps: int
    """Steps of the whole schedule; 0 for as many as the run has."""

    def settled(self, config: TrainConfig) -> TrainConfig:
        """The config with what was left open said: for `run.yaml`."""
        decay = self.step.depth_weights[1] if self.num_depths > 1 else config.depth_loss_decay
        return config.model_copy(update={"lr": self.lr, "depth_loss_decay": decay, "attention": self.step.attention})


def resolve(config: FitConfig, drafter: DrafterConfig, world: World) -> TrainPlan:
    """Settle what a config (a `TrainConfig` went through `settle`) leaves open.

    The drafter's widths decide rates and block sizes, its kind the weights of depths; the ranks' device all the rest.

    Raises:
        ConfigError: an attention that this machine or kind of drafter does not have, or a budget that is too small.
    """
    # 1. Rates: see the constants above.
    is_muon, is_parallel = config.optimizer == "muon", drafter.speculators_model_type == "peagle"
    lr = config.lr or (_LR_BESIDE_MUON if is_muon else _ADAMW_LR_TIMES_WIDTH / drafter.hidden_size)
    matrix_lr = (config.muon_lr or _MUON_LR_RATIO * lr) if is_muon else lr
    # 2. Depths: the default decay is P-EAGLE's, the steps of an EAGLE-3 chain weigh alike unless a decay was given.
    decay = config.depth_loss_decay
    if not is_parallel and "depth_loss_decay" not in config.model_fields_set:
        decay = 1.0
    # 3. The machine: type, attention, and sizes that fit the budget.
    automatic = "bfloat16" if world.device.type == "cuda" else "float32"
    dtype = DTYPES[automatic if config.dtype == "auto" else config.dtype]
    attention = _attention(config, drafter, dtype, world.device)
    block_slots, chunk_rows = _sizes(config, drafter, dtype, attention, world.device)
    step = StepSettings(
        loss=config.loss_fn,
        depth_weights=tuple(decay**depth for depth in range(config.num_depths)),
        attention=attention,
        block_slots=block_slots,
        chunk_rows=chunk_rows,
        checkpoint_base=config.activation_checkpointing,
    )
    return TrainPlan(
        drafter=drafter,
        is_parallel=is_parallel,
        dtype=dtype,
        step=step,
        num_depths=config.num_depths,
        down_sample_ratio=config.down_sample_ratio,
        down_sample_ratio_min=config.down_sample_ratio_min,
        seed=config.seed,
        total_seq_len=config.total_seq_len,
        packs_per_step=config.packs_per_step(world.size),
        is_packs_per_step_given=config.batch_size is not None,
        epochs=config.epochs,
        max_steps=config.max_steps or sys.maxsize,
        checkpoint_freq=config.checkpoint_freq,
        train_embeddings=config.train_embeddings,
        train_lm_head=config.train_lm_head,
        fsdp_shard=config.fsdp_shard,
        is_muon=is_muon,
        lr=lr,
        matrix_lr=matrix_lr,
        embedding_lr=config.embedding_lr or lr,
        matrix_decay=config.muon_weight_decay if is_muon else config.weight_decay,
        muon_momentum=config.muon_momentum,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_grad_norm or math.inf,
        scheduler_type=config.scheduler_type,
        warmup_ratio=config.scheduler_warmup_ratio if config.scheduler_warmup_steps is None else 0.0,
        warmup_steps=config.scheduler_warmup_steps or 0,
        schedule_steps=config.scheduler_total_steps or 0,
    )


def _attention(config: FitConfig, drafter: DrafterConfig, dtype: torch.dtype, device: torch.device) -> AttentionName:
    is_parallel = drafter.speculators_model_type == "peagle"
    problem = kernels.native_attention_problem(device, dtype, drafter.head_dim)
    if config.attention == "auto":
        if device.type == "cuda":
            return "flex" if is_parallel else "sdpa"
        return "native" if problem is None else "sdpa"
    if config.attention == "flex" and not is_parallel:
        raise ConfigError("--attention flex: EAGLE-3 chains are trained with native, sdpa or reference")
    if config.attention == "native" and problem is not None:
        raise ConfigError(f"--attention native: {problem}")
    return config.attention


def _sizes(
    config: FitConfig, drafter: DrafterConfig, dtype: torch.dtype, attention: AttentionName, device: torch.device
) -> tuple[int, int]:
    is_gpu = device.type == "cuda"
    shape = Shape(
        hidden_size=drafter.hidden_size,
        intermediate_size=drafter.intermediate_size,
        draft_vocab_size=drafter.draft_vocab_size,
        num_keys=0 if attention == "flex" and is_gpu else config.total_seq_len,
        itemsize=dtype.itemsize if is_gpu else 4,
    )
    budget = config.scratch_bytes(int(torch.cuda.get_device_properties(device).total_memory) if is_gpu else None)
    least = least_budget(shape)
    if config.memory_budget is not None and budget < least:
        raise ConfigError(
            f"--memory-budget {config.memory_budget:g}: the smallest blocks of this drafter, with packs of "
            f"{config.total_seq_len} tokens, need {math.ceil(least / 1e7) / 100:g} (GB); give that or more"
        )
    return choose_sizes(budget, shape, is_gpu)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the memory of a block and a chunk follows from."""

    hidden_size: int
    intermediate_size: int
    draft_vocab_size: int
    num_keys: int
    """Pair slots of the longest batch, whose scores a block holds; 0 where attention holds none."""
    itemsize: int = 4
    """Bytes of a number."""

    @property
    def row_bytes(self) -> int:
        """Of a chunk: about two rows of the vocabulary, its logits and the verifier's of its label."""
        return self.itemsize * 2 * self.draft_vocab_size

    @property
    def slot_bytes(self) -> int:
        """Of a block: a slot's activations in four layers at once, and its scores."""
        return 4 * self.itemsize * (24 * self.hidden_size + 6 * self.intermediate_size) + 5 * self.num_keys


def choose_sizes(budget_bytes: int, shape: Shape, is_gpu: bool = False) -> tuple[int, int]:
    """Block and chunk sizes that keep a step's scratch memory (beyond the base pass) within the budget.

    Args:
        budget_bytes: too small for the smallest block or chunk, it gets these all the same.
        shape: of the drafter and its longest batch.
        is_gpu: whether blocks may be as large as a GPU likes them.

    Returns:
        (slots of depth >= 1 of a block, rows of a chunk).
    """
    most_slots = MAX_GPU_BLOCK_SLOTS if is_gpu else MAX_BLOCK_SLOTS
    most_rows = MAX_GPU_CHUNK_ROWS if is_gpu else MAX_CHUNK_ROWS
    block, chunk = budget_bytes // _BLOCK_PART // shape.slot_bytes, budget_bytes // _CHUNK_PART // shape.row_bytes
    return max(MIN_BLOCK_SLOTS, min(most_slots, block)), max(MIN_CHUNK_ROWS, min(most_rows, chunk))


def least_budget(shape: Shape) -> int:
    """The bytes that the smallest block and chunk take."""
    return max(MIN_BLOCK_SLOTS * _BLOCK_PART * shape.slot_bytes, MIN_CHUNK_ROWS * _CHUNK_PART * shape.row_bytes)


def default_config(drafter: DrafterConfig, dtype: str) -> FitConfig:
    """The defaults of `peagle train` for a drafter of this kind, with as many depths as it drafts."""
    kind = CHAIN_SETTINGS if drafter.speculators_model_type == "eagle3" else {}
    return FitConfig.build({"num_depths": drafter.num_speculative_tokens, "dtype": dtype, **kind})


def settle(config: TrainConfig) -> TrainConfig:
    """Settings with nothing left implied: what EAGLE-3 fixes, and what `--from-pretrained` brings along.

    Raises:
        ConfigError: a flag that this kind of drafter does not have, or that differs from the checkpoint.
        CheckpointError: the checkpoint cannot be read.
    """
    changes = config.of_kind()
    if config.from_pretrained is not None:
        changes |= _shape_of(config, pretrained_config(config.from_pretrained))
    return TrainConfig.build({**config.model_dump(), **changes})


def pretrained_config(checkpoint: str) -> DrafterConfig:
    """The shape of a drafter to start from."""
    folder = find(checkpoint)
    return DrafterConfig.from_json(read_config(folder), str(folder / CONFIG))


def _shape_of(config: TrainConfig, source: DrafterConfig) -> dict[str, Any]:
    """Flags that the checkpoint decides, checked against those that were given."""
    changes: dict[str, Any] = {"draft_vocab_size": source.draft_vocab_size if source.is_pruned else None}
    for flag, field in _SHAPE.items():
        value, given = getattr(source, field), getattr(config, flag)
        if flag not in config.model_fields_set or given is None:
            changes[flag] = value
        # More layers than the checkpoint has are new ones; fewer would throw trained ones away.
        elif given != value and not (flag == "num_layers" and given > value):
            raise ConfigError(f"{flag_of(flag)} {given}: {config.from_pretrained} has {value}; omit the flag")
    if config.draft_vocab_size not in (None, source.draft_vocab_size):
        raise ConfigError(
            f"--draft-vocab-size {config.draft_vocab_size}: {config.from_pretrained} has {source.draft_vocab_size} "
            "tokens, and its vocabulary is taken over; omit the flag"
        )
    if config.speculator_type == "peagle" and source.mask_token_id is not None:
        if config.mask_token_id not in (None, source.mask_token_id):
            raise ConfigError(
                f"--mask-token-id {config.mask_token_id}: {config.from_pretrained} was trained with "
                f"{source.mask_token_id}; omit the flag"
            )
        changes["mask_token_id"] = source.mask_token_id
    if config.speculator_type == source.speculators_model_type == "eagle3":
        if "norm_output" in config.model_fields_set and config.norm_output != source.norm_output:
            raise ConfigError(f"--norm-output: {config.from_pretrained} has it {'on' if source.norm_output else 'off'}")
        changes["norm_output"] = source.norm_output
    return changes
