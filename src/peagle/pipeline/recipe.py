"""A recipe: the whole pipeline in one YAML file, and the stages that follow from it."""

import difflib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from peagle import embedded
from peagle.config import StageConfig, read_yaml
from peagle.errors import ConfigError, one_line
from peagle.vllm.config import LaunchConfig

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# An `endpoint: server` in a stage means the vLLM that the recipe's own `server:` section starts.
SERVER = "server"
DEFAULT_PORT = 8000

# stage -> (module of its config, the config's name), in the order of the pipeline
STAGES: dict[str, tuple[str, str]] = {
    "regenerate": ("peagle.regenerate.config", "RegenerateConfig"),
    "prepare": ("peagle.data.config", "PrepareConfig"),
    "extract": ("peagle.hidden_states.config", "ExtractConfig"),
    "train": ("peagle.train.config", "TrainConfig"),
    "check": ("peagle.serve.config", "CheckConfig"),
    "evaluate": ("peagle.evaluate.config", "EvaluateConfig"),
    "report": ("peagle.report.config", "ReportConfig"),
}


# stage -> (the setting that says where it writes, and where that is unless given)
_OUTPUTS = {
    "regenerate": ("output", "answers.jsonl"),
    "prepare": ("output", "prepared"),
    "extract": ("output", "hidden_states"),
    "train": ("save_path", "checkpoints"),
    "evaluate": ("output", "evaluation"),
    "report": ("output", "report"),
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
    """One file for the whole pipeline. A stage runs if its key is there; paths between stages are filled in."""

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
    """The verifier answers the prompts itself."""
    prepare: dict[str, Any] | None = None
    """Conversations become token rows with a loss mask."""
    extract: dict[str, Any] | None = None
    """The verifier's hidden states on the rows are stored."""
    train: dict[str, Any] | None = None
    """A drafter learns from the states."""
    check: dict[str, Any] | None = None
    """Would a serving engine load the drafter?"""
    evaluate: dict[str, Any] | None = None
    """The drafter is measured beside the verifier alone."""
    report: dict[str, Any] | None = None
    """Everything on one page."""

    @property
    def server_url(self) -> str:
        """Address of the recipe's own server."""
        return f"http://localhost:{(self.server or {}).get('port', DEFAULT_PORT)}"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a recipe, ready to run."""

    name: str
    config: StageConfig
    inputs: tuple[str, ...]
    """Files, folders, hub names that it reads."""
    output: Path
    """What it makes."""
    uses_server: bool
    """Whether it talks to the recipe's vLLM."""
    root: Path
    """The recipe's output folder."""

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that differs from the config's defaults, JSON-able."""
        return self.config.model_dump(mode="json", exclude_defaults=True)


def find(name_or_path: str) -> Path:
    """A recipe file: a path, or the name of a shipped one; else a ConfigError offers the nearest."""
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
    """Read a recipe's YAML file; `output`, and `changes` such as "train.lr=1e-3", win over it.

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
        advice = "write `check: {}` for one without settings"
        raise ConfigError(f"{path}: no stage in it; stages are {', '.join(STAGES)} ({advice})")
    return recipe


def stages(recipe: Recipe) -> list[Stage]:
    """The stages that the recipe asks for, in order; a ConfigError names a stage whose setting does not fit."""
    made = {
        stage: (getattr(recipe, stage) or {}).get(key, recipe.output / name) for stage, (key, name) in _OUTPUTS.items()
    }
    ready = []
    for name, (wired, reads) in _wiring(recipe, made).items():
        given = getattr(recipe, name)
        if given is None:
            continue
        writes = {_OUTPUTS[name][0]: made[name]} if name in _OUTPUTS else {}
        settings = {**wired, **writes, **given}
        uses_server = settings.get("endpoint") in (SERVER, [SERVER])
        if uses_server and recipe.server is None:
            text = "an endpoint is `server`, but the recipe has no `server:` section"
            raise ConfigError(f"recipe `{recipe.name}`: {text}")
        if uses_server:
            settings["endpoint"] = [f"{recipe.server_url}/v1"]
        module, class_name = STAGES[name]
        config_type: type[StageConfig] = getattr(importlib.import_module(module), class_name)
        try:
            config = config_type.build(settings)
        except ConfigError as error:
            raise ConfigError(f"recipe `{recipe.name}`, stage `{name}`: {error}") from None
        named = [settings[key] for key in reads if settings.get(key) is not None]
        if name in ("check", "evaluate"):
            named.append(recipe.verifier)  # the checkpoint names it
        items = [item for one in named for item in (one if isinstance(one, (list, tuple)) else [one])]
        inputs = [_unlabelled(str(embedded.resolve(item))) for item in items]
        ready.append(
            Stage(
                name=name,
                config=config,
                inputs=tuple(dict.fromkeys(inputs)),
                output=Path(made[name] if name in made else wired["checkpoint"]),
                uses_server=uses_server,
                root=recipe.output,
            )
        )
    return ready


def server_config(recipe: Recipe) -> LaunchConfig | None:
    """The recipe's server as `launch-vllm` takes it; a ConfigError names a setting that does not fit."""
    if recipe.server is None:
        return None
    given = {"model": recipe.verifier, "hidden_states_path": recipe.output / "hidden_states", **recipe.server}
    arguments = ["--port", given.pop("port", DEFAULT_PORT), *given.pop("extra_args", [])]
    try:
        return LaunchConfig.build({**given, "extra_args": tuple(map(str, arguments))})
    except ConfigError as error:
        raise ConfigError(f"recipe `{recipe.name}`, `server`: {error}") from None


def _wiring(recipe: Recipe, made: dict[str, Any]) -> dict[str, tuple[dict[str, Any], tuple[str, ...]]]:
    """What follows for each stage from the recipe and from where each stage writes: settings, and which name inputs."""
    model, best = {"model": recipe.verifier}, str(Path(made["train"]) / "checkpoint_best")
    answers = {} if recipe.regenerate is None else {"data": [str(made["regenerate"])]}
    training = {"data_path": made["prepare"], "hidden_states_path": made["extract"]}
    # online and hybrid training makes its states itself: what it leaves is no input
    trained_on = ("data_path",) if recipe.extract is None else ("data_path", "hidden_states_path")
    return {
        "regenerate": (model, ("model", "data", "chat_template")),
        "prepare": ({**model, **answers}, ("model", "data", "chat_template")),
        "extract": ({**model, "preprocessed_data": made["prepare"]}, ("model", "preprocessed_data")),
        "train": (
            {"verifier_name_or_path": recipe.verifier, **training},
            ("verifier_name_or_path", "from_pretrained", *trained_on),
        ),
        "check": ({"checkpoint": best}, ("checkpoint", "verifier_name_or_path")),
        "evaluate": (
            {"checkpoint": best},
            ("checkpoint", "data", "data_path", "hidden_states_path", "chat_template", "verifier_name_or_path"),
        ),
        "report": ({"folders": [str(made["evaluate"]), str(made["train"])]}, ("folders",)),
    }


def _apply(values: dict[str, Any], change: str) -> None:
    """Set `stage.key=value` (or `key=value`) in a recipe's mapping; the value is read as YAML."""
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
        raise ConfigError(f"--set {change}: the value is not YAML ({one_line(error)})") from None


def _unlabelled(name: str) -> str:
    """`LABEL=file.jsonl` without its label; anything else as it is."""
    file = name.partition("=")[2]
    return file if file and Path(file).exists() else name
