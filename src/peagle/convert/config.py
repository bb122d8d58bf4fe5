"""Settings of `peagle convert`."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from peagle.config import StageConfig

_IN: Any = {"panel": "What the source does not say"}


class ConvertConfig(StageConfig):
    """Convert a drafter checkpoint of SafeAILab/EAGLE, SpecForge, NVIDIA, AWS or Speculators to ours, or back.

    The source's layout is recognized. There and back gives the same tensors and the same config; what a layout has no
    place for is named, and nothing is written.
    """

    source: str = Field(json_schema_extra={"positional": True})
    """The checkpoint: a folder or a hub id, in any of the layouts."""
    output: Path
    """Folder to write; it must not exist."""
    to: Literal["peagle", "speculators", "safeailab", "specforge", "aws", "nvidia"] = "peagle"
    """Layout to write. peagle is Speculators' format, which `vllm serve` loads and everything here reads."""
    verifier_name_or_path: str | None = Field(None, json_schema_extra=_IN)
    """The verifier that the drafter was trained for. Needed for layouts that do not name it."""
    target_layer_ids: tuple[int, ...] | None = Field(None, json_schema_extra=_IN)
    """Verifier layers whose inputs the drafter reads (0 is the embedding output, j the stream after j layers). Unset:
    as the source says, else 2, L // 2, L - 3."""
    layer_id_meaning: Literal["auto", "inputs", "outputs"] = Field("auto", json_schema_extra=_IN)
    """What layer ids in the source mean: inputs of layers, as in vLLM, or outputs, which are one less. auto: outputs if
    the first id is 1, as SGLang decides."""
    d2t_meaning: Literal["auto", "offsets", "absolute"] = Field("auto", json_schema_extra=_IN)
    """What the source's d2t holds: offsets (verifier id = draft id + d2t) or verifier ids. auto: what t2d agrees with,
    offsets if both do."""
    mask_token_id: int | None = Field(None, ge=0, json_schema_extra=_IN)
    """Token of the mask slots, for P-EAGLE sources that do not name it."""
    num_speculative_tokens: int | None = Field(None, ge=1, json_schema_extra=_IN)
    """Tokens to draft per pass. Unset: as the source says, else 3 for EAGLE-3 and 5 for P-EAGLE."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the written tensors; auto: the source's. A source of mixed types needs one named."""
    drop_unused: bool = False
    """Drop tensors that no engine reads (rotary tables, norms of the verifier, norms of later layers)."""
    trust_remote_code: bool = False
    """Let the verifier's own code run."""
