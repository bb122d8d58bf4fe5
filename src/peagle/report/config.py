"""Settings of `peagle report` and `peagle push`."""

from pathlib import Path

from pydantic import Field

from peagle.config import StageConfig


class PushConfig(StageConfig):
    """Push a checkpoint and its model card to the Hugging Face hub.

    Only what serving needs is pushed, never the training state. The card has the hub's metadata, how to serve the
    drafter, its acceptance table and how it was trained. `--dry-run` shows what would be pushed.
    """

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


class ReportConfig(StageConfig):
    """Make one self-contained page (HTML, Markdown, CSV) about a drafter, or several side by side.

    Name runs, checkpoints or evaluations. The page has the acceptance table, curves by position and by context length,
    the training, speed, which number of drafted tokens pays on this hardware, and what was run.
    """

    folders: list[str] = Field(default_factory=list, json_schema_extra={"positional": True})
    """Runs, checkpoints or evaluations: folders with an evaluation.json or a metrics.jsonl in them or below."""
    output: Path = Path("report")
    """Folder for report.html, report.md and report.csv."""
    title: str | None = None
    """Title of the page. Unset: the drafters' names."""
