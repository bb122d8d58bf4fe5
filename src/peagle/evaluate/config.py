"""Settings of `peagle evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from peagle.config import SERVER, Sampling, ServerSettings


class EvaluateConfig(ServerSettings, Sampling):
    """Measure a drafter: acceptance by position, speed beside plain decoding, and that answers are unchanged.

    Counts as vLLM does. With `--endpoint` the counters of a running vLLM are read instead of decoding here.
    """

    checkpoint: str = Field(json_schema_extra={"positional": True})
    """The drafter: a checkpoint folder or a hub id."""
    mode: Literal["both", "decode", "replay"] = "both"
    """decode runs the engine; replay decodes nothing: one drafter pass over recorded answers gives the counts of greedy
    decoding, or of sampled answers the expected ones; both decodes, replays what was decoded, and says whether the two
    count alike."""
    data: tuple[str, ...] = ()
    """Prompts, repeatable: whatever `prepare --data` takes; of a conversation, its first user turn."""
    data_path: Path | None = None
    """Prepared rows (`peagle prepare`) instead: each reply is an answer on record, what stands before it its prompt."""
    hidden_states_path: Path | None = None
    """Stored states of these rows (`peagle extract`), for replay. Unset: the verifier computes them."""
    output: Path = Path("evaluation")
    """Folder for evaluation.json and evaluation.md, or the name of the .json file."""
    verifier_name_or_path: str | None = Field(None, json_schema_extra={"aliases": ["--model"]})
    """The verifier. Unset: the one that the checkpoint names."""
    verifier_tensors: tuple[str, ...] = ()
    """Names of the verifier's tensors where they are unusual: embedding=NAME, norm=NAME, head=NAME."""
    num_speculative_tokens: int | None = Field(None, ge=1)
    """Tokens drafted per verifier pass. Unset: as many as the checkpoint says."""
    max_samples: int | None = Field(None, ge=1, json_schema_extra={"aliases": ["--limit"]})
    """Read at most so many prompts or rows, one from each data set in turn."""
    max_new_tokens: int | None = Field(None, ge=1, json_schema_extra={"aliases": ["--max-tokens"]})
    """Longest answer. Unset: 512, and for an answer on record its own length."""
    batch_size: int = Field(1, ge=1)
    """Prompts decoded side by side, with and without the drafter."""
    compare_samples: int = Field(40, ge=0)
    """So many prompts are decoded plainly beside the drafter, by Transformers' `generate` and by our engine without
    one: for the speed, and the proof that the answers are the same. 0: none."""
    check_samples: int = Field(100, ge=0)
    """So many answers in all are compared with the verifier's own, token by token; those beyond --compare-samples with
    what Transformers' `generate` writes in larger batches, untimed."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype in which verifier and drafter compute; auto: the verifier's own."""
    device: str = "auto"
    """Where they run: cpu, cuda, cuda:1; auto: the first GPU, else the CPU."""
    chat_template: Path | None = None
    """A Jinja file to use instead of the verifier's own template."""
    trust_remote_code: bool = False
    """Let the verifier's own code run."""
    endpoint: tuple[str, ...] = Field((), json_schema_extra=SERVER)
    """Address of a vLLM server that runs the drafter, such as http://localhost:8000/v1: its own counters are read. May
    be repeated."""
    plain_endpoint: str | None = Field(None, json_schema_extra=SERVER)
    """Address of a server of the same verifier without a drafter, measured beside it at each of --concurrencies."""
    concurrencies: tuple[int, ...] = Field((), json_schema_extra=SERVER)
    """Measure tokens/s, time to the first token and time between tokens at these numbers of requests under way."""

    @model_validator(mode="after")
    def _has_one_source(self) -> EvaluateConfig:
        if bool(self.data) == (self.data_path is not None):
            raise ValueError("give either --data (prompts) or --data-path (prepared rows)")
        if self.hidden_states_path is not None and self.data_path is None:
            raise ValueError("--hidden-states-path belongs to prepared rows: give their --data-path too")
        if (self.concurrencies or self.plain_endpoint) and not self.endpoint:
            raise ValueError("--concurrencies and --plain-endpoint are about a served drafter: give its --endpoint")
        if self.plain_endpoint and not self.concurrencies:
            raise ValueError("--plain-endpoint is measured at --concurrencies; name some, such as 1 4 16")
        if any(number < 1 for number in self.concurrencies):
            raise ValueError("--concurrencies must be at least 1 each")
        if self.endpoint and self.mode == "replay":
            raise ValueError("--mode replay needs no server; omit --endpoint")
        return self

    @property
    def json_path(self) -> Path:
        """Where evaluation.json goes."""
        return self.output if self.output.suffix == ".json" else self.output / "evaluation.json"
