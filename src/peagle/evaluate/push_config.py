"""Settings of `peagle push`; apart from its code, which takes seconds to load."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from peagle.config import StageConfig


class PushConfig(StageConfig):
    """Settings of `peagle push`."""

    checkpoint: str = Field(json_schema_extra={"positional": True})
    """The checkpoint folder, such as RUN/checkpoints/checkpoint_best."""
    repo: str = Field(json_schema_extra={"positional": True})
    """Where to: OWNER/NAME on the hub."""
    evaluation: Path | None = None
    """An evaluation.json (or its folder) for the card's table. Unset: looked for beside the checkpoint and its run."""
    license_name: str | None = Field(None, json_schema_extra={"aliases": ["--license"]})
    """Licence for the card's metadata, such as apache-2.0; the verifier's licence may bind you."""
    private: bool = False
    """Make the repository private if it is new."""
    revision: str | None = None
    """Branch to push to. Unset: the main one."""
    message: str = "Upload with peagle"
    """Commit message."""
    dry_run: bool = False
    """Write what would be pushed into `OUTPUT` below the working folder and push nothing."""
    output: Path = Path("push")
    """Folder of --dry-run."""
