"""One rank of a two-rank test: `python -m tests.train.worker SCENARIO FOLDER`, started by `ranks.start_ranks`.

Each scenario writes what it found to FOLDER/SCENARIO.rank0.json (and weights beside it); the test reads and judges.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from peagle.drafter.network import Drafter
from peagle.errors import PeagleError
from peagle.train import parallel as distributed
from peagle.train.batches import Pack
from peagle.train.checkpoints import Keeper
from peagle.train.loop import FitResult
from peagle.train.parallel import World
from tests.train.problem import config, drafter, plan, row, rows, run

HOW: dict[str, dict[str, Any]] = {
    "replicated": {"optimizer": "adamw"},
    "sharded": {"optimizer": "muon", "fsdp_shard": True},
}
ROWS, HELD_OUT = rows(14), rows(5, seed=1)


def keeper(folder: Path, world: World) -> Keeper:
    return Keeper(save_path=folder, dtype="float32", keep_last=None, fingerprint={}, counts={}, world=world)


def report(result: FitResult) -> dict[str, Any]:
    return {
        "steps": [dataclasses.asdict(step) for step in result.steps],
        "validations": [dataclasses.asdict(one) for one in result.validations],
        "progress": dataclasses.asdict(result.progress),
    }


def weights(model: Drafter) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().contiguous()
        for name, tensor in model.state_dict().items()
    }


def fitted(world: World, folder: Path, name: str, **values: Any) -> dict[str, Any]:
    """Fit on this world; keeps the whole weights in FOLDER/NAME.rankN.safetensors."""
    model, result = run(config(**values), ROWS, HELD_OUT, world=world)
    save_file(weights(model), folder / f"{name}.rank{world.rank}.safetensors")
    return report(result)


def equal(world: World, folder: Path) -> dict[str, Any]:
    """One process's losses and weights, replicated and sharded, for both optimizers."""
    found = {}
    for kind in ("adamw", "muon"):
        for shard in (False, True):
            name = f"{kind}-{'sharded' if shard else 'replicated'}"
            found[name] = fitted(world, folder, name, optimizer=kind, fsdp_shard=shard, batch_size=3)
    found["bfloat16-sharded"] = fitted(
        world, folder, "bfloat16-sharded", dtype="bfloat16", fsdp_shard=True, batch_size=3, optimizer="adamw"
    )
    found["bfloat16-replicated"] = fitted(
        world, folder, "bfloat16-replicated", dtype="bfloat16", batch_size=3, optimizer="adamw"
    )
    for shard in (False, True):
        name = f"mask-token-{'sharded' if shard else 'replicated'}"
        found[name] = fitted(world, folder, name, train_embeddings="mask-token", fsdp_shard=shard, batch_size=3)
    return found


def uneven(world: World, folder: Path) -> dict[str, Any]:
    """R04: rank 1 gets a pack with nothing supervised at step 3, and there is one pack fewer at the end."""
    import peagle.train.loop as loop

    silent = row("silent", 30, 5, 3, supervised=False)
    made = [*[row(f"r{i}", 30, 3, i) for i in range(6)], silent]
    names = ["r0", "r1", "r2", "r3", "r4", "silent", "r5"]
    with (
        patch.object(loop, "packs", lambda lengths, *_: [Pack((name,), 30) for name in names if lengths]),
        patch.object(loop, "share", lambda group, size: [list(range(r, len(group), size)) for r in range(size)]),
    ):
        model, result = run(config(total_seq_len=32, epochs=2, batch_size=2), [*made], world=world)
    save_file(weights(model), folder / f"uneven.rank{world.rank}.safetensors")
    return report(result)


def saved(world: World, folder: Path) -> dict[str, Any]:
    """K01, K05: stop, save, resume; with a sharded optimizer every moment is what it was."""
    found = {}
    for shard in (False, True):
        name = "sharded" if shard else "replicated"
        values = {"optimizer": "muon", "fsdp_shard": shard, "scheduler_total_steps": 12, "epochs": 4, "batch_size": 3}
        whole, plain = run(config(**values), ROWS, HELD_OUT, world=world)
        where = folder / name
        run(config(max_steps=5, **values), ROWS, HELD_OUT, world=world, keeper=keeper(where, world))
        parts, rest = run(config(**values), ROWS, HELD_OUT, world=world, keeper=keeper(where, world))
        ours, theirs = weights(whole), weights(parts)
        found[name] = {
            "equal": all(torch.equal(ours[key], theirs[key]) for key in ours),
            "rates": [step.lr for step in plain.steps],
            "rates_resumed": [step.lr for step in rest.steps],
        }
    return found


