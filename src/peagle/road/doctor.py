"""`peagle doctor`: the environment, a verifier, and the whole road on a few rows, each finding in one line.

Nothing is left behind: the dry run works in a temporary folder and calls the same functions as the commands.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle.config import StageConfig
from peagle.errors import PeagleError

logger = logging.getLogger(__name__)
State = Literal["ok", "warn", "fail"]
_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}


class DoctorConfig(StageConfig):
    """Settings of `peagle doctor`."""

    model: str | None = Field(None, json_schema_extra={"positional": True})
    """The verifier to look at: a folder or hub id. Unset: only the environment."""
    data: tuple[str, ...] = ()
    """Data to walk the road with, as for `prepare`; unset: a short made-up conversation."""
    rows: int = Field(12, ge=1)
    """How many conversations the dry run takes."""
    seq_length: int = Field(4096, ge=2)
    """Length limit that is planned."""
    max_samples: int | None = Field(None, ge=1)
    """Conversations that are planned, for the estimates of disk and time."""
    output: Path = Path("output")
    """Where the run will go: its disk is looked at, nothing is written to it."""
    num_layers: int = Field(4, ge=1, json_schema_extra={"panel": "Drafter"})
    """Decoder layers of the drafter that is planned."""
    target_layer_ids: tuple[int, ...] | None = Field(None, json_schema_extra={"panel": "Drafter"})
    """Verifier layers that the drafter will read. Unset: the default ones."""
    mask_token_id: int | None = Field(None, ge=0, json_schema_extra={"panel": "Drafter"})
    """Mask token that is planned. Unset: resolved as in training."""
    draft_vocab_size: int | None = Field(None, ge=1, json_schema_extra={"panel": "Drafter"})
    """Draft vocabulary that is planned."""
    weights: bool = True
    """Run the verifier's weights on the rows, if they fit into memory; --no-weights looks at configuration only."""
    trust_remote_code: bool = False
    """Let the model's own code run."""
    json_output: bool = Field(False, json_schema_extra={"aliases": ["--json"]})
    """Print the findings as JSON."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it stands, what was found and what to do."""

    what: str
    state: State
    message: str


def doctor(config: DoctorConfig) -> int:
    """Look at everything that was asked for and print it.

    Returns:
        0 if nothing failed (warnings are fine), else 1.
    """
    findings = []
    out = Console()
    for finding in examine(config):
        findings.append(finding)
        if not config.json_output:
            if out.is_terminal:
                out.print(line(finding))
            else:  # whole lines, for grep
                print(f"{finding.state if finding.state != 'fail' else 'FAIL':<4} {finding.what:<13} {finding.message}")
    if config.json_output:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    return int(any(finding.state == "fail" for finding in findings))


def line(finding: Finding) -> Table:
    """A finding for a terminal, its message wrapped beside its name."""
    shown = Table.grid(padding=(0, 1))
    shown.add_column(width=4)
    shown.add_column(width=13)
    shown.add_column(overflow="fold")
    shown.add_row(_MARKS[finding.state], finding.what, escape(finding.message))
    return shown


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Everything, in the order of the road; what depends on something that failed is left out."""
    from peagle.road import doctor_environment, doctor_model, doctor_walk

    yield from doctor_environment.environment(config.output)
    if config.model is None:
        return
    found: dict[str, Any] = {}
    yield from doctor_model.model(config, found)
    if "facts" in found and "tokenizer" in found:
        yield from doctor_walk.walk(config, found)


def guarded(what: str, error: PeagleError) -> Finding:
    """A failure in one line."""
    return Finding(what, "fail", " ".join(str(error).split()))
