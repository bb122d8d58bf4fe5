"""The drafter's shape, and the `config.json` that vLLM reads (Speculators' format)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from peagle._version import __version__
from peagle.config import StageConfig
from peagle.errors import CheckpointError, ConfigError
from peagle.verifier.model_config import VerifierConfig

ARCHITECTURES = {"peagle": "PEagleDraftModel", "eagle3": "Eagle3DraftModel"}
LAYER_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Rotary tables that depend on positions alone. `dynamic` and `longrope` change with the length of the request, which a
# trainer that packs documents cannot imitate.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
NUM_AUX_LAYERS_OF_VLLM = 3
# Fields under one name in a verifier's config, in ours, and in `transformer_layer_config`.
_SHARED = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
    *("max_position_embeddings", "vocab_size"),
)
MAX_LAYERS = 256
"""More than any drafter has: a damaged config.json is refused before a network of its size is made."""


class DrafterConfig(StageConfig):
    """Everything that decides a drafter's tensors and how it is served."""

    speculators_model_type: Literal["peagle", "eagle3"]
    """Drafting in one pass with mask slots, or token by token."""
    layer_type: Literal["llama", "qwen3"]
    """Kind of decoder layer; qwen3 norms queries and keys."""
    hidden_size: int = Field(ge=1)
    """Equal to the verifier's."""
    intermediate_size: int = Field(ge=1)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    """Width of a head; not derived from hidden_size."""
    rms_norm_eps: float = Field(gt=0)
    rope_parameters: dict[str, Any]
    """`rope_type`, `rope_theta` and what the type needs, in Transformers' layout."""
    max_position_embeddings: int = Field(ge=1)
    """Longest context the rotary table is made for."""
    attention_bias: bool
    vocab_size: int = Field(ge=1)
    """Rows of the embedding: the verifier's vocabulary, padding rows included."""
    draft_vocab_size: int = Field(ge=1)
    """Rows of the head; smaller than `vocab_size` with a pruned vocabulary."""
    norm_before_residual: bool
    """Whether the first layer's residual is the normed state."""
    norm_before_fc: bool
    """One RMS norm over the concatenated verifier states before `fc`."""
    norm_output: bool = False
    """EAGLE-3 only: feed back the state after the final norm ("EAGLE-3.1"), not the one before it."""
    aux_layer_ids: tuple[int, ...] = Field(min_length=1)
    """Verifier layers whose inputs the drafter reads, ascending."""
    mask_token_id: int | None
    """Token of the mask slots; None for EAGLE-3."""
    num_speculative_tokens: int = Field(ge=1)
    """Tokens drafted per verifier pass when served."""
    verifier: str
    """Name or path of the verifier."""
    verifier_architectures: tuple[str, ...]
    """The verifier's class, as its own config says."""

    @model_validator(mode="after")
    def _fits(self) -> DrafterConfig:
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
        theta = self.rope_parameters.get("rope_theta")
        if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not theta > 0:
            raise ValueError(f"rope_theta is {theta!r}, expected a number above 0")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions turn pairs")
        if self.layer_type == "llama" and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden size {self.hidden_size} is no multiple of {self.num_attention_heads} heads, as Transformers "
                "and vLLM demand of llama layers"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} heads over {self.num_key_value_heads} key/value heads")
        if list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            raise ValueError(f"layer ids must be distinct and ascending, found {list(self.aux_layer_ids)}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft vocabulary {self.draft_vocab_size} exceeds the verifier's {self.vocab_size}")
        if self.speculators_model_type == "peagle":
            if self.mask_token_id is None:
                raise ValueError("a P-EAGLE drafter needs a mask token id")
            if not 0 <= self.mask_token_id < self.vocab_size:
                raise ValueError(f"mask token id {self.mask_token_id} has no row among {self.vocab_size}")
            if self.norm_output:
                raise ValueError("norm_output is for EAGLE-3: a P-EAGLE drafter feeds nothing back")
        return self

    @property
    def is_pruned(self) -> bool:
        """Whether the draft vocabulary is a part of the verifier's."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def aux_size(self) -> int:
        """Width of the concatenated verifier states: num_aux_layers * hidden_size."""
        return len(self.aux_layer_ids) * self.hidden_size

    def layer_config(self) -> dict[str, Any]:
        """`transformer_layer_config`: a plain llama or qwen3 config, which vLLM takes for the drafter's own."""
        layers: dict[str, Any] = {
            "architectures": [LAYER_ARCHITECTURES[self.layer_type]],
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": False,
            "model_type": self.layer_type,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": dict(self.rope_parameters),
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
        }
        if len(self.aux_layer_ids) != NUM_AUX_LAYERS_OF_VLLM:
            layers["num_aux_hidden_states"] = len(self.aux_layer_ids)
        return layers

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The checkpoint's `config.json`; `dtype` is that of the saved tensors, such as "bfloat16"."""
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.speculators_model_type]],
            "draft_vocab_size": self.draft_vocab_size,
            "dtype": dtype,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "embed_requires_grad": self.speculators_model_type == "peagle",
            "has_no_defaults_at_init": False,
            "norm_before_fc": self.norm_before_fc,
            "norm_before_residual": self.norm_before_residual,
            "speculators_config": {
                "algorithm": self.speculators_model_type,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "accept_tolerance": 0.0,
                        "proposal_type": "greedy",
                        "speculative_tokens": self.num_speculative_tokens,
                        "verifier_accept_k": 1,
                    }
                ],
                "verifier": {"architectures": list(self.verifier_architectures), "name_or_path": self.verifier},
            },
            "speculators_model_type": self.speculators_model_type,
            "speculators_version": "0.9.0",
            "target_hidden_size": self.hidden_size,
            "tie_word_embeddings": False,
            "transformer_layer_config": self.layer_config(),
            "peagle_version": __version__,
        }
        if self.mask_token_id is not None:
            config["mask_token_id"] = self.mask_token_id
        if self.norm_output:
            config["norm_output"] = True
        return config

    @classmethod
    def from_json(cls, config: dict[str, Any], where: str) -> DrafterConfig:
        """Read a checkpoint's `config.json`.

        Args:
            config: the parsed file.
            where: the file's name, for messages.

        Raises:
            CheckpointError: a field is missing, or asks for what this network does not do.
        """
        try:
            kind = config["speculators_model_type"]
            layers = config["transformer_layer_config"]
            methods = config["speculators_config"]["proposal_methods"]
            verifier = config["speculators_config"]["verifier"]
            values = {
                "speculators_model_type": kind,
                **{name: layers[name] for name in _SHARED},
                "layer_type": layers["model_type"],
                "intermediate_size": layers["intermediate_size"],
                "num_layers": layers["num_hidden_layers"],
                "head_dim": layers.get("head_dim") or layers["hidden_size"] // layers["num_attention_heads"],
                "rope_parameters": rope_of(layers),
                "attention_bias": bool(layers.get("attention_bias")),
                "draft_vocab_size": config["draft_vocab_size"],
                # vLLM's defaults differ by kind; a file without the field means what vLLM would take it to mean.
                "norm_before_residual": config.get("norm_before_residual", kind == "eagle3"),
                "norm_before_fc": config.get("norm_before_fc", False),
                "norm_output": kind == "eagle3" and config.get("norm_output", False),
                "aux_layer_ids": tuple(config["eagle_aux_hidden_state_layer_ids"]),
                "mask_token_id": config["mask_token_id"] if kind == "peagle" else None,
                "num_speculative_tokens": methods[0]["speculative_tokens"],
                "verifier": verifier["name_or_path"],
                "verifier_architectures": tuple(verifier.get("architectures") or ()),
            }
        except KeyError as error:
            raise CheckpointError(f"{where}: field {error} is missing; is this a Speculators checkpoint?") from None
        except (IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"{where}: a field is empty or of another kind than Speculators writes ({error}); is it damaged?"
            ) from None
        for field in ("fc_norm",) if kind == "eagle3" else ("fc_norm", "norm_output"):
            if config.get(field):
                why = "has no place in this network" if kind == "eagle3" else "vLLM ignores for this drafter"
                raise CheckpointError(f"{where}: `{field}` is set, which {why}; not supported")
        if layers.get("hidden_act", "silu") != "silu" or layers.get("mlp_bias"):
            raise CheckpointError(f"{where}: drafter layers need hidden_act silu and no mlp_bias, as vLLM's have")
        try:
            return cls.build(values)
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}") from None


