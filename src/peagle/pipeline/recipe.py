"""A recipe: the whole road in one YAML file, and the stages that follow from it."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from peagle import embedded
from peagle.config import StageConfig, read_yaml
from peagle.errors import ConfigError
from peagle.files import sha256_file, write_json

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SERVER = "server"

# stage -> (module of its config, the config's name), in the order of the road
STAGES: dict[str, tuple[str, str]] = {
    "regenerate": ("peagle.regenerate.config", "RegenerateConfig"),
    "prepare": ("peagle.data.config", "PrepareConfig"),
    "extract": ("peagle.hidden_states.config", "ExtractConfig"),
    "train": ("peagle.train.config", "TrainConfig"),
    "check": ("peagle.serve.config", "CheckConfig"),
    "evaluate": ("peagle.evaluate.config", "EvaluateConfig"),
    "report": ("peagle.report.config", "ReportConfig"),
}


class Sizes(StageConfig):
    """The verifier's sizes, so that a plan can be made where the verifier itself cannot be reached."""

    hidden_size: int = Field(ge=1)
    """Width of its states."""
    intermediate_size: int = Field(ge=1)
    """Width of its MLPs (of the drafter's)."""
    num_layers: int = Field(ge=1)
    """Decoder layers."""
    num_attention_heads: int = Field(ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(ge=1)
    """Key and value heads."""
    head_dim: int = Field(ge=1)
    """Width of a head."""
    vocab_size: int = Field(ge=1)
    """Rows of its embedding."""
    parameters_billion: float = Field(gt=0)
    """All parameters that one token runs through, in billions."""


class Recipe(StageConfig):
    """One file for the whole road. A stage runs if its key is there; paths between stages are filled in."""

    name: str
    """What the run is called."""
    description: str = ""
    """One line about it."""
    verifier: str
    """Hub id or folder of the verifier; every stage uses it."""
    output: Path
    """Folder of everything that is made."""
    sizes: Sizes | None = None
    """The verifier's sizes, for plans without network."""
    server: dict[str, Any] | None = None
    """Settings of `launch-vllm` and `port`: a server for the stages whose endpoint is `server`."""
    processes: int = Field(1, ge=1)
    """Training processes (torchrun), one for each GPU."""
    regenerate: dict[str, Any] | None = None
    """On-policy answers first."""
    prepare: dict[str, Any] | None = None
    """Conversations to rows."""
    extract: dict[str, Any] | None = None
    """Rows to states."""
    train: dict[str, Any] | None = None
    """States to a drafter."""
    check: dict[str, Any] | None = None
    """Is it servable?"""
    evaluate: dict[str, Any] | None = None
    """How good is it?"""
    report: dict[str, Any] | None = None
    """The page that shows it."""


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe, ready to run."""

    name: str
    settings: dict[str, Any]
    """Everything its config takes, paths filled in, JSON-able."""
    inputs: tuple[str, ...]
    """Files, folders, hub names that it reads."""
    output: Path
    """What it makes."""
    uses_server: bool
    """Whether it talks to the recipe's vLLM."""
    root: Path
    """The recipe's output folder."""


def find(name_or_path: str) -> Path:
    """A recipe file: a path, or the name of a shipped one.

    Raises:
        ConfigError: neither; the nearest shipped name is offered.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}
    if name_or_path in shipped:
        return shipped[name_or_path]
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"shipped ones are {', '.join(shipped)}"
    raise ConfigError(f"{name_or_path}: no such recipe file; {hint}")


def read(path: Path, output: Path | None, changes: tuple[str, ...]) -> Recipe:
    """Read a recipe.

    Args:
        path: the YAML file.
        output: replaces the file's `output`.
        changes: `stage.key=value` settings that win over the file, such as "train.lr=1e-3".

    Raises:
        ConfigError: an unknown key, at the recipe's level or a stage's, or a value that does not fit.
    """
    values = read_yaml(path)
    if output is not None:
        values["output"] = str(output)
    for change in changes:
        _apply(values, change)
    recipe = Recipe.build(values)
    if not any(getattr(recipe, stage) is not None for stage in STAGES):
        raise ConfigError(
            f"{path}: no stage in it; stages are {', '.join(STAGES)} (write `check: {{}}` for one without settings)"
        )
    return recipe


def stages(recipe: Recipe) -> list[Stage]:
    """The stages that the recipe asks for, in order, each validated against its config.

    Raises:
        ConfigError: a setting of a stage that does not fit; the stage is named.
    """
    found = []
    for name in STAGES:
        given = getattr(recipe, name)
        if given is None:
            continue
        wired, reads, output = _wire(recipe, name)
        settings = {**wired, **given}
        uses_server = _to_server(settings, recipe)
        config_type = config_of(name)
        try:
            config = config_type.build(settings)
        except ConfigError as error:
            raise ConfigError(f"recipe `{recipe.name}`, stage `{name}`: {error}") from None
        plain = config.model_dump(mode="json", exclude_defaults=True)
        inputs = [_unlabelled(str(embedded.resolve(item))) for key in reads for item in _as_list(settings.get(key))]
        place = Path(settings.get("output", output))
        found.append(Stage(name, plain, tuple(dict.fromkeys(inputs)), place, uses_server, recipe.output))
    return found


def config_of(stage: str) -> type[StageConfig]:
    """The config class of a stage; importing it costs what its room costs, so it is done late."""
    module_name, class_name = STAGES[stage]
    return getattr(importlib.import_module(module_name), class_name)


def _wire(recipe: Recipe, stage: str) -> tuple[dict[str, Any], tuple[str, ...], Path]:
    """What follows from the recipe for a stage: settings, the settings that name inputs, the output."""
    at = recipe.output
    answers, prepared, states, checkpoints = (
        at / "answers.jsonl",
        at / "prepared",
        at / "hidden_states",
        at / "checkpoints",
    )
    best = checkpoints / "checkpoint_best"
    if stage == "regenerate":
        return {"model": recipe.verifier, "output": answers}, ("model", "data"), answers
    if stage == "prepare":
        data = {} if recipe.regenerate is None else {"data": [str(answers)]}
        return {"model": recipe.verifier, "output": prepared, **data}, ("model", "data"), prepared
    if stage == "extract":
        places = {"preprocessed_data": prepared, "output": states}
        return {"model": recipe.verifier, **places}, ("model", "preprocessed_data"), states
    if stage == "train":
        paths = {"data_path": prepared, "hidden_states_path": states, "save_path": checkpoints}
        # online and hybrid training makes its states itself: what it leaves is no input
        reads = ("verifier_name_or_path", "data_path", *(["hidden_states_path"] if recipe.extract is not None else []))
        return {"verifier_name_or_path": recipe.verifier, **paths}, reads, checkpoints
    if stage == "check":
        return {"checkpoint": str(best)}, ("checkpoint",), best
    if stage == "evaluate":
        return {"checkpoint": str(best), "output": at / "evaluation"}, ("checkpoint", "data"), at / "evaluation"
    measured = [str(at / "evaluation"), str(checkpoints)]
    return {"folders": measured, "output": at / "report"}, ("folders",), at / "report"


def _to_server(settings: dict[str, Any], recipe: Recipe) -> bool:
    """Replace the endpoint `server` by the address of the recipe's server; tell whether it was there."""
    if settings.get("endpoint") not in (SERVER, [SERVER]):
        return False
    if recipe.server is None:
        raise ConfigError(f"recipe `{recipe.name}`: an endpoint is `server`, but the recipe has no `server:` section")
    settings["endpoint"] = [f"http://localhost:{recipe.server.get('port', 8000)}/v1"]
    return True


def _apply(values: dict[str, Any], change: str) -> None:
    """Set `stage.key=value` (or `key=value`) in a recipe's mapping; the value is read as YAML."""
    import yaml

    name, sign, text = change.partition("=")
    if not sign:
        raise ConfigError(f"--set {change}: expected stage.key=value, such as train.lr=1e-3")
    *parents, last = name.strip().replace("-", "_").split(".")
    target = values
    for parent in parents:
        if target.get(parent) is None:
            target[parent] = {}
        target = target[parent]
        if not isinstance(target, dict):
            raise ConfigError(f"--set {change}: `{parent}` has no keys of its own")
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {change}: the value is not YAML ({str(error).splitlines()[0]})") from None


def _unlabelled(name: str) -> str:
    """`LABEL=file.jsonl` without its label; anything else as it is."""
    file = name.partition("=")[2]
    return file if file and Path(file).exists() else name


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


@dataclass(frozen=True)
class Step:
    """A stage and what is to be done about it."""

    stage: Stage
    key: str | None
    """Identity of its work; None while an earlier stage has yet to make what it reads."""
    action: str
    """"skip", "resume" or "run"."""
    why: str


# ---- What a stage read and wrote, as hashes of contents: equal hashes mean that nothing has to be done again.


# Differ between runs that made the same thing: times, versions, logs, locks.
_NOT_CONTENT = {"manifest.json", "run.yaml", "metrics.jsonl", "README.md", "recipe.json"}
_STORE = "store.json"


class Fingerprints:
    """Hashes of files and folders; a file is read again only if its size or its time of change differ."""

    def __init__(self, cache_file: Path) -> None:
        self._file = cache_file
        self._known: dict[str, list[Any]] = {}
        try:
            known = json.loads(cache_file.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}
        except (OSError, ValueError):
            pass  # a cache: without it every file is read once more

    def of(self, path: Path) -> str | None:
        """The hash of a file's content, or of everything that a folder holds; None if nothing is there.

        A hidden-state store stands for itself by its JSON files, which have the checksum of every shard.
        """
        if path.is_file():
            return self._file_hash(path)
        if not path.is_dir():
            return None
        is_store = (path / _STORE).is_file()
        digest = hashlib.sha256()
        found = False
        for file in sorted(path.rglob("*")):
            relative = file.relative_to(path)
            hidden = any(part.startswith(".") or part == "training_state" for part in relative.parts)
            if hidden or not file.is_file() or file.name in _NOT_CONTENT or (is_store and file.suffix != ".json"):
                continue
            found = True
            digest.update(f"{relative.as_posix()}\0{self._file_hash(file)}\n".encode())
        return digest.hexdigest() if found else None

    def save(self) -> None:
        """Keep the cache for the next run."""
        write_json(self._file, self._known)

    def _file_hash(self, path: Path) -> str:
        stat = path.stat()
        key = str(path.resolve())
        known = self._known.get(key)
        if isinstance(known, list) and known[:2] == [stat.st_size, stat.st_mtime_ns]:
            return str(known[2])
        digest = sha256_file(path)
        self._known[key] = [stat.st_size, stat.st_mtime_ns, digest]
        return digest


def key_of(stage: str, settings: dict[str, Any], inputs: dict[str, str], root: Path) -> str:
    """The identity of a stage's work: its settings and the hashes of what it reads.

    The run's own folder (`root`) is left out of it, so that a run that was moved is still up to date.
    """
    text = json.dumps([stage, settings, inputs], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.replace(str(root), "{output}").encode()).hexdigest()
