"""Settings resolved once: what EAGLE-3 and a checkpoint to start from fix, rates, attention, block and chunk sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.drafter.checkpoint import save
from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.errors import CheckpointError, ConfigError
from peagle.kernels.cpu import native_attention_problem
from peagle.train import plan
from peagle.train.config import FitConfig, TrainConfig
from peagle.train.parallel import World
from peagle.train.plan import resolve, settle
from tests.fakes import drafter_config
from tests.train.problem import ALONE

CPU = torch.device("cpu")
PROBLEM = native_attention_problem(CPU, torch.float32, 64)
QWEN3_8B = plan.Shape(hidden_size=4096, intermediate_size=12288, draft_vocab_size=151936, num_keys=8192)


def config(**values) -> TrainConfig:
    plain = {"verifier_name_or_path": "verifier", "data_path": "data", "save_path": "out"}
    return TrainConfig.build({**plain, **values})


def checkpoint(folder: Path, **changes) -> None:
    save(Drafter(drafter_config(**changes)), folder, "float32")


EAGLE3 = {"speculators_model_type": "eagle3"}


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
    shape = drafter_config(hidden_size=width)
    for settings in (FitConfig.build(values), settle(config(**values))):
        made = resolve(settings, shape, ALONE)
        assert (made.lr, made.matrix_lr, made.embedding_lr) == (rate, pytest.approx(matrix_rate), rate)
    again = made.settled(settle(config(**values)))
    assert resolve(again, shape, ALONE) == made


def weights(settings: FitConfig, shape: DrafterConfig) -> tuple[float, ...]:
    return resolve(settings, shape, ALONE).step.depth_weights


def test_the_default_decay_over_depths_is_not_for_the_steps_of_a_chain():
    chain = drafter_config(speculators_model_type="eagle3")
    decayed, alike = (1.0, 0.8, 0.8**2, 0.8**3), (1.0,) * 4
    assert weights(FitConfig.build({}), drafter_config()) == decayed
    assert weights(FitConfig.build({}), chain) == alike
    assert weights(FitConfig.build({"depth_loss_decay": 0.8}), chain) == decayed
    assert settle(config(speculator_type="eagle3")).depth_loss_decay == 1.0
    steps = settle(config(speculator_type="eagle3", ttt_step_loss_decay=0.9))
    assert weights(steps, chain) == (1.0, 0.9, 0.9**2)


def test_nothing_in_a_plan_is_left_open():
    for values in ({}, {"optimizer": "muon", "batch_size": 3, "max_steps": 7, "max_grad_norm": 0}):
        made = resolve(FitConfig.build(values), drafter_config(), World(0, 2, CPU))
        found = {**vars(made), **vars(made.step)}
        assert not [name for name, value in found.items() if value is None or value == "auto"]
        assert made.packs_per_step == values.get("batch_size", 2)


@pytest.mark.parametrize(
    ("values", "head_dim", "kind", "name"),
    [
        ({"attention": "auto"}, 64, "peagle", "native" if PROBLEM is None else "sdpa"),
        ({"attention": "auto"}, 8, "peagle", "sdpa"),
        ({"attention": "auto", "dtype": "float64"}, 64, "peagle", "sdpa"),
        ({"attention": "auto"}, 64, "eagle3", "native" if PROBLEM is None else "sdpa"),
        ({"attention": "flex"}, 64, "peagle", "flex"),
        ({"attention": "reference"}, 64, "eagle3", "reference"),
    ],
)
def test_attention_is_settled_by_name(values, head_dim, kind, name):
    shape = drafter_config(head_dim=head_dim, speculators_model_type=kind)
    assert resolve(FitConfig.build(values), shape, ALONE).step.attention == name


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        (
            {"attention": "flex"},
            "eagle3",
            "--attention flex: EAGLE-3 chains are trained with native,",
        ),
        ({"attention": "native"}, "peagle", "--attention native: heads of 8 are not a multiple of 64"),
        ({"attention": "native", "dtype": "bfloat16"}, "peagle", "--attention native: computes in float32"),
    ],
)
def test_an_attention_that_is_not_to_be_had_is_refused(values, kind, message):
    with pytest.raises(ConfigError, match=message):
        resolve(FitConfig.build(values), drafter_config(speculators_model_type=kind), ALONE)


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
        ({"num_layers": 1}, "--num-layers 1: .* has 2; omit the flag"),
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


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_larger_budget_never_gives_less(one: int, more: int) -> None:
    small, large = (plan.choose_sizes(gb * 10**8, QWEN3_8B) for gb in (one, one + more))
    assert small[0] <= large[0]
    assert small[1] <= large[1]


def test_the_least_budget_is_where_sizes_begin_to_grow() -> None:
    least = plan.least_budget(QWEN3_8B)
    assert plan.choose_sizes(least, QWEN3_8B)[0] == plan.MIN_BLOCK_SLOTS
    assert plan.choose_sizes(least // 2, QWEN3_8B)[0] == plan.MIN_BLOCK_SLOTS
    assert plan.choose_sizes(2 * least, QWEN3_8B)[0] == 2 * plan.MIN_BLOCK_SLOTS


def test_a_gpu_gives_an_eighth_of_its_memory_to_large_blocks() -> None:
    assert FitConfig().scratch_bytes(80 * 10**9) == 10 * 10**9
    by_flex = replace(QWEN3_8B, num_keys=0, itemsize=2)
    slots, rows = plan.choose_sizes(10 * 10**9, by_flex, is_gpu=True)
    assert 3000 < slots <= plan.MAX_GPU_BLOCK_SLOTS
    assert rows == plan.MAX_GPU_CHUNK_ROWS
    assert plan.choose_sizes(10 * 10**9, by_flex)[0] == plan.MAX_BLOCK_SLOTS
    assert FitConfig().scratch_bytes(None) == 1 << 30


def test_a_budget_that_no_block_fits_into_is_refused_with_what_fits() -> None:
    values, shape = {"total_seq_len": 100}, drafter_config()
    with pytest.raises(
        ConfigError, match=r"--memory-budget 1e-09: .* packs of 100 tokens, need 0\.\d+ \(GB\)"
    ) as caught:
        resolve(FitConfig.build({**values, "memory_budget": 1e-9}), shape, ALONE)
    least = float(str(caught.value).split("need ")[1].split(" ")[0])
    step = resolve(FitConfig.build({**values, "memory_budget": least}), shape, ALONE).step
    assert step.block_slots >= plan.MIN_BLOCK_SLOTS
    assert step.chunk_rows >= plan.MIN_CHUNK_ROWS


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_what_is_no_budget_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"memory.budget"):
        FitConfig.build({"memory_budget": value})
