"""What a check found: an error keeps a checkpoint from being served as trained, a warning should be looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing about a checkpoint."""

    level: Level
    where: str
    """File and field or tensor: "config.json: mask_token_id"."""
    message: str
    """What was found against what was expected, and what to do."""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass
class Findings:
    """Findings in the order in which they came."""

    found: list[Finding] = field(default_factory=list)

    def error(self, where: str, message: str) -> None:
        """Add an error."""
        self.found.append(Finding("error", where, message))

    def warning(self, where: str, message: str) -> None:
        """Add a warning."""
        self.found.append(Finding("warning", where, message))

    def note(self, where: str, message: str) -> None:
        """Add a fact worth knowing."""
        self.found.append(Finding("note", where, message))

    def of(self, level: Level) -> list[Finding]:
        """Those of one level."""
        return [finding for finding in self.found if finding.level == level]

    @property
    def is_servable(self) -> bool:
        """Whether there is no error."""
        return not self.of("error")

    def to_json(self, checkpoint: str) -> dict[str, Any]:
        """As printed by `peagle check --json`."""
        return {
            "checkpoint": checkpoint,
            "servable": self.is_servable,
            "findings": [asdict(finding) for finding in self.found],
        }
