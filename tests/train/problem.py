"""A tiny training problem: random but learnable states of a made-up verifier, no files."""

from __future__ import annotations

from typing import Any

import torch

from peagle.data.records import TokenRow
from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import StoredRow
from peagle.train.blocks import StepSettings
from peagle.train.config import FitConfig
from peagle.train.loop import FitResult, fit
from peagle.train.parallel import World
from peagle.train.plan import TrainPlan, resolve
from peagle.train.sources import MemoryRows
from peagle.verifier.weights import VerifierHead
from tests.fakes import drafter_config

HIDDEN, VOCAB = 16, 32
ALONE = World(0, 1, torch.device("cpu"))


def step_settings(**changes: Any) -> StepSettings:
    """One block, all depths alike, PyTorch's attention; `changes` override fields."""
    values: dict[str, Any] = {
        "loss": "kl_div",
        "depth_weights": (1.0,) * 8,
        "attention": "sdpa",
        "block_slots": 1 << 30,
        "chunk_rows": 64,
        "checkpoint_base": False,
    }
    return StepSettings(**{**values, **changes})


def plan(world: World = ALONE, drafter: DrafterConfig | None = None, **settings: Any) -> TrainPlan:
    return resolve(config(**settings), drafter or drafter_config(), world)


def verifier_head(dtype: torch.dtype = torch.float32) -> VerifierHead:
    made = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCAB, HIDDEN, generator=made, dtype=torch.float64)
    return VerifierHead(
        norm_weight=torch.ones(HIDDEN), norm_eps=1e-6, weight=weight.to(dtype), logit_scale=1.0, logit_softcap=None
    )


def drafter(seed: int = 0, draft_ids: list[int] | None = None) -> Drafter:
    """A drafter with the verifier's head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Drafter(drafter_config(draft_vocab_size=VOCAB if draft_ids is None else len(draft_ids)))
        assert made.mask_hidden is not None
        torch.nn.init.normal_(made.mask_hidden)
    with torch.no_grad():
        if draft_ids is None:
            made.lm_head.weight.copy_(verifier_head().weight)
        else:
            ids = torch.tensor(draft_ids)
            made.d2t.copy_(ids - torch.arange(len(draft_ids)))
            made.t2d[ids] = True
            made.lm_head.weight.copy_(verifier_head().weight[ids])
    return made


def row(row_id: str, num_tokens: int, prompt: int, seed: int, supervised: bool = True) -> StoredRow:
    """A row whose states depend on its tokens, so that there is something to learn."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB - 2, (num_tokens,), generator=made)
    for i in range(prompt, num_tokens):
        ids[i] = (3 * ids[i - 1] + 1) % (VOCAB - 2)
    table = torch.randn(VOCAB, 3 * HIDDEN, generator=torch.Generator().manual_seed(9))
    mask = [0] * prompt + [int(supervised)] * (num_tokens - prompt)
    token_row = TokenRow(
        row_id=row_id,
        source="made-up",
        input_ids=ids.tolist(),
        loss_mask=mask,
        next_is_supervised=supervised,
        tail_length=0,
    )
    aux = table[ids] + 0.01 * torch.randn(num_tokens, 3 * HIDDEN, generator=made)
    following = torch.cat([ids[1:], (3 * ids[-1:] + 1) % (VOCAB - 2)])
    last = verifier_head().weight[following] + 0.01 * torch.randn(num_tokens, HIDDEN, generator=made)
    found = torch.tensor(token_row.label_positions(), dtype=torch.int64)
    return StoredRow(token_row, aux, found, last[found])


def rows(count: int, seed: int = 0) -> list[StoredRow]:
    return [row(f"row-{seed}-{i}", 10 + (7 * i) % 23, 2 + i % 5, 1000 * seed + i) for i in range(count)]


def config(**values: Any) -> FitConfig:
    plain = {
        "num_depths": 3,
        "total_seq_len": 48,
        "epochs": 2,
        "optimizer": "adamw",
        "lr": 3e-3,
        "dtype": "float64",
        "device": "cpu",
        "scheduler_type": "linear",
    }
    return FitConfig.build({**plain, **values})


def run(
    settings: FitConfig,
    train: list[StoredRow],
    held_out: list[StoredRow] = (),  # type: ignore[assignment]
    model: Drafter | None = None,
    world: World = ALONE,
    keeper: Any = None,
    metrics_path: Any = None,
) -> tuple[Drafter, FitResult]:
    """Fit a fresh drafter (or `model`) in this process."""
    model = model or drafter()
    sources = MemoryRows(train), MemoryRows(list(held_out))
    result = fit(model, verifier_head(), *sources, settings, world, keeper, metrics_path, None)
    return model, result
