"""Muon for matrices that may be replicated or sharded: each matrix is orthogonalized once, whole, by one rank.

The update is that of `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` (a test holds us to it). It is written
out because torch's dispatches every product of a sharded matrix's iteration as a collective, and repeats the whole
iteration on each rank of a replicated one. Here a shard is gathered once, ranks take matrices in turns, and the
finished update is broadcast: ranks cannot drift apart, and N ranks do a matrix's work once.

Source: Jordan et al. 2024 (Newton-Schulz iteration, its coefficients), Moonlight, arXiv 2502.16982 (scale of the step).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from peagle.train.distributed import World

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
    """Momentum, orthogonalized, with decoupled weight decay.

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
            matrices = sorted((m for m in group["params"] if m.grad is not None), key=_work, reverse=True)
            # A round is one matrix for each rank; sorted by work, so that a round's matrices take equally long.
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


def _work(matrix: Tensor) -> int:
    return matrix.numel() * min(matrix.shape)
