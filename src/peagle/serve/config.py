"""Settings of `peagle check` and `peagle serve`; apart from their code, which takes seconds to load."""

from pathlib import Path

from pydantic import Field

from peagle.config import StageConfig


class CheckConfig(StageConfig):
    """Say whether a checkpoint can be served, and what vLLM would refuse or misread.

    Exit status 0: it can be served as trained; 1: it cannot; 2: there is no such checkpoint.
    """

    checkpoint: str = Field(json_schema_extra={"positional": True})
    """A checkpoint folder or hub id."""
    verifier_name_or_path: str | None = None
    """Verifier to compare with; the one in config.json unless given."""
    verifier_check: bool = True
    """Compare with the verifier's configuration and embedding."""
    max_model_len: int | None = Field(None, ge=1)
    """Length that the server will serve; the verifier's own unless given."""
    vllm_version: str | None = None
    """vLLM that will serve it, such as 0.28.0; the installed one unless given."""
    trust_remote_code: bool = False
    """Let the verifier's own code run."""
    json_output: bool = Field(False, json_schema_extra={"aliases": ["--json"]})
    """Print the findings as JSON."""


class ServeConfig(StageConfig):
    """Serve a drafter with its verifier: check the checkpoint, then become `vllm serve`.

    vLLM's own flags follow `--`:

        peagle serve runs/checkpoints/checkpoint_best -- --port 8000 --max-model-len 4096

    The server listens on the loopback interface unless --host says otherwise. `vllm serve CHECKPOINT` works too.
    """

    checkpoint: str = Field(json_schema_extra={"positional": True})
    """A drafter: a checkpoint folder or hub id."""
    verifier_name_or_path: str | None = None
    """The verifier to serve; the one in the checkpoint's config.json unless given."""
    num_speculative_tokens: int | None = None
    """Tokens drafted per verifier pass; the checkpoint's own number unless given."""
    skip_check: bool = False
    """Serve even what `peagle check` calls unservable."""
    vllm_python: Path | None = None
    """A Python that has vLLM, if this one has not."""
    dry_run: bool = False
    """Print the command and stop."""
    extra_args: tuple[str, ...] = ()
    """What follows `--`: vLLM's own flags (--port, --tensor-parallel-size, --max-model-len ...)."""
