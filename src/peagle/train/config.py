"""What can be set about training, said once: `FitConfig` for the loop, `TrainConfig` for `peagle train`.

The loop knows depths only: `TrainConfig.of_kind` says EAGLE-3's own settings in depths, and `plan.resolve` settles
what is unset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from peagle.config import SERVER, ServerSettings, StageConfig
from peagle.errors import ConfigError

_COD: dict[str, JsonValue] = {"panel": "Parallel drafting"}
_DRAFTER: dict[str, JsonValue] = {"panel": "Drafter"}
_OPTIMIZER: dict[str, JsonValue] = {"panel": "Optimizer"}
_SCHEDULE: dict[str, JsonValue] = {"panel": "Schedule"}
_MACHINE: dict[str, JsonValue] = {"panel": "Machine"}
_PATHS: dict[str, JsonValue] = {"panel": "Paths"}
_RUN: dict[str, JsonValue] = {"panel": "Run"}
_CHAIN: dict[str, JsonValue] = {"panel": "EAGLE-3"}

_CPU_BUDGET_BYTES = 1 << 30
# Of a GPU's memory, whether free or not, so that blocks are the same from run to run: 10 GB of 80.
_GPU_BUDGET_SHARE = 8
# EAGLE-3's own flags and the loop's general ones that they stand for.
_CHAIN_FLAGS = {"ttt_steps": "num_depths", "ttt_step_loss_decay": "depth_loss_decay"}
# EAGLE-3 trains whole chains, without sampling, over the verifier's embedding.
CHAIN_SETTINGS: dict[str, Any] = {
    "down_sample_ratio": 1.0,
    "down_sample_ratio_min": 1.0,
    "train_embeddings": "none",
}


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


class FitConfig(StageConfig):
    """The loop: sampling, batches, loss, optimizer, schedule, machine. Enough to train from Python (`train.fit`)."""

    num_depths: int = Field(4, ge=1, json_schema_extra=_COD)
    """Depths trained per chain, depth 0 included; also how many tokens the drafter proposes when served."""
    down_sample_ratio: float = Field(0.7, gt=0, le=1, json_schema_extra=_COD)
    """COD retention: depth d keeps this share, to the power d, of the anchors."""
    down_sample_ratio_min: float = Field(0.2, ge=0, le=1, json_schema_extra=_COD)
    """Smallest share of anchors that any depth keeps."""

    total_seq_len: int = Field(8192, ge=8, json_schema_extra=_RUN)
    """Tokens in a pack: rows are packed together up to this length. A longer row is refused."""
    batch_size: int | None = Field(None, ge=1, json_schema_extra=_RUN)
    """Packs per batch, over all ranks together. Unset: one for each rank."""
    gradient_accumulation_steps: int = Field(1, ge=1, json_schema_extra=_RUN)
    """Batches per optimizer step; the last step of an epoch may have fewer."""
    epochs: int = Field(5, ge=1, json_schema_extra=_RUN)
    """Passes over the rows."""
    max_steps: int | None = Field(None, ge=1, json_schema_extra=_RUN)
    """Stop after this many optimizer steps; the schedule then ends there too."""
    seed: int = Field(42, ge=0, lt=1 << 63, json_schema_extra=_RUN)
    """Seed of the drafter's first weights, of the order of rows and of COD sampling."""
    checkpoint_freq: float = Field(1.0, gt=0, json_schema_extra=_RUN)
    """Validate, and save, every so many epochs; below 1 several times an epoch (0.5: twice)."""

    loss_fn: Literal["kl_div", "ce", "tv"] = Field("kl_div", json_schema_extra=_OPTIMIZER)
    """Loss against the verifier: KL divergence, cross-entropy with its choice, or total variation."""
    depth_loss_decay: float = Field(0.8, gt=0, le=1, json_schema_extra=_OPTIMIZER)
    """A slot of depth d weighs this to the power d in the loss."""
    optimizer: Literal["adamw", "muon"] = Field("adamw", json_schema_extra=_OPTIMIZER)
    """muon steps the matrices of the layers with Muon and the rest with AdamW."""
    lr: float | None = Field(None, gt=0, le=100, json_schema_extra=_OPTIMIZER)
    """Peak learning rate of what AdamW steps. Unset: with adamw 0.384 over the drafter's hidden size (2e-3 at 192,
    where it was measured; 9.4e-5 at 4,096), with muon 8e-4."""
    muon_lr: float | None = Field(None, gt=0, le=100, json_schema_extra=_OPTIMIZER)
    """Peak learning rate of what Muon steps. Unset: ten times --lr."""
    embedding_lr: float | None = Field(None, gt=0, le=100, json_schema_extra=_OPTIMIZER)
    """Peak learning rate of the embedding (and of the head if it is trained). Unset: --lr."""
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False, json_schema_extra=_OPTIMIZER)
    """Decoupled decay of matrices; norms, `mask_hidden` and the embedding have none."""
    muon_weight_decay: float = Field(0.1, ge=0, allow_inf_nan=False, json_schema_extra=_OPTIMIZER)
    """Decoupled decay of the matrices that Muon steps."""
    muon_momentum: float = Field(0.95, ge=0, lt=1, json_schema_extra=_OPTIMIZER)
    """Momentum of Muon."""
    adam_beta2: float = Field(0.95, gt=0, lt=1, json_schema_extra=_OPTIMIZER)
    """Second-moment decay of AdamW; runs of a few thousand steps want less than its usual 0.999."""
    max_grad_norm: float = Field(1.0, ge=0, allow_inf_nan=False, json_schema_extra=_OPTIMIZER)
    """Clip the norm of all gradients together to this; 0 does not clip."""
    train_embeddings: Literal["all", "mask-token", "none"] = Field("all", json_schema_extra=_OPTIMIZER)
    """Train the whole embedding, the mask token's row, or nothing of it."""
    train_lm_head: bool = Field(False, json_schema_extra=_OPTIMIZER)
    """Train the head as well, instead of keeping the verifier's."""

    scheduler_type: Literal["linear", "cosine", "none"] = Field("linear", json_schema_extra=_SCHEDULE)
    """How the learning rate falls after warm-up, to zero at the end."""
    scheduler_warmup_ratio: float = Field(0.01, ge=0, le=1, json_schema_extra=_SCHEDULE)
    """Share of the optimizer steps in which the learning rate rises."""
    scheduler_warmup_steps: int | None = Field(None, ge=0, json_schema_extra=_SCHEDULE)
    """Optimizer steps of warm-up; wins over the ratio."""
    scheduler_total_steps: int | None = Field(None, ge=1, json_schema_extra=_SCHEDULE)
    """Optimizer steps of the whole schedule. Unset: as many as the run has."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", json_schema_extra=_MACHINE)
    """Where to train; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = Field("auto", json_schema_extra=_MACHINE)
    """Type to compute in; auto: bfloat16 on a GPU, float32 on a CPU. Masters are float32 (float64 with float64)."""
    attention: Literal["auto", "native", "sdpa", "reference", "flex"] = Field("auto", json_schema_extra=_MACHINE)
    """Attention: our own kernel (a CPU with AVX2, float32, heads of a multiple of 64), PyTorch's fused one, the dense
    definition, or PyTorch's compiled one. auto: flex on a GPU (sdpa for EAGLE-3); native on a CPU where it runs, else
    sdpa. A run prints which one it takes."""
    memory_budget: float | None = Field(None, gt=0, allow_inf_nan=False, json_schema_extra=_MACHINE)
    """GB for what blocks hold at a time: activations of their slots, rows of the vocabulary. They are cut to fit and
    the gradient stays the same; the base pass comes on top. Unset: 1 on a CPU, an eighth of a GPU's memory."""
    activation_checkpointing: bool = Field(False, json_schema_extra=_MACHINE)
    """Keep one state per layer and token of the base pass and recompute the rest: for very long contexts."""
    fsdp_shard: bool = Field(False, json_schema_extra=_MACHINE)
    """Shard masters, gradients and optimizer state over the ranks (FSDP2) instead of replicating them."""

    def packs_per_step(self, num_ranks: int) -> int:
        """Packs of an optimizer step, over all ranks together."""
        return (self.batch_size or num_ranks) * self.gradient_accumulation_steps

    def scratch_bytes(self, gpu_bytes: int | None) -> int:
        """What blocks may hold at a time; `gpu_bytes` is all the memory of the GPU, None on a CPU."""
        if self.memory_budget is not None:
            return int(self.memory_budget * 1e9)
        return _CPU_BUDGET_BYTES if gpu_bytes is None else gpu_bytes // _GPU_BUDGET_SHARE

    @model_validator(mode="after")
    def _fits(self) -> FitConfig:
        if self.down_sample_ratio_min > self.down_sample_ratio:
            raise ValueError(
                f"--down-sample-ratio-min {self.down_sample_ratio_min} exceeds "
                f"--down-sample-ratio {self.down_sample_ratio}"
            )
        if self.checkpoint_freq > 1 and not self.checkpoint_freq.is_integer():
            raise ValueError(f"--checkpoint-freq {self.checkpoint_freq}: above 1 it counts whole epochs")
        return self


