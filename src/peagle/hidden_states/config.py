"""Settings of `peagle extract`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from peagle.config import SERVER, ServerSettings


class ExtractConfig(ServerSettings):
    """Run the verifier over prepared rows and store the hidden states that training reads.

    Kill it at any time: the same command goes on where it stopped. A damaged or missing shard is found and re-made.
    """

    preprocessed_data: Path
    """Folder that `peagle prepare` wrote."""
    output: Path
    """Folder of the store. Run the same command again to go on, or to re-make damaged shards."""
    model: str | None = None
    """Verifier: a model folder or hub id. The one the data was prepared for, unless given."""
    verifier_name_or_path: str | None = None
    """The same as --model, under the name that `train` gives it."""
    max_samples: int | None = Field(None, ge=1)
    """Use only the first rows of the data."""
    target_layer_ids: tuple[int, ...] | None = None
    """Auxiliary layer ids: 0 is the embedding output, j the stream after j layers. Default: 2, L // 2, L - 3."""
    validate_outputs: bool = False
    """Check norm and head at every label position: the normed state and, at one in 32, the verifier's own next-token
    choice (served verifiers: the choice at the last position of every row, at every position of a sample). Each row is
    proved by itself, and some against states computed again, with or without it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype in which the verifier computes and states are stored; auto: the verifier's own."""
    batch_size: int = Field(16, ge=1)
    """Rows that run through the verifier together (Transformers backend)."""
    device: str = "auto"
    """Where the verifier runs (Transformers backend): cpu, cuda, cuda:1; auto: the first GPU, else the CPU."""
    shard_mb: int = Field(256, ge=1)
    """Size at which a shard of the store is finished, in MB. A killed run loses at most one shard's work."""
    max_disk_gb: float | None = Field(None, gt=0)
    """Refuse to start when the whole store would be larger than this, in GB (10^9 bytes)."""
    skip_bad_rows: bool = False
    """Skip and count a row with NaN, Inf, other ids or a failed check, instead of stopping at it."""
    verifier_tensors: tuple[str, ...] = ()
    """Names of the verifier's tensors where they are unusual: embedding=NAME, norm=NAME, head=NAME."""
    trust_remote_code: bool = False
    """Let the model's own code run."""
    backend: Literal["transformers", "vllm"] = "transformers"
    """What runs the verifier when no --endpoint is given: Transformers, or vLLM inside this process."""
    endpoint: tuple[str, ...] = Field((), json_schema_extra=SERVER)
    """Address of a server started with `peagle launch-vllm`, such as http://localhost:8000/v1; may be repeated."""
    hidden_states_path: Path | None = Field(None, json_schema_extra=SERVER)
    """Folder through which the server hands over states, when this machine sees it under another name."""
    extra_args: tuple[str, ...] = ()
    """With --backend vllm: what follows `--`, vLLM's own flags."""

    @model_validator(mode="after")
    def _one_verifier(self) -> ExtractConfig:
        if self.model and self.verifier_name_or_path and self.model != self.verifier_name_or_path:
            raise ValueError(
                f"--model {self.model} and --verifier-name-or-path {self.verifier_name_or_path} name two verifiers"
            )
        return self
