"""The optimizer: which tensor gets which rule and rate, its state as named tensors (no pickle), and the schedule.

Matrices of the layers and `fc` are stepped by Muon (or AdamW); embedding, head, norms and `mask_hidden` by AdamW.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from peagle.errors import CheckpointError
from peagle.train.masters import EMBEDDING, HEAD, Masters
from peagle.train.parallel import World
from peagle.train.plan import TrainPlan

_ADAM_STATE = ("exp_avg", "exp_avg_sq")
_MUON_STATE = ("momentum_buffer",)
_ADAM_EPS = 1e-8
_ADAM_BETA1 = 0.9


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors that share a rule and a peak rate."""

    name: str
    """"matrices", "embeddings" or "vectors"."""
    tensors: tuple[str, ...]
    lr: float
    weight_decay: float
    is_muon: bool


def groups(plan: TrainPlan, shapes: dict[str, torch.Size]) -> list[Group]:
    """Split the trained tensors, given by name, into [matrices, embeddings, vectors], empty ones left out."""
    embeddings = tuple(name for name in shapes if name in (EMBEDDING, HEAD))
    matrices = tuple(name for name, shape in shapes.items() if len(shape) == 2 and name not in embeddings)
    vectors = tuple(name for name in shapes if name not in embeddings and name not in matrices)
    decay, is_muon = plan.matrix_decay, plan.is_muon
    all_groups = [
        Group(name="matrices", tensors=matrices, lr=plan.matrix_lr, weight_decay=decay, is_muon=is_muon),
        Group(name="embeddings", tensors=embeddings, lr=plan.embedding_lr, weight_decay=0.0, is_muon=False),
        Group(name="vectors", tensors=vectors, lr=plan.lr, weight_decay=0.0, is_muon=False),
    ]
    return [group for group in all_groups if group.tensors]


class Optimizer:
    """Steps masters at a share of each group's peak rate."""

    def __init__(self, plan: TrainPlan, masters: Masters) -> None:
        self._masters = masters
        self.groups = groups(plan, {name: tensor.shape for name, tensor in masters.tensors.items()})
        self._steppers: list[tuple[torch.optim.Optimizer, Group]] = []
        for group in self.groups:
            tensors = [masters.tensors[name] for name in group.tensors]
            stepper: torch.optim.Optimizer
            if group.is_muon:
                stepper = Muon(tensors, group.lr, plan.muon_momentum, group.weight_decay, masters.world)
            else:
                stepper = torch.optim.AdamW(
                    tensors,
                    lr=group.lr,
                    betas=(_ADAM_BETA1, plan.adam_beta2),
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
                for key in (_MUON_STATE if group.is_muon else _ADAM_STATE) if steps or tensors else ():
                    whole = tensors.get(f"{key}.{name}")
                    if whole is None:
                        raise CheckpointError(f"{where}: no {key}.{name}; it was written with another --optimizer")
                    state[key] = torch.zeros_like(master.detach())
                    self._masters.load(f"{key}.{name}", state[key], whole)
                if not group.is_muon and name in steps:
                    # AdamW wants its count beside the tensor if fused, else on the CPU.
                    device = master.device if stepper.param_groups[0]["fused"] else "cpu"
                    state["step"] = torch.tensor(float(steps[name]), device=device)
                if state:
                    stepper.state[master] = state


# Of Muon's Newton-Schulz iterations.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with its singular values pushed towards 1, by five Newton-Schulz iterations.

    Args:
        matrix: [num_rows, num_columns].

    Returns:
        The same shape, in the iteration's dtype: bfloat16 where the hardware multiplies it, float32 on other CPUs,
        float64 for a float64 matrix.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(_iteration_dtype(matrix))
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _iteration_dtype(matrix: Tensor) -> torch.dtype:
    if matrix.dtype == torch.float64:
        return torch.float64
    # Emulated bfloat16 products cost several times float32's; with hardware they cost half.
    slow = matrix.device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
    return torch.float32 if slow else torch.bfloat16


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized, with decoupled weight decay. A matrix, sharded or not, is orthogonalized once, whole.

    Args:
        matrices: parameters of two dimensions, plain or sharded (DTensor); the same list on every rank.
        lr: learning rate; the step's root mean square is 0.2 * lr, as AdamW's is.
        momentum: Nesterov momentum.
        weight_decay: decoupled.
        world: the ranks that share the work.
    """

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float, weight_decay: float, world: World) -> None:
        assert all(matrix.dim() == 2 for matrix in matrices), "Muon steps matrices only"
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.world = world

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient (all ranks agree on which)."""
        for group in self.param_groups:
            matrices = [m for m in group["params"] if m.grad is not None]
            # A round is one matrix for each rank; sorted by work, so that a round's matrices take equally long.
            matrices.sort(key=lambda matrix: matrix.numel() * min(matrix.shape), reverse=True)
            for first in range(0, len(matrices), self.world.size):
                self._round(matrices[first : first + self.world.size], group)

    def _round(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        updates: list[Tensor] = []
        for owner, matrix in enumerate(matrices):
            momentum = self._momentum(matrix, group["momentum"])
            whole = momentum.full_tensor() if isinstance(momentum, DTensor) else momentum
            if owner == self.world.rank:
                updates.append(orthogonalize(whole).contiguous())
            else:
                updates.append(torch.empty(whole.shape, dtype=_iteration_dtype(whole), device=whole.device))
        for owner, (matrix, update) in enumerate(zip(matrices, updates)):
            self.world.broadcast([update], owner)
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            step = update.to(matrix.dtype)
            if isinstance(matrix, DTensor):
                step = distribute_tensor(step, matrix.device_mesh, matrix.placements, src_data_rank=None)
            matrix.add_(step, alpha=-0.2 * group["lr"] * math.sqrt(max(matrix.shape)))

    def _momentum(self, matrix: Tensor, momentum: float) -> Tensor:
        """Update the running gradient; returns the Nesterov look-ahead."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(buffer, momentum)


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then a fall to zero at `total_steps`: a pure function of the step, so there is no state to lose."""

    kind: str
    """"linear", "cosine" or "none" (constant after warm-up)."""
    warmup_steps: int
    total_steps: int

    def factor(self, step: int) -> float:
        """The share of the peak learning rate for the optimizer step after `step` completed ones.

        Step 0 already learns: a warm-up of w steps gives 1/w, 2/w .. 1. `factor(total_steps)` is 0, the floor.

        Example:
            linear, 2 of 6 steps of warm-up: 0.5, 1, 1, 0.75, 0.5, 0.25, and 0 where the run ends.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "none":
            return 1.0
        share = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 1.0 - share if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def schedule(plan: TrainPlan, num_steps: int) -> Schedule:
    """The schedule of a run of `num_steps`; warm-up never exceeds it."""
    total = plan.schedule_steps or num_steps
    warmup_steps = plan.warmup_steps + round(plan.warmup_ratio * total)
    return Schedule(plan.scheduler_type, min(warmup_steps, total), total)