def moments(world: World, folder: Path) -> dict[str, Any]:
    """K05: the checksum of every moment tensor, before the save and after the resume."""
    from peagle.train.checkpoints import Progress
    from peagle.train.masters import Masters, choose_trained
    from peagle.train.optimizer import Optimizer

    def made() -> tuple[Masters, Optimizer]:
        model = drafter()
        choose_trained(model, "all", False)
        masters = Masters(model, torch.float32, None, world, True)
        return masters, Optimizer(plan(optimizer="muon"), masters)

    def sums(optimizer: Optimizer) -> dict[str, str]:
        return {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in optimizer.state()[0].items()}

    masters, optimizer = made()
    for seed in range(3):
        source = torch.Generator().manual_seed(100 * seed + world.rank)
        with masters.step():
            for parameter in masters.drafter.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.randn(parameter.shape, generator=source)
        optimizer.step(1.0)
        masters.publish()
    keeper(folder / "moments", world).save("0", masters, optimizer, Progress(step=3), False)
    again, other = made()
    keeper(folder / "moments", world).restore(again, other)
    return {"before": sums(optimizer), "after": sums(other)}


def goes_on(world: World, folder: Path) -> dict[str, Any]:
    """Two ranks go on from where one stopped (folders `from-one-*`), or start (`from-two-*`), and stop at step 4."""
    for origin in ("one", "two"):
        for how, values in HOW.items():
            where = folder / f"from-{origin}-{how}"
            settings = config(max_steps=4, scheduler_total_steps=9, epochs=4, **values)
            run(settings, ROWS, HELD_OUT, world=world, keeper=keeper(where, world))
    return {}


def refused(do: Callable[[], Any]) -> dict[str, Any]:
    """How something that must fail did."""
    try:
        do()
    except PeagleError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def prepares(world: World, folder: Path) -> dict[str, Any]:
    """R06: rank 0 prepares for twice as long as a collective may take, and all ranks start."""
    began = time.monotonic()

    def slow() -> int:
        time.sleep(13)
        return 7

    value = world.from_main("slow", slow)
    total = world.sum(torch.ones(1)).item()
    return {"value": value, "sum": total, "seconds": time.monotonic() - began}


def fails(world: World, folder: Path) -> dict[str, Any]:
    """R06: rank 0 fails while it prepares; rank 1 is told, and does not wait."""

    def broken() -> int:
        time.sleep(1)
        raise PeagleError("the disk of rank 0 is gone")

    return refused(lambda: world.from_main("broken", broken))


def data_fails(world: World, folder: Path) -> dict[str, Any]:
    """One rank's states are damaged: both stop."""
    made = list(ROWS)
    if world.rank == 1:
        made = [dataclasses.replace(one, label_pos=one.label_pos[1:], last_states=one.last_states[1:]) for one in made]
    return refused(lambda: run(config(batch_size=2), made, world=world))


def signalled(world: World, folder: Path) -> dict[str, Any]:
    """Only rank 1 is told to stop: both save together after that step."""
    import signal

    import peagle.train.loop as loop

    real, taken = loop._Loop._step, []

    def stepping(self: Any, ready: Any, interrupt: Any) -> Any:
        taken.append(1)
        if len(taken) == 2 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, ready, interrupt)

    with patch.object(loop._Loop, "_step", stepping):
        _, result = run(config(epochs=20), ROWS, HELD_OUT, world=world, keeper=keeper(folder / "signalled", world))
    return {"step": result.progress.step, "signal": result.signal_number}


def decides(world: World, folder: Path) -> dict[str, Any]:
    """V08: rank 1's copy of the frequencies is missing or damaged; every rank has the same table all the same."""
    from peagle.train.decision import decide
    from tests.train.files import Files

    found = {}
    for trouble in ("missing", "corrupt"):
        at = folder / f"{trouble}-{world.rank}"
        files = Files(folder / "verifier", at / "data", folder / "states")
        settings = files.config(folder / "save", draft_vocab_size=64)
        decision = world.from_main(
            f"decision-{trouble}", lambda settings=settings: dataclasses.asdict(decide(settings))
        )
        found[trouble] = decision["draft_ids"]
    return found


_ALL: list[Callable[[World, Path], dict[str, Any]]] = [equal, uneven, saved, moments, goes_on, prepares, fails]
_ALL += [data_fails, signalled, decides]
SCENARIOS = {scenario.__name__: scenario for scenario in _ALL}


def _meet(folder: Path) -> None:
    """Wait until both ranks have done their imports, which a busy machine stretches to minutes."""
    (folder / f"here.{os.environ['RANK']}.{os.environ['MASTER_PORT']}").touch()
    while len(list(folder.glob(f"here.*.{os.environ['MASTER_PORT']}"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)


def main() -> int:
    names, folder, timeout_s = sys.argv[1].split(","), Path(sys.argv[2]), float(sys.argv[3])
    _meet(folder)
    world = distributed.join_ranks("cpu", timeout_s)
    try:
        for name in names:
            found = SCENARIOS[name](world, folder)
            (folder / f"{name}.rank{world.rank}.json").write_text(json.dumps(found))
    except PeagleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    finally:
        distributed.leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
