"""`peagle serve`: check a checkpoint, then become `vllm serve` with the settings that it needs."""

import json
import logging
from pathlib import Path

from peagle.drafter.checkpoint import find, read_config
from peagle.errors import CheckpointError, ConfigError
from peagle.processes import ServerCommand, exec_server
from peagle.serve.check import check_checkpoint
from peagle.serve.config import CheckConfig, ServeConfig
from peagle.serve.config_rules import check_config
from peagle.serve.files import Findings
from peagle.verifier.model_config import load_verifier_config
from peagle.vllm.launch import (
    MIN_VERSION,
    InstalledVllm,
    address_arguments,
    detour_arguments,
    find_engine,
    option,
    server_url,
)

logger = logging.getLogger(__name__)


def serve(config: ServeConfig) -> int:
    """Check, then exec vLLM: it takes over this process, its signals and its exit status. Returns after a dry run.

    Raises:
        CheckpointError: the checkpoint cannot be served as it was trained.
        ConfigError: no vLLM, or what `serve_command` refuses.
    """
    folder = find(config.checkpoint)
    engine = find_engine(config.vllm_python)
    trust = option(config.extra_args, "--trust-remote-code") is not None
    length = option(config.extra_args, "--max-model-len")
    if not config.skip_check:
        checked = {
            "checkpoint": str(folder),
            "verifier_name_or_path": config.verifier_name_or_path,
            "max_model_len": int(length) if length and length.isdigit() else None,
            "trust_remote_code": trust,
        }
        findings = check_checkpoint(CheckConfig.build(checked), engine)
        for finding in findings.of("warning"):
            logger.warning("%s", finding)
        if faults := findings.of("error"):
            more = f" (and {len(faults) - 1} more: `peagle check {config.checkpoint}`)" if len(faults) > 1 else ""
            raise CheckpointError(f"{config.checkpoint}: {faults[0]}{more}")
    command = serve_command(config, folder, engine, trust)
    if config.dry_run:
        print(command)
        return 0
    logger.info("vLLM %s: %s", engine.version, command)
    logger.info("it will answer at %s/v1", server_url(config.extra_args))
    exec_server(command)
    return 0


def serve_command(config: ServeConfig, folder: Path, engine: InstalledVllm, trust_remote_code: bool) -> ServerCommand:
    """The command that serves a checkpoint's verifier with it as drafter.

    `vllm serve CHECKPOINT` does the same with the checkpoint's own verifier and number of tokens; saying both leaves
    nothing for vLLM to derive, under whichever of its start paths.

    Raises:
        CheckpointError: the checkpoint's configuration does not say what vLLM would build.
        ConfigError: fewer than one token, a vLLM without parallel drafting, or a flag that this command sets itself.
    """
    # 1. The drafter: method, parallel flag, number of tokens.
    findings = Findings()
    shape = check_config(read_config(folder), findings)
    if shape is None:
        raise CheckpointError(f"{folder}: {findings.of('error')[0]}")
    trained = shape.num_speculative_tokens
    count = trained if config.num_speculative_tokens is None else config.num_speculative_tokens
    if count < 1:
        raise ConfigError(f"--num-speculative-tokens: expected at least 1 (found {count})")
    if count > trained:
        text = "%d drafted tokens, but the checkpoint was trained for %d: deeper ones are hardly ever accepted"
        logger.warning(text, count, trained)
    settings = {"model": str(folder), "method": "eagle3", "num_speculative_tokens": count}
    if shape.kind == "peagle":
        if engine.release < MIN_VERSION:
            needed = ".".join(map(str, MIN_VERSION))
            raise ConfigError(f"vLLM {engine.version} has no parallel drafting for P-EAGLE; it needs {needed}")
        settings["parallel_drafting"] = True
    # 2. The verifier, and what the user adds.
    verifier, extra = config.verifier_name_or_path or shape.verifier, config.extra_args
    for flag in ("--speculative-config", "--spec-model", "--spec-method", "--spec-tokens"):
        if option(extra, flag) is not None:
            raise ConfigError(f"{flag}: peagle serve sets this itself; use --num-speculative-tokens")
    detour: list[str] = []
    if option(extra, "--hf-overrides") is None:
        detour = detour_arguments(engine, load_verifier_config(verifier, trust_remote_code).architectures)
    arguments = [engine.python, "-m", "vllm.entrypoints.cli.main", "serve", verifier]
    arguments += ["--speculative-config", json.dumps(settings), *detour, *address_arguments(extra), *extra]
    return ServerCommand(tuple(arguments), {"VLLM_USE_V2_MODEL_RUNNER": "0"})
