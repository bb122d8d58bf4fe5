"""What training reports: sums over slots, lines of `metrics.jsonl`, the best score, experiment trackers."""

from __future__ import annotations

import importlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.errors import ConfigError
from peagle.files import whole_file
from peagle.train.step import StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sums:
    """Sums over supervised slots by depth, over batches and ranks."""

    loss: list[float]
    correct: list[int]
    total: list[int]
    prefix_correct: list[int]

    @property
    def mean_loss(self) -> float:
        """Mean over all supervised slots, all depths alike."""
        return sum(self.loss) / max(1, sum(self.total))

    @property
    def accuracy(self) -> list[float]:
        """Share of each depth's slots whose choice is the verifier's."""
        return [c / max(1, t) for c, t in zip(self.correct, self.total)]

    @property
    def acceptance_length(self) -> float:
        """1 + sum over k of the share of chains whose depths 0 .. k ALL equal the verifier's choice.

        Joint, not a product of accuracies. A chain counts at depth k if it has a target there. A measure only if the
        layout is full: a sampled one keeps other chains at each depth.
        """
        return 1.0 + sum(p / t for p, t in zip(self.prefix_correct, self.total) if t)


def add_up(results: list[StepResult], num_depths: int, device: torch.device) -> Tensor:
    """A rank's results as one float64 tensor [4, num_depths], to be summed over ranks: loss, correct, total, prefix."""
    added = torch.zeros(4, num_depths, dtype=torch.float64, device=device)
    for result in results:
        counts = (result.correct, result.total, result.prefix_correct)
        added += torch.stack([result.loss_sum, *(count.double() for count in counts)])
    return added


def sums_of(added: Tensor) -> Sums:
    """Back to numbers."""
    loss, correct, total, prefix = added.tolist()
    return Sums(loss, [int(x) for x in correct], [int(x) for x in total], [int(x) for x in prefix])


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step."""

    step: int
    """Optimizer steps done, this one included."""
    epoch: int
    loss: float
    accuracy: list[float]
    lr: float
    """Of the first group (matrices)."""
    grad_norm: float
    """Before clipping."""
    num_supervised: int
    """Supervised slots of the whole step: what its loss was divided by."""
    num_tokens: int
    seconds: float
    data_wait_s: float


@dataclass(frozen=True, kw_only=True)
class Validation:
    """All depths of all validation rows."""

    step: int
    epoch: int
    loss: float
    accuracy: list[float]
    acceptance_length: float
    num_supervised: int
    seconds: float


class MetricsLog:
    """`metrics.jsonl`, if there is a path: a line per optimizer step and per validation. Trackers get the same."""

    def __init__(self, path: Path | None, trackers: Trackers | None) -> None:
        self._path, self._trackers = path, trackers

    def begin(self, step: int) -> None:
        """The run goes on after this step: drop the lines of later ones, which it writes again."""
        path = self._path
        if path is None:
            return
        kept = []
        if step and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # the last line of a killed run may be cut
        with whole_file(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write(self, kind: str, metrics: StepMetrics | Validation) -> None:
        """Append one line: {"kind": "train" | "validation", ...}; what is not finite becomes null."""
        if self._trackers is not None:
            self._trackers.log({kind: asdict(metrics)}, metrics.step)
        if self._path is None:
            return
        values = {key: _json(value) for key, value in asdict(metrics).items()}
        with open(self._path, "a", encoding="utf-8") as handle:
            handle.write(json.dumps({"kind": kind, **values}, allow_nan=False) + "\n")


def _json(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 8) if math.isfinite(value) else None
    return [_json(item) for item in value] if isinstance(value, list) else value


@dataclass
class Best:
    """Keeps the best score seen; a fall while the loss improves is worth a warning (acceptance may peak early)."""

    score: float | None = None
    name: str | None = None
    """Name of the checkpoint that had it."""
    loss: float | None = None
    scores: list[float | None] = field(default_factory=list)
    """Every score in order; None where there was none."""

    def update(self, score: float, loss: float, name: str) -> tuple[bool, str | None]:
        """Whether this is the new best (the first of equals stays; NaN never is), and a warning or None."""
        self.scores.append(score if math.isfinite(score) else None)
        if not math.isfinite(score):
            return False, f"checkpoint {name}: no score ({score}); it cannot become checkpoint_best"
        if self.score is None or score > self.score:
            self.score, self.name, self.loss = score, name, loss
            return True, None
        if score < self.score and self.loss is not None and loss < self.loss:
            return False, (
                f"acceptance length fell to {score:.3f} while the loss still improves; the best is {self.score:.3f} "
                f"(checkpoint {self.name}), which checkpoint_best keeps"
            )
        return False, None


# Sends flat numbers of a step, and finishes the run.
_Tracker = tuple[Callable[[dict[str, float], int], None], Callable[[], None]]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


class Trackers:
    """All trackers of one run; one that fails is warned about once and never stops training.

    Args:
        names: of `TRACKERS`; none is fine. On rank 0 only.
        folder: where those that write files put them.
        run_name: shown as the run's name; the project is "peagle".
        config: settings shown beside the run, JSON-able.

    Raises:
        ConfigError: an unknown name, or a tracker that is not installed.
    """

    def __init__(self, names: tuple[str, ...], folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        for name in names:
            if name not in TRACKERS:
                raise ConfigError(f"--log-to {name}: not one of {', '.join(TRACKERS)}")
            try:
                importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
            except ImportError:
                raise ConfigError(f"--log-to {name}: not installed; `pip install {name}`") from None
        self._trackers = {name: _start(name, folder, run_name, dict(config)) for name in names}
        self._failed: set[str] = set()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send the numbers of a metrics row; lists become `name/0`, `name/1` ..., everything else is left out."""
        flat = flatten(metrics)
        for name, (send, _) in self._trackers.items():
            self._guarded(name, lambda send=send: send(flat, step))

    def close(self) -> None:
        """Finish every tracker."""
        for name, (_, finish) in self._trackers.items():
            self._guarded(name, finish)

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker's server or disk must not cost hours of training
            if name not in self._failed:
                logger.warning("%s failed (%s: %s); training goes on", name, type(error).__name__, error)
            self._failed.add(name)


def flatten(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a metrics row under flat names.

    Example:
        {"loss": 1.5, "accuracy": [0.7, 0.4], "kind": "x"} gives {"loss": 1.5, "accuracy/0": 0.7, "accuracy/1": 0.4}.
    """
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, (list, tuple)):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat.update({f"{name}/{key}": number for key, number in flatten(value).items()})
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat


def _start(name: str, folder: Path, run_name: str, config: dict[str, Any]) -> _Tracker:
    if name == "tensorboard":
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder / name))
        writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

        def log(flat: dict[str, float], step: int) -> None:
            for key, value in flat.items():
                writer.add_scalar(key, value, step)

        return log, writer.close
    package = importlib.import_module(name)
    if name == "mlflow":
        package.set_experiment("peagle")
        package.start_run(run_name=run_name)
        package.log_params({key: str(value)[:500] for key, value in config.items()})
        return lambda flat, step: package.log_metrics(flat, step=step), package.end_run
    more = {"dir": str(folder), "resume": "allow"} if name == "wandb" else {}
    package.init(project="peagle", name=run_name, config=config, **more)
    return lambda flat, step: package.log(flat, step=step), package.finish
