"""Master weights: what the optimizer steps, in float32, whatever type the network computes in.

In: the drafter's parameters with their gradients, rank by rank. Out: masters with `.grad` summed over ranks, and, after
the optimizer, the parameters made of them. Three ways to hold them, chosen once:

- as they are: the network computes in float32 (or float64); a master is the parameter itself.
- copies: the network computes in bfloat16; gradients are added up in float32 as each block's backward gives them.
- sharded (FSDP2): a master is a rank's rows of the parameter. The whole parameters are gathered once per optimizer
  step, not once per layer and block: a step runs the network once per block of anchors, and blocks differ between
  ranks. The step's gradient is summed and scattered once, at its end.

With `train_embeddings="mask-token"` the embedding's master is one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial

from peagle.drafter.network import Drafter
from peagle.train.parallel import World

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


def choose_trained(drafter: Drafter, train_embeddings: str, train_lm_head: bool) -> None:
    """Set `requires_grad`: everything is trained, except the head unless asked, and the embedding as told."""
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_((name != HEAD or train_lm_head) and (name != EMBEDDING or train_embeddings != "none"))


class Masters:
    """The masters of one drafter on one rank.

    Args:
        drafter: its parameters are float32 (float64), `choose_trained` was called. It is converted in place: to
            `compute_dtype`, and sharded if asked.
        compute_dtype: float32, float64 or bfloat16.
        row: the only row of the embedding that is trained, or None for all that is trained.
        world: the ranks.
        shard: whether to shard.
    """

    def __init__(
        self, drafter: Drafter, compute_dtype: torch.dtype, row: int | None, world: World, shard: bool
    ) -> None:
        self.drafter, self.world, self.row = drafter, world, row
        self.dtype = torch.promote_types(compute_dtype, torch.float32)
        self.is_copied = compute_dtype != self.dtype and not shard
        self.is_sharded = shard
        drafter.to(self.dtype)
        world.broadcast([parameter.data for parameter in drafter.parameters()], 0)
        whole = {name: p for name, p in drafter.named_parameters() if p.requires_grad and not self._is_row(name)}
        if shard:
            _shard(drafter, set(whole.values()), compute_dtype, world)
        parameters = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        self.tensors: dict[str, Tensor] = {}
        """Masters by the parameter's name, in the drafter's order."""
        for name, parameter in parameters.items():
            if self._is_row(name):
                self.tensors[name] = parameter.detach()[row : row + 1].clone()  # type: ignore[operator]
            elif self.is_copied:
                self.tensors[name] = parameter.detach().clone()
            else:
                self.tensors[name] = parameter
        if compute_dtype != self.dtype:
            for name, parameter in drafter.named_parameters():
                if not (shard and name in whole):  # a sharded one is converted as it is gathered
                    parameter.data = parameter.data.to(compute_dtype)
        self._added: dict[str, Tensor] = {}

    def _is_row(self, name: str) -> bool:
        return name == EMBEDDING and self.row is not None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the drafter's parameters are whole plain tensors, fit for any pass. Collective if sharded."""
        modules = [m for m in self.drafter.modules() if isinstance(m, FSDPModule)]
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, backward passes add to the step's gradient; afterwards masters have their `.grad`, summed over ranks.

        A rank that ran nothing adds zeros: it still meets the others. Collective.
        """
        reduced = Partial()
        sharded: dict[str, Tensor] = dict(self.drafter.named_parameters()) if self.is_sharded else {}
        with self.whole():
            parameters = {name: p for name, p in self.drafter.named_parameters() if name in self.tensors}
            self._added = {}
            hooks = [
                p.register_post_accumulate_grad_hook(self._adder(name))
                for name, p in parameters.items()
                if p.dtype != self.dtype
            ]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
            grads = {name: self._take(name, p) for name, p in parameters.items()}
        plain = []
        for name, grad in grads.items():
            shard = sharded.get(name)
            if isinstance(shard, DTensor):
                whole = DTensor.from_local(grad, shard.device_mesh, [reduced], run_check=False)
                self.tensors[name].grad = whole.redistribute(placements=shard.placements)
            else:
                self.tensors[name].grad = grad
                plain.append(grad)
        self.world.sum_all(plain)

    def _adder(self, name: str) -> Any:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            grad = self._part(name, parameter.grad)
            if name in self._added:
                self._added[name].add_(grad)
            else:
                self._added[name] = grad.to(self.dtype)
            parameter.grad = None

        return add

    def _take(self, name: str, parameter: Tensor) -> Tensor:
        """The rank's own gradient of a parameter, in the masters' dtype; the parameter keeps none."""
        grad = self._added.pop(name, None)
        if parameter.grad is not None:
            rest = self._part(name, parameter.grad).to(self.dtype)
            grad = rest if grad is None else grad.add_(rest)
            parameter.grad = None
        if grad is None:
            shape = self._part(name, parameter).shape
            grad = torch.zeros(shape, dtype=self.dtype, device=parameter.device)
        return grad

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        """What of a parameter (or its gradient) is trained: the whole, or a copy of the mask token's row."""
        return tensor[self.row : self.row + 1].clone() if self._is_row(name) else tensor  # type: ignore[operator]

    def norm(self) -> Tensor:
        """The norm of all gradients together, the same on every rank. Collective if sharded."""
        sharded, plain = [], []
        for tensor in self.tensors.values():
            assert tensor.grad is not None
            if isinstance(tensor.grad, DTensor):
                sharded.append(tensor.grad.to_local())
            else:
                plain.append(tensor.grad)
        squares = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for index, grads in enumerate((sharded, plain)):
            if grads:
                squares[index] = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        if sharded:
            self.world.sum(squares[:1])
        return squares.sum().sqrt()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for tensor in self.tensors.values():
            assert tensor.grad is not None
            tensor.grad.mul_(factor)

    @torch.no_grad()
    def publish(self) -> None:
        """Make the parameters of the stepped masters, and drop the gradients."""
        self.drop()
        for name, tensor in self.tensors.items():
            if self._is_row(name):
                self.drafter.get_parameter(name)[self.row : self.row + 1] = tensor  # type: ignore[operator]
            elif self.is_copied:
                self.drafter.get_parameter(name).copy_(tensor)

    def drop(self) -> None:
        """Forget the gradients without a step."""
        for tensor in self.tensors.values():
            tensor.grad = None

    def full(self, tensor: Tensor) -> Tensor:
        """A master, or optimizer state of its shape, whole and on the CPU. Collective if sharded."""
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()

    @torch.no_grad()
    def load(self, name: str, like: Tensor, whole: Tensor) -> None:
        """Copy a whole tensor into `like`: a master, or optimizer state of the same sharding."""
        if like.shape != whole.shape:
            raise ValueError(f"{name} is {list(whole.shape)}, expected {list(like.shape)}")
        if isinstance(like, DTensor):
            from torch.distributed.tensor import distribute_tensor

            value = whole.to(like.device, like.dtype)
            like.copy_(distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None))
        else:
            like.copy_(whole)

    def state_dict(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """The drafter's tensors in the masters' precision, given the `whole` masters by name. Collective if sharded."""
        found = {}
        for name, tensor in self.drafter.state_dict().items():
            is_master = name in whole and not self._is_row(name)
            found[name] = whole[name] if is_master else self.full(tensor)
        return found


def _shard(drafter: Drafter, trained: set[nn.Parameter], compute_dtype: torch.dtype, world: World) -> None:
    """Shard what is trained whole, one group for each layer and one for the rest; the frozen stays replicated."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
    kept = {parameter for parameter in drafter.parameters() if parameter not in trained}
    for module in (*drafter.layers, drafter):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=kept)
