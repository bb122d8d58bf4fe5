"""`peagle check`: says what a serving engine would refuse in a checkpoint, and what it would misread without a word."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from peagle.drafter.checkpoint import find
from peagle.serve.config import CheckConfig
from peagle.serve.config_rules import check_config
from peagle.serve.files import Findings, read_checkpoint
from peagle.serve.tensor_rules import check_tensors
from peagle.serve.verifier_rules import check_embedding, check_engine, check_head, check_verifier
from peagle.vllm.launch import InstalledVllm, engine_here

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def check_checkpoint(config: CheckConfig, engine: InstalledVllm | None) -> Findings:
    """Check files, config, tensors, verifier, and the vLLM that will serve it (None: not known), in this order."""
    findings = Findings()
    raw = read_checkpoint(find(config.checkpoint), findings)
    shape = check_config(raw.config, findings) if raw.config else None
    if shape is None:
        return findings
    if raw.tensors:
        check_tensors(raw, shape, findings)
    architectures = shape.verifier_architectures
    name = config.verifier_name_or_path or shape.verifier
    if config.verifier_check and name:
        verifier = check_verifier(raw, shape, name, config, findings)
        if verifier is not None:
            architectures = tuple(verifier.architectures)
            check_embedding(raw, shape, verifier, findings)
            check_head(raw, shape, verifier, findings)
    check_engine(shape, architectures, engine, findings)
    return findings


def check(config: CheckConfig) -> int:
    """Check, print, and return the exit status: 0 if it can be served, 1 if not."""
    engine = engine_here() if config.vllm_version is None else InstalledVllm(config.vllm_version, "", None)
    findings = check_checkpoint(config, engine)
    if config.json_output:
        found = [asdict(finding) for finding in findings.found]
        shown = {"checkpoint": config.checkpoint, "servable": findings.is_servable, "findings": found}
        print(json.dumps(shown, indent=2))
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
    numbers = {level: len(findings.of(level)) for level in ("error", "warning")}
    counted = ", ".join(f"{number} {level}{'' if number == 1 else 's'}" for level, number in numbers.items())
    verdict = "can be served" if findings.is_servable else "cannot be served as it was trained"
    out.print(f"{checkpoint}: {verdict} ({counted})")
