"""`peagle check`: says what a serving engine would refuse in a checkpoint, and what it would misread without a word."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rich.console import Console
from rich.text import Text

from peagle.drafter.checkpoint import find
from peagle.serve.config import CheckConfig
from peagle.serve.config_rules import check_config
from peagle.serve.files import Findings, read_checkpoint
from peagle.serve.tensor_rules import check_tensors
from peagle.serve.verifier_rules import check_embedding, check_end_tokens, check_engine, check_length, check_verifier
from peagle.vllm.support import Engine, engine_here

logger = logging.getLogger(__name__)

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def check_checkpoint(
    folder: Path,
    verifier_name_or_path: str | None,
    verifier_check: bool,
    max_model_len: int | None,
    engine: Engine | None,
    trust_remote_code: bool,
) -> Findings:
    """Check a checkpoint folder.

    Args:
        folder: its root.
        verifier_name_or_path: instead of the one in config.json, or None.
        verifier_check: compare with the verifier.
        max_model_len: length to be served, or None for the verifier's.
        engine: vLLM that will serve it, or None if unknown.
        trust_remote_code: let the verifier's own code run.

    Returns:
        Everything found, in the order: files, config, tensors, verifier, engine.
    """
    findings = Findings()
    raw = read_checkpoint(folder, findings)
    if not raw.config:
        return findings
    shape = check_config(raw.config, findings)
    if shape is None:
        return findings
    if raw.tensors:
        check_tensors(raw, shape, findings)
    architectures = shape.verifier_architectures
    verifier = verifier_name_or_path or shape.verifier
    if verifier_check and verifier:
        verifier_config = check_verifier(shape, verifier, trust_remote_code, findings)
        if verifier_config is not None:
            architectures = verifier_config.architectures
            check_length(shape, verifier_config, max_model_len, findings)
            check_end_tokens(raw, shape, verifier_config, findings)
            check_embedding(raw, shape, verifier_config, findings)
    check_engine(shape, tuple(architectures), engine, findings)
    return findings


def check(config: CheckConfig) -> int:
    """Check, print, and return the exit status: 0 if it can be served, 1 if not."""
    engine = engine_here() if config.vllm_version is None else Engine(config.vllm_version, "", None)
    findings = check_checkpoint(
        find(config.checkpoint),
        config.verifier_name_or_path,
        config.verifier_check,
        config.max_model_len,
        engine,
        config.trust_remote_code,
    )
    if config.json_output:
        print(json.dumps(findings.to_json(config.checkpoint), indent=2))
    else:
        show(findings, config.checkpoint)
    return 0 if findings.is_servable else 1


def show(findings: Findings, checkpoint: str) -> None:
    """Print the findings, worst first, and a closing line."""
    out = Console(highlight=False, soft_wrap=True)
    for level in ("error", "warning", "note"):
        for finding in findings.of(level):
            line = Text(f"{level:>7}  ", style=_COLOURS[level])
            line.append(str(finding), style="default")
            out.print(line)
    errors, warnings = len(findings.of("error")), len(findings.of("warning"))
    verdict = "can be served" if findings.is_servable else "cannot be served as it was trained"
    out.print(f"{checkpoint}: {verdict} ({_counted(errors, 'error')}, {_counted(warnings, 'warning')})")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
