"""The optimizer: which tensor gets which rule and rate, and its state as named tensors (no pickle).

Matrices of the layers and `fc` are stepped by Muon (or AdamW); embedding, head, norms and `mask_hidden` by AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.errors import CheckpointError
from peagle.train.config import FitConfig
from peagle.train.masters import EMBEDDING, HEAD, Masters
from peagle.train.muon import Muon

_ADAM_STATE = ("exp_avg", "exp_avg_sq")
_MUON_STATE = ("momentum_buffer",)
_ADAM_EPS = 1e-8
_ADAM_BETA1 = 0.9


@dataclass(frozen=True)
class Group:
    """Tensors that share a rule and a peak rate."""

    name: str
    """"matrices", "embeddings" or "vectors"."""
    tensors: tuple[str, ...]
    lr: float
    weight_decay: float
    is_muon: bool


def groups(config: FitConfig, shapes: dict[str, torch.Size]) -> list[Group]:
    """Split the trained tensors: [matrices, embeddings, vectors], empty ones left out.

    Args:
        config: rates and decays, settled for the drafter.
        shapes: shape of each trained tensor by name.
    """
    embeddings = tuple(name for name in shapes if name in (EMBEDDING, HEAD))
    matrices = tuple(name for name, shape in shapes.items() if len(shape) == 2 and name not in embeddings)
    vectors = tuple(name for name in shapes if name not in embeddings and name not in matrices)
    is_muon = config.optimizer == "muon"
    decay = config.muon_weight_decay if is_muon else config.weight_decay
    found = [
        Group("matrices", matrices, config.matrix_lr, decay, is_muon),
        Group("embeddings", embeddings, config.embedding_lr or config.settled_lr, 0.0, False),
        Group("vectors", vectors, config.settled_lr, 0.0, False),
    ]
    return [group for group in found if group.tensors]


class Optimizer:
    """Steps masters at a share of each group's peak rate.

    Args:
        config: rules and rates.
        masters: what is stepped.
    """

    def __init__(self, config: FitConfig, masters: Masters) -> None:
        self._masters = masters
        self.groups = groups(config, {name: tensor.shape for name, tensor in masters.tensors.items()})
        self._steppers: list[tuple[torch.optim.Optimizer, Group]] = []
        for group in self.groups:
            tensors = [masters.tensors[name] for name in group.tensors]
            stepper: torch.optim.Optimizer
            if group.is_muon:
                stepper = Muon(tensors, group.lr, config.muon_momentum, group.weight_decay, masters.world)
            else:
                stepper = torch.optim.AdamW(
                    tensors,
                    lr=group.lr,
                    betas=(_ADAM_BETA1, config.adam_beta2),
                    eps=_ADAM_EPS,
                    weight_decay=group.weight_decay,
                    fused=not masters.is_sharded or masters.world.device.type == "cuda",
                )
            self._steppers.append((stepper, group))

    def step(self, factor: float) -> None:
        """One update with every group's rate at `factor` times its peak. Collective with Muon."""
        for stepper, group in self._steppers:
            for entry in stepper.param_groups:
                entry["lr"] = factor * group.lr
            stepper.step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What it remembers: whole tensors "exp_avg.NAME" on the CPU, and AdamW's counts. Collective if sharded."""
        tensors: dict[str, Tensor] = {}
        steps: dict[str, int] = {}
        for stepper, group in self._steppers:
            for name in group.tensors:
                state = stepper.state.get(self._masters.tensors[name], {})
                for key in _MUON_STATE if group.is_muon else _ADAM_STATE:
                    if key in state:
                        tensors[f"{key}.{name}"] = self._masters.full(state[key])
                if "step" in state:
                    steps[name] = int(state["step"].item())
        return tensors, steps

    def load(self, tensors: dict[str, Tensor], steps: dict[str, int], where: str) -> None:
        """Take up the state of `state()`, written by any number of ranks.

        Raises:
            CheckpointError: a tensor is missing or of another shape: another optimizer, or another drafter.
        """
        for stepper, group in self._steppers:
            for name in group.tensors:
                master = self._masters.tensors[name]
                state = {}
                for key in _MUON_STATE if group.is_muon else _ADAM_STATE:
                    whole = tensors.get(f"{key}.{name}")
                    if whole is None and (steps or tensors):
                        raise CheckpointError(f"{where}: no {key}.{name}; it was written with another --optimizer")
                    if whole is None:
                        continue
                    state[key] = torch.zeros_like(master.detach())
                    self._masters.load(f"{key}.{name}", state[key], whole)
                if not group.is_muon and name in steps:
                    state["step"] = torch.tensor(float(steps[name]), device=_step_device(stepper, master))
                if state:
                    stepper.state[master] = state


def _step_device(stepper: torch.optim.Optimizer, master: Tensor) -> torch.device:
    """Where AdamW wants its count: beside the tensor if fused, else on the CPU."""
    return master.device if stepper.param_groups[0]["fused"] else torch.device("cpu")
