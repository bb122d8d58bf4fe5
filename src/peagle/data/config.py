"""Settings of `peagle prepare` and `peagle inspect`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from peagle.config import StageConfig


class PrepareConfig(StageConfig):
    """Turn conversations into token rows for training, as the verifier's server would tokenize them.

    Every row that is read is kept, or listed in rejected.jsonl with its line and reason. Look at the result with
    `peagle inspect`. Prompts without replies go through `peagle regenerate` first.
    """

    model: str
    """The verifier: a folder or hub id. Its tokenizer, chat template and vocabulary size are used, not its weights."""
    data: tuple[str, ...] = Field(min_length=1)
    """What to read, repeatable: a .json, .jsonl or .parquet file, a folder of them, or a hub name (sharegpt, ultrachat,
    gsm8k, humaneval, mt-bench, spec-bench, speculator-benchmarks, org/set:split). `NAME=...` names the rows' source."""
    output: Path = Path("./output")
    """Folder for the prepared rows."""
    seq_length: int = Field(8192, ge=2)
    """Longest row in tokens; longer ones are cut."""
    max_samples: int | None = Field(None, ge=1)
    """Read at most so many conversations, one from each data set in turn."""
    mode: Literal["chat", "text"] = "chat"
    """`chat` renders conversations with the chat template; `text` reads a column `text` that is rendered already."""
    minimum_valid_tokens: int = Field(1, ge=1)
    """Drop rows with fewer supervised tokens than this."""
    chat_template: Path | None = None
    """A Jinja file to use instead of the model's own template; serve with the same one."""
    chat_template_kwargs: str | None = None
    """JSON object of further template variables, such as '{"enable_thinking": false}'; serve with the same ones."""
    assistant_pattern: str | None = None
    """Text mode: a regular expression whose first group is what to supervise, in place of the template's markers."""
    num_preprocessing_workers: int | None = Field(None, ge=1, json_schema_extra={"aliases": ["--num-workers"]})
    """Processes; the result does not depend on it [default: the CPUs that this process may use, at most 16]."""
    trust_remote_code: bool = False
    """Let the model's own tokenizer and configuration code run."""
    overwrite: bool = False
    """Replace prepared rows that are in the folder already and were made otherwise."""


class InspectConfig(StageConfig):
    """Show prepared rows with the supervised tokens highlighted, and what was dropped."""

    folder: Path = Field(json_schema_extra={"positional": True})
    """What `peagle prepare` wrote."""
    rows: int = Field(3, ge=1)
    """How many rows to show."""
    start: int = Field(0, ge=0)
    """The first row to show."""
    row_id: str | None = None
    """Show the row with this id instead."""
    source: str | None = None
    """Only rows of this data set."""
    ids: bool = False
    """Show token ids too."""
    model: str | None = None
    """Tokenizer to decode with, if the model that the rows were prepared for has moved."""
    trust_remote_code: bool = False
    """Let the model's own tokenizer code run."""
