"""Settings of `peagle regenerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from peagle.config import StageConfig

_SAMPLING: Any = {"panel": "Sampling"}
_SERVER: Any = {"panel": "Served verifier"}


class RegenerateConfig(StageConfig):
    """Let the verifier answer the prompts of any data set: a drafter learns to predict its own verifier.

    The output is ready for `peagle prepare --data`. Kill it at any time: the same command goes on where it stopped.
    """

    model: str
    """The verifier: a model folder or hub id."""
    data: tuple[str, ...] = Field(min_length=1)
    """Prompts, repeatable: whatever `prepare --data` takes; of a conversation, its user turns."""
    output: Path
    """File of the answers, .jsonl: token ids and loss mask ready for `prepare`, and messages to read. Run the same
    command again to go on."""
    max_samples: int | None = Field(None, ge=1, json_schema_extra={"aliases": ["--limit"]})
    """Read at most so many conversations, one from each data set in turn."""
    max_new_tokens: int = Field(512, ge=1, json_schema_extra={"aliases": ["--max-tokens"]})
    """Longest answer, its end token included; what this cuts is marked with finish_reason "length"."""
    max_turns: int | None = Field(None, ge=1)
    """Answer at most so many user turns of each conversation; every answer becomes a row of its own."""
    tail_tokens: int = Field(0, ge=0)
    """Keep so many of the verifier's tokens past each answer's end, for `evaluate --mode replay` (give it the largest
    number of speculative tokens)."""
    temperature: float = Field(0.0, ge=0, json_schema_extra=_SAMPLING)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1, json_schema_extra=_SAMPLING)
    """Sample from the most probable tokens that together reach this."""
    seed: int = Field(0, ge=0, json_schema_extra=_SAMPLING)
    """Seed of the sampling; each row draws from its own generator, whatever the batches are."""
    batch_size: int = Field(64, ge=1)
    """Prompts answered together (Transformers)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype in which the verifier computes; auto: its own."""
    device: str = "auto"
    """Where it runs: cpu, cuda, cuda:1; auto: the first GPU, else the CPU."""
    chat_template: Path | None = None
    """A Jinja file to use instead of the model's own template; serve with the same one."""
    trust_remote_code: bool = False
    """Let the model's own code run."""
    overwrite: bool = False
    """Start anew where the output holds answers that were made otherwise."""
    endpoint: tuple[str, ...] = Field((), json_schema_extra=_SERVER)
    """Address of a vLLM server of this verifier, such as http://localhost:8000/v1; may be repeated."""
    chat: bool = Field(False, json_schema_extra=_SERVER)
    """Send chats (/v1/chat/completions), which the server renders with its own template, rather than token ids; the ids
    that it rendered are what is kept."""
    concurrency: int = Field(32, ge=1, json_schema_extra=_SERVER)
    """Requests under way at once."""
    request_timeout_s: float = Field(600.0, gt=0, json_schema_extra=_SERVER)
    """Longest wait for one answer."""
    max_retries: int = Field(3, ge=0, json_schema_extra=_SERVER)
    """Further tries after a passing error (408, 409, 425, 429, 5xx, a timeout)."""
    restart_wait_s: float = Field(300.0, ge=0, json_schema_extra=_SERVER)
    """How long the servers may be gone before the run stops; what is written is kept."""
    api_key: str | None = Field(None, json_schema_extra=_SERVER)
    """Sent to the server as a bearer token."""
    served_model_name: str | None = Field(None, json_schema_extra=_SERVER)
    """Name under which the server knows the verifier, if not its own."""

    @field_validator("output")
    @classmethod
    def _is_jsonl(cls, output: Path) -> Path:
        if output.suffix != ".jsonl":
            raise ValueError("expected a file name ending in .jsonl")
        return output

    @model_validator(mode="after")
    def _has_server(self) -> RegenerateConfig:
        if self.chat and not self.endpoint:
            raise ValueError("--chat asks a server: give its address with --endpoint")
        return self