class TrainConfig(ServerSettings, FitConfig):
    """Train a drafter, P-EAGLE or EAGLE-3, on prepared rows and their hidden states.

    Every checkpoint folder is servable as it is: `peagle serve SAVE_PATH/checkpoint_best`. The same command goes on
    after SIGTERM, Ctrl-C or a crash. For several GPUs:
    `torchrun --standalone --nproc_per_node 2 -m peagle train ...`.
    """

    verifier_name_or_path: str = Field(json_schema_extra=_PATHS)
    """The verifier: hub id or folder. Its embedding, head and final norm start the drafter."""
    verifier_tensors: tuple[str, ...] = Field((), json_schema_extra=_PATHS)
    """Names of the verifier's tensors where they are unusual: embedding=NAME, norm=NAME, head=NAME."""
    data_path: Path = Field(json_schema_extra=_PATHS)
    """Prepared rows (`peagle prepare`)."""
    hidden_states_path: Path | None = Field(None, json_schema_extra=_PATHS)
    """Their hidden states (`peagle extract`). Unset: `hidden_states` below --data-path."""
    save_path: Path = Field(json_schema_extra=_PATHS)
    """Where checkpoints go."""
    trust_remote_code: bool = Field(False, json_schema_extra=_PATHS)
    """Allow the verifier's own code when its config and tokenizer are loaded."""

    hidden_states: Literal["offline", "online", "hybrid"] = Field("offline", json_schema_extra=_PATHS)
    """offline reads the store; online asks the verifier for states as they are needed and keeps none; hybrid fills the
    store in the first epoch and reads it in later ones."""
    hidden_states_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", json_schema_extra=_PATHS)
    """Type in which states made during training are held and stored; auto: the verifier's, or that of the store."""
    from_pretrained: str | None = Field(None, json_schema_extra=_PATHS)
    """Start from this drafter (folder or hub id, P-EAGLE or EAGLE-3) instead of a new one; its shape and draft
    vocabulary are taken over."""

    speculator_type: Literal["peagle", "eagle3"] = Field("peagle", json_schema_extra=_DRAFTER)
    """Kind of drafter: peagle drafts all tokens in one pass, eagle3 one after another."""
    ttt_steps: int = Field(3, ge=1, json_schema_extra=_CHAIN)
    """Test-time-training steps: how far the drafter is unrolled over its own states; also how many tokens it proposes
    when served."""
    ttt_step_loss_decay: float = Field(1.0, gt=0, le=1, json_schema_extra=_CHAIN)
    """The mean loss of step t weighs this to the power t."""
    norm_output: bool = Field(False, json_schema_extra=_CHAIN)
    """Feed back the state after the final norm instead of the one before it ("EAGLE-3.1")."""
    num_layers: int = Field(4, ge=1, json_schema_extra=_DRAFTER)
    """Decoder layers of the drafter."""
    draft_arch: Literal["llama", "qwen3"] | None = Field(None, json_schema_extra=_DRAFTER)
    """Kind of its layers. Unset: qwen3 for a Qwen3 verifier, else llama."""
    intermediate_size: int | None = Field(None, ge=1, json_schema_extra=_DRAFTER)
    """Width of its MLPs. Unset: the verifier's."""
    init_layers: Literal["verifier", "random"] = Field("verifier", json_schema_extra=_DRAFTER)
    """What the layers start from: the verifier's last ones, where they are of the same kind, the first one fitted to
    what a drafter is given (`docs/recipe.md`); or random numbers."""
    norm_before_residual: bool = Field(False, json_schema_extra=_DRAFTER)
    """Carry the normed verifier state as the first layer's residual."""
    norm_before_fc: bool = Field(False, json_schema_extra=_DRAFTER)
    """One RMS norm over the concatenated verifier states before they are projected."""
    target_layer_ids: tuple[int, ...] | None = Field(None, json_schema_extra=_DRAFTER)
    """Verifier layers whose inputs the drafter reads. Unset: those of the store; another list is refused."""
    mask_token_id: int | None = Field(None, ge=0, json_schema_extra=_DRAFTER)
    """Token of the slots that stand for unknown tokens. Unset: chosen from the tokenizer, and printed."""
    draft_vocab_size: int | None = Field(None, ge=1, json_schema_extra=_DRAFTER)
    """Keep only the most frequent supervised tokens in the drafter's head. Unset: the whole vocabulary."""

    train_data_ratio: float = Field(0.9, gt=0, le=1, json_schema_extra=_RUN)
    """Share of the rows to train on, chosen by a hash of the row; the rest is validation."""
    max_samples: int | None = Field(None, ge=1, json_schema_extra=_RUN)
    """Use only this many rows (those of the smallest hash)."""
    on_missing: Literal["raise", "skip", "generate"] = Field("raise", json_schema_extra=_RUN)
    """What to do about prepared rows without hidden states: stop, pass over them, or (with offline) ask the verifier
    for them each time they are needed."""
    resume_from_checkpoint: bool = Field(True, json_schema_extra=_RUN)
    """Go on from the newest checkpoint in --save-path; without it they are removed and training starts anew."""
    keep_last: int | None = Field(None, ge=1, json_schema_extra=_RUN)
    """Keep only this many of the newest checkpoints (the best one is always kept). Unset: all."""
    log_to: tuple[str, ...] = Field((), json_schema_extra=_RUN)
    """Trackers that get the metrics too: tensorboard, wandb, mlflow, trackio. metrics.jsonl is always written."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", json_schema_extra=_RUN)
    """Type of the saved drafter; auto: the verifier's."""

    endpoint: tuple[str, ...] = Field((), json_schema_extra={**SERVER, "aliases": ["--vllm-endpoint"]})
    """Servers that make states (`peagle launch-vllm`), such as http://localhost:8000/v1. Unset: the verifier runs in
    this process, through Transformers."""

    def draft_rows(self, vocab_size: int) -> int:
        """Rows of the drafter's head."""
        return self.draft_vocab_size or vocab_size

    @property
    def states_path(self) -> Path:
        """Where the store is, or (online) where the server puts what it hands over."""
        return self.hidden_states_path or self.data_path / "hidden_states"

    @property
    def asks_verifier(self) -> bool:
        """Whether states are made during training."""
        return self.hidden_states != "offline" or self.on_missing == "generate"

    def of_kind(self) -> dict[str, Any]:
        """What the kind of drafter fixes, under the names that the loop reads.

        Raises:
            ConfigError: a flag that this kind of drafter does not have.
        """
        given = self.model_fields_set
        if self.speculator_type == "peagle":
            for name in (*_CHAIN_FLAGS, "norm_output"):
                if name in given and getattr(self, name) != TrainConfig.model_fields[name].default:
                    raise ConfigError(
                        f"{flag_of(name)} is for --speculator-type eagle3; P-EAGLE has {flag_of('num_depths')}"
                    )
            return {}
        changes = dict(CHAIN_SETTINGS)
        for own, general in _CHAIN_FLAGS.items():
            if general in given and getattr(self, general) != getattr(self, own):
                raise ConfigError(
                    f"{flag_of(general)} is for P-EAGLE; with --speculator-type eagle3 say {flag_of(own)}"
                )
            changes[general] = getattr(self, own)
        for name in ("down_sample_ratio", "down_sample_ratio_min"):
            if name in given and getattr(self, name) != 1.0:
                raise ConfigError(f"{flag_of(name)} is for P-EAGLE; EAGLE-3 trains every chain to its end")
        if self.mask_token_id is not None:
            raise ConfigError("--mask-token-id is for P-EAGLE; EAGLE-3 has no mask token")
        if self.train_embeddings == "mask-token":
            raise ConfigError("--train-embeddings mask-token: EAGLE-3 has no mask token; say all or none")
        if "train_embeddings" in given:
            del changes["train_embeddings"]
        return changes
