"""Claims about what EAGLE-3, and a checkpoint to start from, decide about a run's settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.drafter.checkpoint import save
from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.errors import CheckpointError, ConfigError
from peagle.train.config import FitConfig, TrainConfig
from peagle.train.plan import for_drafter, settle
from tests.train.problem import drafter_config


def config(**values) -> TrainConfig:
    plain = {"verifier_name_or_path": "verifier", "data_path": "data", "save_path": "out"}
    return TrainConfig.build({**plain, **values})


def checkpoint(folder: Path, **changes) -> DrafterConfig:
    shape = DrafterConfig.build({**drafter_config().model_dump(), **changes})
    save(Drafter(shape), folder, "float32")
    return shape


EAGLE3 = {"speculators_model_type": "eagle3", "mask_token_id": None}


def test_eagle3_speaks_of_steps_and_trains_whole_chains_with_a_frozen_embedding():
    found = settle(config(speculator_type="eagle3", ttt_steps=5, ttt_step_loss_decay=0.9))
    assert (found.num_depths, found.depth_loss_decay) == (5, 0.9)
    assert (found.down_sample_ratio, found.down_sample_ratio_min) == (1.0, 1.0)
    assert found.train_embeddings == "none"
    assert settle(config(speculator_type="eagle3", train_embeddings="all")).train_embeddings == "all"


@pytest.mark.parametrize(
    ("values", "width", "rate", "matrix_rate"),
    [
        ({}, 192, 2e-3, 2e-3),
        ({}, 4096, 9.375e-5, 9.375e-5),
        ({"lr": 6e-4}, 4096, 6e-4, 6e-4),
        ({"optimizer": "muon"}, 4096, 8e-4, 8e-3),
        ({"optimizer": "muon", "muon_lr": 1e-3}, 192, 8e-4, 1e-3),
        ({"optimizer": "muon", "lr": 1e-3}, 192, 1e-3, 1e-2),
    ],
)
def test_an_unset_rate_follows_from_the_optimizer_and_the_drafter_s_width(values, width, rate, matrix_rate):
    shape = drafter_config().model_copy(update={"hidden_size": width})
    for asked in (FitConfig.build(values), settle(config(**values))):
        found = for_drafter(asked, shape)
        assert (found.lr, found.matrix_lr) == (rate, pytest.approx(matrix_rate))
        assert for_drafter(found, shape) == found


def test_a_rate_that_nobody_settled_is_refused():
    with pytest.raises(ConfigError, match="--lr is unset"):
        assert FitConfig.build({}).matrix_lr


def test_the_default_decay_over_depths_is_not_for_the_steps_of_a_chain():
    chain = drafter_config().model_copy(update={"speculators_model_type": "eagle3"})
    assert for_drafter(FitConfig.build({}), drafter_config()).depth_loss_decay == 0.8
    assert for_drafter(FitConfig.build({}), chain).depth_loss_decay == 1.0
    assert for_drafter(FitConfig.build({"depth_loss_decay": 0.8}), chain).depth_loss_decay == 0.8
    assert settle(config(speculator_type="eagle3")).depth_loss_decay == 1.0
    steps = settle(config(speculator_type="eagle3", ttt_step_loss_decay=0.9))
    assert for_drafter(steps, chain).depth_loss_decay == 0.9


@pytest.mark.parametrize("kind", ["peagle", "eagle3"])
def test_settled_settings_settle_to_themselves(kind):
    """`run.yaml` holds every value, so a run repeated from it must not be refused."""
    once = settle(config(speculator_type=kind))
    assert settle(TrainConfig.build(once.model_dump())) == once


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculator_type": "eagle3", "num_depths": 8}, "say --ttt-steps"),
        ({"speculator_type": "eagle3", "depth_loss_decay": 0.5}, "say --ttt-step-loss-decay"),
        ({"speculator_type": "eagle3", "down_sample_ratio": 0.7}, "--down-sample-ratio is for P-EAGLE"),
        ({"speculator_type": "eagle3", "mask_token_id": 3}, "EAGLE-3 has no mask token"),
        ({"speculator_type": "eagle3", "train_embeddings": "mask-token"}, "say all or none"),
        ({"ttt_steps": 5}, "--ttt-steps is for --speculator-type eagle3"),
        ({"norm_output": True}, "--norm-output is for --speculator-type eagle3"),
    ],
)
def test_a_flag_of_the_other_kind_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        settle(config(**values))


def test_a_checkpoint_brings_its_shape_along(tmp_path):
    checkpoint(tmp_path / "old", num_layers=1, norm_before_residual=True, intermediate_size=40, **EAGLE3)
    found = settle(config(from_pretrained=str(tmp_path / "old")))
    assert (found.num_layers, found.norm_before_residual, found.intermediate_size) == (1, True, 40)
    assert (found.draft_arch, found.draft_vocab_size, found.mask_token_id) == ("qwen3", None, None)
    assert settle(config(from_pretrained=str(tmp_path / "old"), num_layers=3)).num_layers == 3


def test_a_peagle_checkpoint_brings_its_mask_token_and_an_eagle3_one_its_norm_output(tmp_path):
    checkpoint(tmp_path / "parallel", mask_token_id=7)
    assert settle(config(from_pretrained=str(tmp_path / "parallel"))).mask_token_id == 7
    checkpoint(tmp_path / "chain", norm_output=True, **EAGLE3)
    assert settle(config(speculator_type="eagle3", from_pretrained=str(tmp_path / "chain"))).norm_output
    assert not settle(config(from_pretrained=str(tmp_path / "chain"))).norm_output


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 1}, "--num-layers 1: .* has 2; leave the flag away"),
        ({"draft_arch": "llama"}, "--draft-arch llama: .* has qwen3"),
        ({"norm_before_residual": True}, "--norm-before-residual True: .* has False"),
        ({"draft_vocab_size": 20}, "--draft-vocab-size 20: .* has 32 tokens"),
        ({"mask_token_id": 3}, "--mask-token-id 3: .* was trained with 31"),
    ],
)
def test_a_flag_that_differs_from_the_checkpoint_is_refused(tmp_path, values, message):
    checkpoint(tmp_path / "old")
    with pytest.raises(ConfigError, match=message):
        settle(config(from_pretrained=str(tmp_path / "old"), **values))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match=r"no config.json"):
        settle(config(from_pretrained=str(tmp_path)))
