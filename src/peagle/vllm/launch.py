"""`peagle launch-vllm`: a vLLM server that hands out hidden states, started with the settings that this needs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle.errors import ConfigError
from peagle.processes import ServerCommand, start, stop, wait_ready
from peagle.verifier.model_config import VerifierConfig, load_verifier_config, resolve_aux_layer_ids
from peagle.vllm.config import LaunchConfig
from peagle.vllm.states import IN_FLIGHT
from peagle.vllm.support import InstalledVllm, detour_arguments, find_engine

logger = logging.getLogger(__name__)

PLUGIN_FOLDER = Path(__file__).parent / "plugin"
"""Goes on the server's PYTHONPATH; holds the connector and nothing else."""
CONNECTOR, CONNECTOR_MODULE = "PeagleHiddenStates", "peagle_vllm_connector"
_STOP_WAIT_S = 30.0
_OURS = ("--speculative-config", "--kv-transfer-config", "--spec-method", "--spec-model", "--spec-tokens")


def extraction_arguments(layer_ids: Sequence[int], folder: Path, num_threads: int, max_bytes: int) -> dict[str, Any]:
    """vLLM's `speculative_config` and `kv_transfer_config` for hidden states, for a server or for `LLM`.

    Args:
        layer_ids: ascending; the number of layers stands for the state before the final norm.
        folder: where files appear.
        num_threads, max_bytes: see `LaunchConfig`.
    """
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "folder": str(folder),
                "num_writer_threads": num_threads,
                "max_queued_bytes": max_bytes,
            },
        },
    }


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
    settings = extraction_arguments(
        served_layer_ids(verifier, config.target_layer_ids),
        folder,
        config.num_writer_threads,
        config.max_queued_bytes,
    )
    arguments = [engine.python, "-m", "vllm.entrypoints.cli.main", "serve", config.model]
    for key, value in settings.items():
        arguments += [f"--{key.replace('_', '-')}", json.dumps(value)]
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
