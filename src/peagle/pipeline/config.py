"""Settings of `peagle run`, `peagle demo` and `peagle doctor`."""

from pathlib import Path

from pydantic import Field

from peagle.config import StageConfig


class RunConfig(StageConfig):
    """Run the whole pipeline from one recipe: regenerate, prepare, extract, train, check, evaluate, report.

    A stage whose settings and inputs have not changed is skipped (contents are compared, not times). After a kill the
    same command goes on where it stopped. `--dry-run` prints the plan with disk, memory and expected time.

        peagle run qwen3-8b --dry-run
        peagle run qwen3-8b --set train.epochs=3
    """

    recipe: str = Field("", json_schema_extra={"positional": True})
    """A recipe file, or the name of a shipped one (`peagle run --list` shows them)."""
    output: Path | None = None
    """Folder for everything that is made, instead of the recipe's own."""
    changes: tuple[str, ...] = Field((), json_schema_extra={"aliases": ["--set"], "whole": True})
    """Settings that win over the recipe: `train.lr=1e-3`, `prepare.max_samples=100`; several."""
    dry_run: bool = False
    """Print the plan, disk, memory and expected time, and stop."""
    until: str | None = None
    """Stop after this stage."""
    json_output: bool = Field(False, json_schema_extra={"aliases": ["--json"]})
    """With --dry-run: print the plan as JSON."""
    list_recipes: bool = Field(False, json_schema_extra={"aliases": ["--list"]})
    """List the shipped recipes and stop."""


class DemoConfig(StageConfig):
    """Run the whole pipeline on this machine in a few minutes, from questions to a measured drafter and its report.

    Runs the recipe `demo` with the small verifier and the questions that ship with the package; nothing is downloaded.
    Ends in the acceptance table, the speed against plain decoding, and the proof that every answer is the verifier's
    own. A flag that is unset leaves the recipe's own setting.
    """

    output: Path = Path("demo-output")
    """Folder for everything that is made; an earlier demo there is replaced."""
    questions: int | None = Field(None, ge=8, le=1000)
    """Training questions that the verifier answers; more make a better drafter and a longer demo."""
    test_questions: int | None = Field(None, ge=1, le=100)
    """Held-out questions for the measurement."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps."""
    seed: int | None = Field(None, ge=0)
    """Seed of the training."""


class DoctorConfig(StageConfig):
    """Examine the environment, a model, and the pipeline on a few rows of data, and say what would fail.

    A model folder goes as far as extraction, one training step and a check of the checkpoint; for a hub id, rows are
    prepared and the run is estimated. Exits with 1 if anything failed, and leaves nothing behind.

        peagle doctor
        peagle doctor Qwen/Qwen3-8B --data sharegpt --max-samples 5000
        peagle doctor embedded:verifier --data embedded:train
    """

    model: str | None = Field(None, json_schema_extra={"positional": True})
    """The verifier to examine: a folder or hub id. Unset: only the environment."""
    data: tuple[str, ...] = ()
    """Data to try it with, as for `prepare`. Unset: a short made-up conversation."""
    rows: int = Field(12, ge=1)
    """How many conversations the dry run takes."""
    seq_length: int = Field(4096, ge=2)
    """Length limit that is planned."""
    max_samples: int | None = Field(None, ge=1)
    """Conversations that are planned, for the estimates of disk and time."""
    output: Path = Path("output")
    """Where the run will go: its disk is looked at, nothing is written to it."""
    num_layers: int | None = Field(None, ge=1, json_schema_extra={"panel": "Drafter"})
    """Decoder layers of the drafter that is planned. Unset: as many as `train` gives it."""
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
