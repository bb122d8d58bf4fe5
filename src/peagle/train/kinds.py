"""What the kind of drafter, and a checkpoint to start from, decide about a run's settings, before it begins."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from peagle.drafter import DrafterConfig
from peagle.drafter.checkpoint import CONFIG, find, read_config, read_weights
from peagle.errors import CheckpointError, ConfigError
from peagle.train.config import FitConfig, TrainConfig

Settings = TypeVar("Settings", bound=FitConfig)

# EAGLE-3's own flags and the loop's general ones that they stand for.
_CHAIN = {"ttt_steps": "num_depths", "ttt_step_loss_decay": "depth_loss_decay"}
# Of a checkpoint that training starts from: flag -> field of its config.
_SHAPE = {
    "num_layers": "num_layers",
    "draft_arch": "layer_type",
    "intermediate_size": "intermediate_size",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
}


def settle(config: TrainConfig) -> TrainConfig:
    """Settings with nothing left implied: what EAGLE-3 fixes, and what `--from-pretrained` brings along.

    EAGLE-3 trains whole chains, without sampling, and keeps the verifier's embedding frozen unless asked.

    Raises:
        ConfigError: a flag that this kind of drafter does not have, or that differs from the checkpoint.
        CheckpointError: the checkpoint cannot be read.
    """
    given, changes = config.model_fields_set, dict[str, Any]()
    if config.speculator_type == "eagle3":
        changes |= _chain_settings(config)
    else:
        for name in (*_CHAIN, "norm_output"):
            if name in given and getattr(config, name) != TrainConfig.model_fields[name].default:
                raise ConfigError(f"{_flag(name)} is for --speculator-type eagle3; P-EAGLE has {_flag('num_depths')}")
    if config.from_pretrained is not None:
        changes |= _shape_of(config, pretrained_config(config.from_pretrained))
    return TrainConfig.build({**config.model_dump(), **changes})


def for_drafter(config: Settings, shape: DrafterConfig) -> Settings:
    """Settings with nothing left to the drafter's shape: the learning rate is a number.

    The default decay over depths is P-EAGLE's; the steps of an EAGLE-3 chain weigh alike unless a decay was given.
    """
    changes: dict[str, Any] = {"lr": config.lr_at(shape.hidden_size)}
    if shape.speculators_model_type == "eagle3" and "depth_loss_decay" not in config.model_fields_set:
        changes["depth_loss_decay"] = 1.0
    return config.model_copy(update=changes)


def pretrained_config(checkpoint: str) -> DrafterConfig:
    """The shape of a drafter to start from."""
    folder = find(checkpoint)
    return DrafterConfig.from_json(read_config(folder), str(folder / CONFIG))


def pretrained_draft_ids(checkpoint: str) -> Tensor:
    """Verifier ids of a checkpoint's pruned vocabulary, ascending, int64, [draft_vocab_size]."""
    folder = find(checkpoint)
    d2t = read_weights(folder).get("d2t")
    if d2t is None:
        raise CheckpointError(f"{folder}: no tensor d2t; the checkpoint cannot be used")
    return torch.arange(d2t.numel()) + d2t


def _chain_settings(config: TrainConfig) -> dict[str, Any]:
    given = config.model_fields_set
    changes: dict[str, Any] = {"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    for own, general in _CHAIN.items():
        if general in given and getattr(config, general) != getattr(config, own):
            raise ConfigError(f"{_flag(general)} is for P-EAGLE; with --speculator-type eagle3 say {_flag(own)}")
        changes[general] = getattr(config, own)
    for name in ("down_sample_ratio", "down_sample_ratio_min"):
        if name in given and getattr(config, name) != 1.0:
            raise ConfigError(f"{_flag(name)} is for P-EAGLE; EAGLE-3 trains every chain to its end")
    if config.mask_token_id is not None:
        raise ConfigError("--mask-token-id is for P-EAGLE; EAGLE-3 has no mask token")
    if config.train_embeddings == "mask-token":
        raise ConfigError("--train-embeddings mask-token: EAGLE-3 has no mask token; say all or none")
    if "train_embeddings" not in given:
        changes["train_embeddings"] = "none"
    return changes


def _shape_of(config: TrainConfig, source: DrafterConfig) -> dict[str, Any]:
    """Flags that the checkpoint decides, checked against those that were given."""
    changes: dict[str, Any] = {}
    for flag, field in _SHAPE.items():
        value, asked = getattr(source, field), getattr(config, flag)
        # More layers than the checkpoint has are new ones; fewer would throw trained ones away.
        is_kept = flag == "num_layers" and asked > value
        if flag not in config.model_fields_set or asked is None:
            changes[flag] = value
        elif asked != value and not is_kept:
            raise ConfigError(f"{_flag(flag)} {asked}: {config.from_pretrained} has {value}; leave the flag away")
    size = source.draft_vocab_size if source.is_pruned else None
    if config.draft_vocab_size not in (None, source.draft_vocab_size):
        raise ConfigError(
            f"--draft-vocab-size {config.draft_vocab_size}: {config.from_pretrained} has {source.draft_vocab_size} "
            "tokens, and its vocabulary is taken over; leave the flag away"
        )
    changes["draft_vocab_size"] = size
    if config.speculator_type == "peagle" and source.mask_token_id is not None:
        if config.mask_token_id not in (None, source.mask_token_id):
            raise ConfigError(
                f"--mask-token-id {config.mask_token_id}: {config.from_pretrained} was trained with "
                f"{source.mask_token_id}; leave the flag away"
            )
        changes["mask_token_id"] = source.mask_token_id
    if config.speculator_type == source.speculators_model_type == "eagle3":
        if "norm_output" in config.model_fields_set and config.norm_output != source.norm_output:
            raise ConfigError(f"--norm-output: {config.from_pretrained} has it {'on' if source.norm_output else 'off'}")
        changes["norm_output"] = source.norm_output
    return changes


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
