"""`peagle serve`: check a checkpoint, then become `vllm serve` with the settings that it needs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from peagle.drafter.checkpoint import find
from peagle.errors import CheckpointError, ConfigError
from peagle.processes import ServerCommand, exec_server
from peagle.serve.check import check_checkpoint
from peagle.serve.config import CheckConfig, ServeConfig
from peagle.serve.config_rules import ServedShape, check_config
from peagle.serve.files import Findings, read_checkpoint
from peagle.verifier.model_config import load_verifier_config
from peagle.vllm.launch import address_arguments, option, server_url
from peagle.vllm.support import MIN_VERSION, InstalledVllm, detour_arguments, find_engine

logger = logging.getLogger(__name__)


def serve(config: ServeConfig) -> int:
    """Check, then exec vLLM: it takes over this process, its signals and its exit status.

    Returns:
        0 after a dry run; otherwise it does not return.

    Raises:
        CheckpointError: the checkpoint cannot be served as it was trained.
        ConfigError: no vLLM, or a number of drafted tokens that makes no sense.
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
        faults = findings.of("error")
        if faults:
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
    """
    shape = _shape(folder)
    verifier = config.verifier_name_or_path or shape.verifier
    speculative = {"model": str(folder), **speculative_settings(shape, config.num_speculative_tokens, engine)}
    extra = config.extra_args
    for flag in ("--speculative-config", "--spec-model", "--spec-method", "--spec-tokens"):
        if option(extra, flag) is not None:
            raise ConfigError(f"{flag}: peagle serve sets this itself; use --num-speculative-tokens")
    detour: list[str] = []
    if option(extra, "--hf-overrides") is None:
        detour = detour_arguments(engine, load_verifier_config(verifier, trust_remote_code).architectures)
    arguments = [engine.python, "-m", "vllm.entrypoints.cli.main", "serve", verifier]
    arguments += ["--speculative-config", json.dumps(speculative), *detour, *address_arguments(extra), *extra]
    return ServerCommand(tuple(arguments), {"VLLM_USE_V2_MODEL_RUNNER": "0"})


def speculative_settings(
    shape: ServedShape, num_speculative_tokens: int | None, engine: InstalledVllm
) -> dict[str, object]:
    """vLLM's method, parallel flag and number of tokens for a checkpoint.

    Raises:
        ConfigError: fewer than one token, or a vLLM without parallel drafting.
    """
    count = shape.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
    if count < 1:
        raise ConfigError(f"--num-speculative-tokens: expected at least 1 (found {count})")
    if count > shape.num_speculative_tokens:
        logger.warning(
            "%d drafted tokens, but the checkpoint was trained for %d: deeper ones are hardly ever accepted",
            count,
            shape.num_speculative_tokens,
        )
    settings: dict[str, object] = {"method": "eagle3", "num_speculative_tokens": count}
    if shape.kind == "peagle":
        if engine.release < MIN_VERSION:
            needed = ".".join(map(str, MIN_VERSION))
            raise ConfigError(f"vLLM {engine.version} has no parallel drafting for P-EAGLE; it needs {needed}")
        settings["parallel_drafting"] = True
    return settings


def _shape(folder: Path) -> ServedShape:
    findings = Findings()
    shape = check_config(read_checkpoint(folder, findings).config, findings)
    if shape is None:
        raise CheckpointError(f"{folder}: {findings.of('error')[0]}")
    return shape
