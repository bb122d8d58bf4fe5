"""Checkpoint folders of a run: written whole, found again, pruned; and what a run needs to go on exactly.

    SAVE_PATH/0  1  2 ...          one per epoch (0.5 epochs: step_120), each servable as it is
    SAVE_PATH/interrupted          after SIGTERM or Ctrl-C; gone once a newer one is complete
    SAVE_PATH/checkpoint_best      link to the best by validation; checkpoint_last: link to the newest
    .../training_state/            state.json, masters, optimizer state, random state of each rank: what vLLM ignores

safetensors and JSON only. A folder counts only if it is complete: it gets its name by a rename when all is on disk.
"""

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.drafter.checkpoint import CONFIG, WEIGHTS, write_into
from peagle.errors import CheckpointError
from peagle.files import whole_folder, write_json
from peagle.train.masters import Masters
from peagle.train.metrics import Best
from peagle.train.optimizer import Optimizer
from peagle.train.parallel import World
from peagle.verifier.weights import same_weights

logger = logging.getLogger(__name__)

STATE = "training_state"
BEST, LAST, INTERRUPTED = "checkpoint_best", "checkpoint_last", "interrupted"
_FORMAT = 1
WEIGHTS_OF = "verifier_weights"
"""Key of a run's fingerprint: the verifier's, "" where a server has them and none are here."""


