"""Ranks: who is there, sums over them, and work that one rank does for all.

Every collective in training goes through here, at fixed places of a step, whatever a rank has to do in it: a rank
without data, or with one batch fewer, still meets the others. In: torchrun's environment. Out: a `World`.
"""

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from peagle.errors import ConfigError, TrainingError

# Nobody waits in a collective longer than this: a step takes seconds, and what takes longer waits in the store.
COLLECTIVE_TIMEOUT_S = 600.0
# A rank may prepare (read weights from a slow disk, count tokens) for this long while the others wait.
PREPARE_TIMEOUT_S = 6 * 3600.0
_POLL_S = 2.0
_BUCKET_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class World:
    """The ranks of a run; one process alone is a world of one."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that speaks and writes."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, on every rank; `values` is changed in place. Collective."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_all(self, tensors: list[Tensor]) -> None:
        """Sum many tensors over ranks in place, in buckets of 16 M elements of one dtype. Collective."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():  # a large one needs no copy
                dist.all_reduce(bucket[0])
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
                tensor.copy_(part.view_as(tensor))

    def broadcast(self, tensors: list[Tensor], source: int) -> None:
        """Copy rank `source`'s values into every rank's tensors. Collective."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, source)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's `values` (of one shape), in rank order, on every rank. Collective."""
        if self.size == 1:
            return [values]
        found = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(found, values)
        return found

    def check(self, error: BaseException | None) -> None:
        """Raise `error` if this rank has one, else a TrainingError if another has: all stop together. Collective."""
        failed = self.sum(torch.tensor([float(error is not None)], device=self.device))
        if error is not None:
            raise error
        if failed.item():
            raise TrainingError("another rank failed; its own message says why")

    def together(self, key: str, make: Callable[[], Any]) -> list[Any]:
        """Let every rank make a JSON value at its own pace, then exchange them, outside any collective's timeout.

        So a slow preparation does not time the others out, and one that fails ends them too, with its message.

        Args:
            key: a name, used once in a run.
            make: this rank's preparation.

        Returns:
            The ranks' values, in rank order.

        Raises:
            PeagleError: what `make` raised, on this rank; on the others a TrainingError with its words.
        """
        if self.size == 1:
            return [make()]
        store, failure = dist.distributed_c10d._get_default_store(), None
        try:
            message = {"value": make()}
        except BaseException as error:
            failure, message = error, {"error": str(error) or type(error).__name__}
        store.set(f"peagle/{key}/{self.rank}", json.dumps(message))
        found: list[dict[str, Any]] = []
        for rank in range(self.size):
            _wait(store, f"peagle/{key}/{rank}", PREPARE_TIMEOUT_S, f"rank {rank}")
            found.append(json.loads(store.get(f"peagle/{key}/{rank}")))
            if "error" in found[-1]:
                break
        store.set(f"peagle/{key}/read/{self.rank}", "")
        if failure is not None:
            # The store may live in this process: let the others read why before it goes.
            with contextlib.suppress(TrainingError):
                for rank in range(self.size):
                    _wait(store, f"peagle/{key}/read/{rank}", 10.0, f"rank {rank}")
            raise failure
        if "error" in found[-1]:
            raise TrainingError(f"rank {len(found) - 1} failed: {found[-1]['error']}")
        return [one["value"] for one in found]

    def from_main(self, key: str, make: Callable[[], Any]) -> Any:
        """A JSON value that rank 0 makes for all; the others wait for it. See `together`."""
        return self.together(key, make if self.is_main else lambda: None)[0]


def _wait(store: Any, key: str, limit_s: float, who: str) -> None:
    end_s = time.monotonic() + limit_s
    while True:
        try:
            store.wait([key], datetime.timedelta(seconds=_POLL_S))
            return
        except dist.DistStoreError:
            if time.monotonic() > end_s:
                raise TrainingError(f"{who} did not get ready within {limit_s:.0f} s") from None
        except (dist.DistNetworkError, RuntimeError):
            raise TrainingError(f"{who} cannot be reached: the process that holds the store is gone") from None


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    space = 0
    for tensor in tensors:
        if not buckets or space < tensor.numel() or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            space = _BUCKET_ELEMENTS
        buckets[-1].append(tensor)
        space -= tensor.numel()
    return buckets


def join_ranks(device: str, timeout_s: float) -> World:
    """Join the other ranks if torchrun started several, else be alone.

    Args:
        device: "auto", "cpu" or "cuda".
        timeout_s: longest wait inside one collective.

    Raises:
        ConfigError: cuda was asked for and there is none, or fewer GPUs than processes on this machine.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this PyTorch sees no GPU; omit --device or install a CUDA build")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"{torch.cuda.device_count()} GPUs for {local_rank + 1} or more processes; lower --nproc_per_node"
            )
        torch.cuda.set_device(local_rank)
    where = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if size > 1 and not dist.is_initialized():
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=where if kind == "cuda" else None,
        )
    return World(rank, size, where)


def leave_ranks() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
