"""What a report is made from: evaluations, training metrics, configs and manifests found below the given folders."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.errors import DataError

EVALUATION = "evaluation.json"
METRICS = "metrics.jsonl"
_NOT_ENTERED = {"hidden_states", "training_state", "node_modules", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One drafter, as far as it is known: a column of the report."""

    name: str
    folder: Path
    evaluation: dict[str, Any]
    """`evaluation.json`; empty where only training is known."""
    metrics: tuple[dict[str, Any], ...]
    """Lines of `metrics.jsonl`, in order; empty where the training is not at hand."""
    checkpoint: dict[str, Any]
    """The drafter's `config.json`, or empty."""
    manifests: tuple[tuple[str, dict[str, Any]], ...]
    """(stage, `manifest.json`) of the evaluation and of what led to it."""
    metrics_path: Path | None
    """Where `metrics` came from."""

    @property
    def speed(self) -> dict[str, Any]:
        """What was timed; empty where nothing was."""
        return self.evaluation.get("speed", {})


def collect(folders: list[Path]) -> list[Record]:
    """Find the drafters below `folders`, each once.

    A folder may be a run, a checkpoint, the output of `peagle evaluate`, or an `evaluation.json` itself. An evaluation
    is joined with the checkpoint that it names, and that with the metrics of its training.

    Raises:
        DataError: a folder does not exist, holds nothing to report, or a file in it is broken.
    """
    records: list[Record] = []
    seen: set[Path] = set()
    for folder in folders:
        if not folder.exists():
            raise DataError(f"{folder}: no such folder")
        make, paths = _of_evaluation, [folder] if folder.is_file() else sorted(_files(folder, EVALUATION))
        if not paths:
            make, paths = _of_training, sorted(_files(folder, METRICS))
            seen |= {record.metrics_path.resolve() for record in records if record.metrics_path}
        if not paths:
            hint = f"`peagle evaluate --output {folder}` makes the first"
            raise DataError(f"{folder}: neither {EVALUATION} nor {METRICS} in it or below; {hint}")
        for path in paths:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                records.append(make(path, _name(folder, path, len(paths)), folder))
    # equal names get a number
    counts: Counter[str] = Counter()
    for i, record in enumerate(records):
        counts[record.name] += 1
        if counts[record.name] > 1:
            records[i] = replace(record, name=f"{record.name} ({counts[record.name]})")
    return records


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is not there.

    Raises:
        DataError: the file is there and is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected an object, found a {type(value).__name__}")
    return value


def read_metrics(path: Path) -> tuple[dict[str, Any], ...]:
    """The lines of a metrics file; a last line cut short by a kill is left out.

    Raises:
        DataError: a line before the last is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise DataError(f"{path}: line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number}: expected an object, found a {type(row).__name__}")
        rows.append(row)
    return tuple(rows)


# Parts of an evaluation that the page looks into; `peagle evaluate` writes no others of these names.
_OBJECTS = frozenset({"pooled", "average", "datasets", "by_context_length", "lossless", "replay", "speed", "served"})
_NUMBERS = frozenset({"num_speculative_tokens", "batch_size", "prompts"})


def _files(folder: Path, name: str) -> Iterator[Path]:
    """Files called `name` in `folder` and below; folders full of states are not entered."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in _NOT_ENTERED and not f.startswith("."))
        if name in files:
            yield Path(parent) / name


def _name(root: Path, path: Path, count: int) -> str:
    """A record's name: its folder below the root if there are several, else the root's own name."""
    below = "." if root.is_file() else path.parent.relative_to(root).as_posix()
    own = path.parent.resolve() if root.is_file() else root.resolve()
    if own.name in ("evaluation", "checkpoints"):
        own = own.parent
    return own.name if count == 1 or below == "." else below.removesuffix("/evaluation")


def _of_evaluation(path: Path, name: str, root: Path) -> Record:
    evaluation = read_json(path)
    if not isinstance(evaluation.get("pooled"), dict) or not isinstance(evaluation.get("datasets"), dict):
        raise DataError(f"{path}: no `pooled` and `datasets` in it; is it an evaluation by peagle?")
    evaluation = {key: value for key, value in evaluation.items() if value is not None}
    for kind, wanted, keys in (("an object", dict, _OBJECTS), ("a whole number", int, _NUMBERS)):
        for key in keys & evaluation.keys():
            if not isinstance(evaluation[key], wanted):
                found = repr(evaluation[key])[:60]
                raise DataError(f"{path}: `{key}` is {found}, expected {kind}; measure again, or repair the file")
    checkpoint = _checkpoint_folder(evaluation, path.parent, root)
    metrics_path = _metrics_of(checkpoint, root)
    return Record(
        name=name,
        folder=path.parent,
        evaluation=evaluation,
        metrics=read_metrics(metrics_path) if metrics_path else (),
        checkpoint=read_json(checkpoint / "config.json") if checkpoint else {},
        manifests=_manifests([path.parent, checkpoint, checkpoint.parent if checkpoint else None]),
        metrics_path=metrics_path,
    )


def _of_training(path: Path, name: str, root: Path) -> Record:
    return Record(
        name=name,
        folder=path.parent,
        evaluation={},
        metrics=read_metrics(path),
        checkpoint=read_json(path.parent / "checkpoint_best" / "config.json"),
        manifests=_manifests([path.parent, root]),
        metrics_path=path,
    )


def _checkpoint_folder(evaluation: dict[str, Any], beside: Path, root: Path) -> Path | None:
    """The folder of the checkpoint that was measured, if it is on this disk."""
    named = evaluation.get("checkpoint")
    places = [Path(named), beside / named, root / named] if isinstance(named, str) else []
    places.append(beside)
    return next((place for place in places if "speculators_config" in read_json(place / "config.json")), None)


def _metrics_of(checkpoint: Path | None, root: Path) -> Path | None:
    """The metrics of the training that wrote a checkpoint: beside it, else the only ones below the root."""
    for folder in (checkpoint, checkpoint.parent) if checkpoint else ():
        if (folder / METRICS).is_file():
            return folder / METRICS
    paths = list(_files(root, METRICS)) if root.is_dir() else []
    return paths[0] if len(paths) == 1 else None


def _manifests(folders: list[Path | None]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The manifests in these folders, each stage once."""
    stages: dict[str, dict[str, Any]] = {}
    for folder in folders:
        if folder and (manifest := read_json(folder / "manifest.json")):
            stages.setdefault(str(manifest.get("stage", folder)), manifest)
    return tuple(stages.items())