@dataclass
class Progress:
    """How far a run is. Everything that decides the next step, beside tensors."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    packs_done: int = 0
    """Packs of this epoch that are done, over all ranks."""
    packs_per_step: int = 0
    """Packs of an optimizer step, over all ranks: kept on a resume with another number of ranks."""
    due: str | None = None
    """Checkpoint that a signal kept from being validated and written under this name."""
    num_empty: int = 0
    """Steps in which nothing was supervised: nothing was learned, nothing stepped."""
    num_not_finite: int = 0
    """Steps thrown away because a gradient was not finite."""
    best: Best = field(default_factory=Best)


@dataclass(frozen=True)
class SavedRun:
    """A complete checkpoint that training can go on from."""

    folder: Path
    state: dict[str, Any]


def complete(folder: Path) -> SavedRun | None:
    """The checkpoint in `folder` if it is complete and has training state, else None."""
    state_file = folder / STATE / "state.json"
    if folder.is_symlink() or not all(p.is_file() for p in (folder / CONFIG, folder / WEIGHTS, state_file)):
        return None
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        return SavedRun(folder, state) if isinstance(state["progress"]["step"], int) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def discover(save_path: Path) -> list[SavedRun]:
    """Complete checkpoints below `save_path`, oldest first. Links, temporary and half folders are passed over."""
    found = [one for one in map(complete, _drafters(save_path)) if one is not None]
    return sorted(found, key=lambda one: (one.state["progress"]["step"], one.folder.name != INTERRUPTED))


class Keeper:
    """Writes (on rank 0) and reads the checkpoints of one run.

    Args:
        save_path, dtype: where they go, and the saved drafter's type, such as "bfloat16".
        keep_last: how many to keep besides the best; None keeps all.
        fingerprint: what must be the same for a run to go on (JSON values, printed on a mismatch).
        counts: numbers of rows and tokens, for state.json.
        world: the ranks.
    """

    def __init__(
        self,
        *,
        save_path: Path,
        dtype: str,
        keep_last: int | None,
        fingerprint: dict[str, Any],
        counts: dict[str, int],
        world: World,
    ) -> None:
        self.save_path, self._dtype, self._keep_last = save_path, dtype, keep_last
        self._fingerprint, self._counts, self._world = fingerprint, counts, world
        self._num_saves = 0

    def restore(self, masters: Masters, optimizer: Optimizer) -> Progress | None:
        """Take up the newest complete checkpoint; None if there is none. Collective if sharded.

        Raises:
            CheckpointError: it was made by a run that differs in what must not differ, or a file of it is damaged.
        """
        found = discover(self.save_path)
        if not found:
            self._refuse_stateless()
            return None
        newest = found[-1]
        then = newest.state["fingerprint"]
        changed = [
            f"{name}: then {then.get(name)}, now {now}"
            for name, now in self._fingerprint.items()
            if then.get(name) != now and not (name == WEIGHTS_OF and same_weights(str(then.get(name, "")), now))
        ]
        if changed:
            raise CheckpointError(
                f"{newest.folder} cannot be continued ({'; '.join(changed)}). Take another --save-path, or "
                "--no-resume-from-checkpoint to start anew."
            )
        folder = newest.folder / STATE
        weights, remembered = _read(folder / "masters.safetensors"), _read(folder / "optimizer.safetensors")
        missing = sorted(masters.tensors.keys() - weights.keys())
        if missing:
            raise CheckpointError(f"{folder}/masters.safetensors: no tensor {', '.join(missing)}")
        for name, tensor in masters.tensors.items():
            masters.load(name, tensor, weights[name])
        optimizer.load(remembered, newest.state["adam_steps"], str(folder / "optimizer.safetensors"))
        masters.publish()
        self._restore_random(folder)
        values = dict(newest.state["progress"])
        try:
            progress = Progress(**{**values, "best": Best(**values["best"])})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder}/state.json: damaged ({type(error).__name__}: {error}); remove {newest.folder} to go on from "
                "an older checkpoint"
            ) from None
        self._restore_best(progress)
        logger.info("resumed from %s: epoch %d, step %d", newest.folder, progress.epoch, progress.step)
        return progress

    def _refuse_stateless(self) -> None:
        """Checkpoints without a readable state cannot be continued, and a new run would write over them."""
        if names := [folder.name for folder in _drafters(self.save_path)]:
            raise CheckpointError(
                f"{self.save_path}: holds checkpoints ({', '.join(names)}), but no training state to go on from "
                f"({STATE}/state.json is missing or damaged). Take another --save-path, or --no-resume-from-checkpoint "
                "to start anew over them."
            )

    def _restore_best(self, progress: Progress) -> None:
        """The best link leads to what the state calls the best, whatever was killed or deleted in between."""
        name = progress.best.name
        if name is None or not self._world.is_main:
            return
        if (self.save_path / name / WEIGHTS).is_file():
            link(self.save_path, BEST, name)
            return
        logger.warning(
            "%s: the best checkpoint, %s, is gone, and so is the link to it until another one is better",
            self.save_path, name,
        )  # fmt: skip
        if (self.save_path / BEST).is_symlink():
            (self.save_path / BEST).unlink()

    def _restore_random(self, folder: Path) -> None:
        path = folder / f"rng_rank{self._world.rank}.safetensors"
        if not path.is_file():
            logger.warning(
                "%s is not there, so this rank's random state starts anew (order and sampling are seeded by row and "
                "epoch and do not depend on it)",
                path,
            )
            return
        random = _read(path)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and self._world.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self._world.device)

    def save(self, name: str, masters: Masters, optimizer: Optimizer, progress: Progress, is_best: bool) -> None:
        """Write checkpoint `name` whole, point `checkpoint_last` (and `checkpoint_best`) at it, prune. Collective.

        Raises:
            DiskError: on every rank a TrainingError instead; no partial folder is left and older ones are untouched.
        """
        random = self._random_states()
        if self._world.is_main or masters.is_sharded:
            whole = {key: masters.full(tensor) for key, tensor in masters.tensors.items()}
            weights = masters.state_dict(whole)
            remembered, adam_steps = optimizer.state()
            state = {
                "format": _FORMAT,
                "progress": asdict(progress),
                "adam_steps": adam_steps,
                "fingerprint": self._fingerprint,
                "world_size": self._world.size,
                **self._counts,
            }

        def write() -> None:
            with whole_folder(self.save_path / name) as folder:
                write_into(folder, masters.drafter.config, weights, self._dtype)
                (folder / STATE).mkdir()
                save_file(whole, folder / STATE / "masters.safetensors")
                save_file(remembered, folder / STATE / "optimizer.safetensors")
                for rank, values in enumerate(random):
                    save_file(values, folder / STATE / f"rng_rank{rank}.safetensors")
                write_json(folder / STATE / "state.json", state)
            link(self.save_path, LAST, name)
            if is_best:
                link(self.save_path, BEST, name)
            self._prune(name, progress.best.name)

        # The others wait in the store: some gigabytes on a slow disk would outlast a collective.
        self._num_saves += 1
        self._world.from_main(f"save {self._num_saves}", write)

    def _random_states(self) -> list[dict[str, Tensor]]:
        device = self._world.device
        cpu = self._world.gather(torch.get_rng_state().to(device))
        found = [{"cpu": values.cpu()} for values in cpu]
        if device.type == "cuda":
            for values, cuda in zip(found, self._world.gather(torch.cuda.get_rng_state(device).to(device))):
                values["cuda"] = cuda.cpu()
        return found

    def _prune(self, newest: str, best: str | None) -> None:
        """Remove an older `interrupted`, and what `keep_last` leaves no place for; never the newest nor the best."""
        found = [one.folder for one in discover(self.save_path) if one.folder.name not in (newest, best)]
        doomed = [folder for folder in found if folder.name == INTERRUPTED]
        if self._keep_last is not None:
            others = [folder for folder in found if folder.name != INTERRUPTED]
            doomed += others[: max(0, len(others) - (self._keep_last - 1))]
        for folder in doomed:
            shutil.rmtree(folder)


def link(save_path: Path, name: str, target: str) -> None:
    """Point `save_path/name` at the folder `target` beside it, in one rename; a copy where there are no links."""
    place, temporary = save_path / name, save_path / f".{name}.{os.getpid()}.tmp"
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target, target_is_directory=True)
        os.replace(temporary, place)
    except OSError:
        with whole_folder(place) as folder:
            shutil.copytree(save_path / target, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(STATE))


def remove_all(save_path: Path) -> list[str]:
    """Remove the checkpoints and links of an earlier run; returns their names."""
    gone = []
    for folder in _drafters(save_path):
        shutil.rmtree(folder)
        gone.append(folder.name)
    for name in (BEST, LAST):
        place = save_path / name
        if place.is_symlink():
            place.unlink()
        elif place.is_dir():
            shutil.rmtree(place)
    return gone


def _drafters(save_path: Path) -> list[Path]:
    """Checkpoint folders of a run, with or without training state; neither links nor the copies in their place."""
    if not save_path.is_dir():
        return []
    folders = [path for path in sorted(save_path.iterdir()) if path.name not in (BEST, LAST) and path.name[0] != "."]
    return [path for path in folders if all((path / name).is_file() for name in (CONFIG, WEIGHTS))]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: missing, damaged or cut short ({error}); remove its checkpoint folder to go on from an older one"
        ) from None
