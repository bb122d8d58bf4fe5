"""Experiment trackers by name: TensorBoard, Weights & Biases, MLflow, trackio. JSONL is written whatever is chosen.

In: metric rows. Out: the same numbers where the user looks at them. A tracker is imported only when asked for; one that
is not installed is refused before training starts, and one that fails later never stops a run.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError

logger = logging.getLogger(__name__)

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


@dataclass(frozen=True)
class _Tracker:
    name: str
    log: Callable[[dict[str, float], int], None]
    close: Callable[[], None]


class Trackers:
    """All trackers of one run; `log` and `close` reach each of them."""

    def __init__(self, trackers: list[_Tracker]) -> None:
        self._trackers = trackers
        self._failed: set[str] = set()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send the numbers of a metrics row; lists become `name/0`, `name/1` ..., everything else is left out."""
        flat = flatten(metrics)
        for tracker in self._trackers:
            self._guarded(tracker, lambda tracker=tracker: tracker.log(flat, step))

    def close(self) -> None:
        """Finish every tracker."""
        for tracker in self._trackers:
            self._guarded(tracker, tracker.close)

    def _guarded(self, tracker: _Tracker, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker's server or disk must not cost hours of training
            if tracker.name not in self._failed:
                logger.warning("%s failed (%s: %s); training goes on", tracker.name, type(error).__name__, error)
            self._failed.add(tracker.name)


def flatten(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a metrics row under flat names.

    Example:
        {"loss": 1.5, "accuracy": [0.7, 0.4], "kind": "x"} gives {"loss": 1.5, "accuracy/0": 0.7, "accuracy/1": 0.4}.
    """
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}/{key}": number for key, number in flatten(value).items()})
        elif isinstance(value, (list, tuple)):
            flat.update({f"{name}/{i}": float(v) for i, v in enumerate(value) if _is_number(v)})
        elif _is_number(value):
            flat[name] = float(value)
    return flat


def open_trackers(names: tuple[str, ...], folder: Path, run_name: str, config: Mapping[str, Any]) -> Trackers:
    """Start the named trackers.

    Args:
        names: of `PACKAGES`; none is fine. Call on rank 0 only.
        folder: where those that write files put them.
        run_name: shown as the run's name; the project is "peagle".
        config: settings shown beside the run, JSON-able.

    Raises:
        ConfigError: an unknown name, or a tracker that is not installed.
    """
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(f"--log-to {name}: not one of {', '.join(PACKAGES)}")
        try:
            importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else PACKAGES[name])
        except ImportError:
            raise ConfigError(f"--log-to {name}: not installed; `pip install {PACKAGES[name]}`") from None
    starters = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
    return Trackers([starters[name](folder, run_name, dict(config)) for name in dict.fromkeys(names)])


def _tensorboard(folder: Path, run_name: str, config: dict[str, Any]) -> _Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(flat: dict[str, float], step: int) -> None:
        for name, value in flat.items():
            writer.add_scalar(name, value, step)

    return _Tracker("tensorboard", log, writer.close)


def _wandb(folder: Path, run_name: str, config: dict[str, Any]) -> _Tracker:
    import wandb

    run = wandb.init(project="peagle", name=run_name, config=config, dir=str(folder), resume="allow")
    return _Tracker("wandb", lambda flat, step: run.log(flat, step=step), lambda: run.finish())


def _mlflow(folder: Path, run_name: str, config: dict[str, Any]) -> _Tracker:
    import mlflow

    mlflow.set_experiment("peagle")
    mlflow.start_run(run_name=run_name)
    mlflow.log_params({key: str(value)[:500] for key, value in config.items()})
    return _Tracker("mlflow", lambda flat, step: mlflow.log_metrics(flat, step=step), mlflow.end_run)


def _trackio(folder: Path, run_name: str, config: dict[str, Any]) -> _Tracker:
    import trackio

    trackio.init(project="peagle", name=run_name, config=config)
    return _Tracker("trackio", lambda flat, step: trackio.log(flat, step=step), trackio.finish)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