def rope_of(layers: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in today's layout, from either layout."""
    if layers.get("rope_parameters"):
        rope = dict(layers["rope_parameters"])
    else:
        rope = {"rope_theta": layers.get("rope_theta", 10000.0), **(layers.get("rope_scaling") or {})}
        if "type" in rope:
            rope.setdefault("rope_type", rope.pop("type"))
    rope["rope_type"] = rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", layers.get("rope_theta", 10000.0))
    return rope


def config_for(
    verifier: VerifierConfig,
    *,
    speculators_model_type: str,
    layer_type: str | None,
    num_layers: int,
    intermediate_size: int | None,
    num_speculative_tokens: int,
    aux_layer_ids: tuple[int, ...],
    draft_vocab_size: int | None,
    mask_token_id: int | None,
    norm_before_residual: bool,
    norm_before_fc: bool,
    norm_output: bool,
) -> DrafterConfig:
    """The drafter that fits a verifier: its width, heads, rotary base and vocabulary; None takes the verifier's own.

    Raises:
        ConfigError: the verifier's shape has no drafter (an unknown rotary type, for example).
    """
    return DrafterConfig.build(
        {
            "speculators_model_type": speculators_model_type,
            "layer_type": layer_type or ("qwen3" if verifier.model_type.startswith("qwen3") else "llama"),
            **{name: getattr(verifier, name) for name in _SHARED},
            "intermediate_size": intermediate_size or verifier.intermediate_size,
            "num_layers": num_layers,
            "head_dim": verifier.head_dim,
            "rope_parameters": verifier.rope_parameters,
            "attention_bias": False,
            "draft_vocab_size": draft_vocab_size or verifier.vocab_size,
            "norm_before_residual": norm_before_residual,
            "norm_before_fc": norm_before_fc,
            "norm_output": norm_output,
            "aux_layer_ids": aux_layer_ids,
            "mask_token_id": mask_token_id,
            "num_speculative_tokens": num_speculative_tokens,
            "verifier": verifier.name_or_path,
            "verifier_architectures": tuple(verifier.architectures),
        }
    )
