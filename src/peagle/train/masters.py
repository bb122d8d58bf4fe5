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

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

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
        sharded: dict[str, Tensor] = dict(self.drafter.named_parameters()) if self.is_sharded else {}
        # 1. The backward passes. Where the network computes in another type, each block's gradient is added up at once:
        #    by the backward itself (`kernels.weight_grad`), or as it arrives.
        with self.whole():
            parameters = {name: p for name, p in self.drafter.named_parameters() if name in self.tensors}
            grads: dict[str, Tensor] = {}

            def take(name: str, parameter: Tensor) -> None:
                """Move a parameter's gradient into `grads`, in the masters' dtype."""
                if parameter.grad is None:
                    return
                grad = self._part(name, parameter.grad)
                grads[name] = grads[name].add_(grad) if name in grads else grad.to(self.dtype)
                parameter.grad = None

            narrow = {name: p for name, p in parameters.items() if p.dtype != self.dtype}
            hooks = [p.register_post_accumulate_grad_hook(partial(take, name)) for name, p in narrow.items()]
            for name, parameter in narrow.items():
                if parameter.dim() == 2 and not name.startswith((EMBEDDING, HEAD)):
                    grads[name] = parameter.main_grad = torch.zeros_like(parameter, dtype=self.dtype)  # type: ignore[attr-defined]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                for parameter in narrow.values():
                    parameter.main_grad = None  # type: ignore[attr-defined]
            for name, parameter in parameters.items():
                take(name, parameter)
                if name not in grads:
                    grads[name] = torch.zeros_like(self._part(name, parameter), dtype=self.dtype)
        # 2. Sums over ranks, in the masters' order: of shards by scattering, of the rest in buckets.
        plain = []
        for name in parameters:
            grad, shard = grads[name], sharded.get(name)
            if isinstance(shard, DTensor):
                whole = DTensor.from_local(grad, shard.device_mesh, [Partial()], run_check=False)
                self.tensors[name].grad = whole.redistribute(placements=shard.placements)
            else:
                self.tensors[name].grad = grad
                plain.append(grad)
        self.world.sum_all(plain)

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
        """A master, or optimizer state of its shape, whole and on rank 0's CPU; empty elsewhere. Collective if sharded.

        Host memory for all of it on every rank of a machine would be eight times what one needs.
        """
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        return whole.cpu() if self.world.is_main else whole.new_empty(0, device="cpu")

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
        return {
            name: whole[name] if name in whole and not self._is_row(name) else self.full(tensor)
            for name, tensor in self.drafter.state_dict().items()
        }


def _shard(drafter: Drafter, trained: set[nn.Parameter], compute_dtype: torch.dtype, world: World) -> None:
    """Shard what is trained whole, one group for each layer and one for the rest; the frozen stays replicated."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
    kept = {parameter for parameter in drafter.parameters() if parameter not in trained}
    for module in (*drafter.layers, drafter):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=kept)
