"""Settings of `peagle regenerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from peagle.config import SERVER, Sampling, ServerSettings


class RegenerateConfig(ServerSettings, Sampling):
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
    chat: bool = Field(False, json_schema_extra=SERVER)
    """Send chats (/v1/chat/completions), which the server renders with its own template, rather than token ids; the ids
    that it rendered are what is kept."""

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
