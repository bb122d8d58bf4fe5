"""What `peagle` has to know about a verifier, read from its configuration alone: no weight is touched.

Families differ in small things that give wrong results silently: whether the final norm multiplies by w or 1 + w,
whether embeddings or logits are scaled, where the rope base is written. Each is said here once, as a plain number.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import VerifierError, one_line

_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma")
_QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
# Families whose RMS norm multiplies by (1 + w). Gemma 3n and 4 are not among them.
_NORM_ADDS_ONE = (*_GEMMA, *_QWEN)
# Families that multiply embeddings by sqrt(hidden_size) without a field that says so.
_SCALES_EMBEDDING = (*_GEMMA, "gemma3n_text", "gemma4", "gemma4_text")
# How families scale logits: these fields multiply them; the next ones divide, but in the families named after them.
_LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_LOGIT_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_LOGITS_SCALING_MULTIPLIES = ("hyperclovax",)
# Names under which RMS-norm families write their epsilon; a config with only `layer_norm_eps` has another norm.
_RMS_EPS_NAMES = ("rms_norm_eps", "norm_eps", "norm_epsilon")
_RMS_WITH_LAYER_NORM_NAME = ("mamba", "mamba2", "falcon_mamba", "nemotron_h")
_ROPE_KEYS_OF_OTHERS = ("mrope_section", "mrope_interleaved", "partial_rotary_factor", "type")
_UNKNOWN_LENGTH = 1 << 20


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """The verifier as numbers. Of a multimodal wrapper, its text model."""

    name_or_path: str
    architectures: tuple[str, ...]
    """The wrapper's own class names, as a serving engine looks them up."""
    model_type: str
    """Of the text model: "qwen3", "gemma3_text"."""
    hidden_size: int
    intermediate_size: int
    """Of a mixture of experts, what one token passes through: (experts per token + shared ones) * an expert's width. A
    dense width beside it may be a class's default that no layer uses."""
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Explicit: not always hidden_size / num_attention_heads."""
    vocab_size: int
    """Rows of the embedding and of the head, which may exceed the tokenizer's length."""
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """For a plain text drafter, in Transformers' new layout: `rope_type`, `rope_theta` and the type's own keys. Of a
    model with several ropes the global one; M-RoPE sections and partial rotation, which a drafter does not share, are
    left out."""
    max_position_embeddings: int
    dtype: str
    """"bfloat16", "float16" or "float32": the dtype it computes in."""
    tied: bool
    """The head is the embedding."""
    norm_adds_one: bool
    """The final norm multiplies by 1 + w."""
    embedding_scale: float
    logit_scale: float
    """Logits = scale * (head @ normed), then the soft-cap."""
    logit_softcap: float | None
    """Logits = cap * tanh(logits / cap)."""
    eos_token_ids: tuple[int, ...]
    """From generation_config.json, else all of config.json (a wrapper's before its text part's).
    `special_tokens.eos_ids` adds the tokenizer's own."""
    hidden_act: str
    attention_bias: bool
    has_text_config: bool
    """A multimodal wrapper, of which only the text model is used."""
    quantization: str | None
    """Method of the `quantization_config` ("fp8", "awq" ...), or None. Never copied into a drafter."""
    trust_remote_code: bool
    tensor_names: dict[str, str]
    """Overrides of tensor names by role ("embedding", "norm", "head"); empty: known names are tried."""


def load_verifier_config(
    name_or_path: str, trust_remote_code: bool, tensor_names: Sequence[str] = ()
) -> VerifierConfig:
    """Read a model folder's or hub id's configuration, every number resolved (Transformers' class defaults included).

    `tensor_names` are "role=name" each (`--verifier-tensors`), for a family whose names `weights.py` does not know.

    Raises:
        VerifierError: there is no such model, no configuration, an unknown model type or role, or a field without which
            nothing works is missing; one line each.
    """
    names = {}
    for given in tensor_names:
        role, _, name = given.partition("=")
        if role not in ("embedding", "norm", "head") or not name:
            raise VerifierError(f"--verifier-tensors {given}: expected ROLE=NAME, and roles are embedding, norm, head")
        names[role] = name
    config = _load_config(name_or_path, trust_remote_code)
    try:
        return _of_config(config, name_or_path, trust_remote_code, names)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise VerifierError(
            f"{name_or_path}: its configuration holds a value that cannot be used ({one_line(error)})"
        ) from None


def _of_config(config: Any, name_or_path: str, trust_remote_code: bool, tensor_names: dict[str, str]) -> VerifierConfig:
    text = config.get_text_config()
    read = _Reader(text, name_or_path)
    model_type = str(text.model_type)
    hidden_size = read.whole("hidden_size")
    num_heads = read.whole("num_attention_heads")
    head_dim = read.maybe("head_dim") or hidden_size // num_heads
    intermediate = (
        _experts_width(read) or read.maybe("intermediate_size") or read.maybe("ffn_hidden_size") or 4 * hidden_size
    )
    tied = read.maybe("tie_word_embeddings") if config is text else getattr(config, "tie_word_embeddings", None)
    softcap = read.maybe("final_logit_softcapping")
    multiplies = model_type in _LOGITS_SCALING_MULTIPLIES
    divisor = float(1.0 if multiplies else read.first(*_LOGIT_DIVISORS, default=1.0))
    factors = (*_LOGIT_FACTORS, *(_LOGIT_DIVISORS if multiplies else ()))
    return VerifierConfig(
        name_or_path=str(name_or_path),
        architectures=tuple(config.architectures or ()),
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=int(max(intermediate) if isinstance(intermediate, (list, tuple)) else intermediate),
        num_layers=read.whole("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=int(read.maybe("num_key_value_heads") or num_heads),
        head_dim=int(head_dim),
        vocab_size=read.whole("vocab_size"),
        rms_norm_eps=_norm_eps(read, model_type),
        rope_parameters=drafter_rope(_rope_as_given(text)),
        max_position_embeddings=int(
            read.maybe("max_position_embeddings") or read.maybe("n_positions") or _UNKNOWN_LENGTH
        ),
        dtype=_dtype_name(config, text, name_or_path),
        tied=bool(tied),
        norm_adds_one=model_type in _NORM_ADDS_ONE,
        embedding_scale=float(
            hidden_size**0.5
            if model_type in _SCALES_EMBEDDING
            else read.first("embedding_multiplier", "scale_emb", default=1.0)
        ),
        logit_scale=float(read.first(*factors, default=1.0 / divisor)),
        logit_softcap=None if softcap is None else float(softcap),
        eos_token_ids=_eos_token_ids(config, text, name_or_path),
        hidden_act=str(read.maybe("hidden_act") or read.maybe("hidden_activation") or "silu"),
        attention_bias=bool(read.maybe("attention_bias")),
        has_text_config=config is not text,
        quantization=_quantization(config, text),
        trust_remote_code=trust_remote_code,
        tensor_names=tensor_names,
    )


def drafter_rope(given: dict[str, Any]) -> dict[str, Any]:
    """The rope settings a plain text drafter takes from its verifier's, whichever way those were written.

    Args:
        given: the new layout ({"rope_type", "rope_theta", ...}), the new layout split by attention type
            ({"full_attention": {...}, "sliding_attention": {...}}), or the old one ({"rope_theta", "rope_scaling"}).

    Returns:
        {"rope_type", "rope_theta", ...}: of a split one the full-attention part; without M-RoPE sections (plain text
        positions make the three sections equal), and without partial rotation ("proportional" becomes "default").

    Example:
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}} gives
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}.
    """
    rope: dict[str, Any] = dict(given)
    scaling = rope.pop("rope_scaling", None) or {}
    rope |= {key: value for key, value in scaling.items() if value is not None}
    parts = {key: value for key, value in rope.items() if isinstance(value, dict)}
    if parts:  # one rope per layer type: the global one, or, under other names, the one with the largest base
        whole = {key: value for key, value in rope.items() if key not in parts}
        named = parts.get("full_attention") or max(parts.values(), key=lambda part: float(part.get("rope_theta") or 0))
        rope = whole | named
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type in ("mrope", "proportional"):
        rope_type = "default"
    own = {key: value for key, value in rope.items() if key not in (*_ROPE_KEYS_OF_OTHERS, "rope_type")}
    return {"rope_type": str(rope_type), **own, "rope_theta": float(own.get("rope_theta") or 10000.0)}


def resolve_aux_layer_ids(num_layers: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Which of the verifier's L layers a drafter reads: those given, in any order, or the default 2, L // 2, L - 3.

    Returns:
        Distinct ids in 0 .. L, ascending, as vLLM hands out the states.

    Raises:
        VerifierError: an id is out of range or given twice, or the default collides in a shallow verifier.

    Example:
        36 layers give (2, 18, 33); 8 give (2, 4, 5); 6 would give 2, 3, 3 and are refused.
    """
    if given:
        ids = [int(i) for i in given]
        outside = [i for i in ids if not 0 <= i <= num_layers]
        if outside:
            raise VerifierError(
                f"layer id {outside[0]} does not exist: the verifier has {num_layers} layers, so ids are 0 (embedding "
                f"output) to {num_layers} (after the last layer). Set --target-layer-ids."
            )
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise VerifierError(f"layer id {twice[0]} is given twice in {ids}: --target-layer-ids must be distinct")
        return tuple(sorted(ids))
    default = (2, num_layers // 2, num_layers - 3)
    if not (default[0] < default[1] < default[2]):
        raise VerifierError(
            f"the default layer ids (2, L // 2, L - 3) collide for a verifier of {num_layers} layers: {default}. "
            f"Choose three distinct ids from 0 to {num_layers} with --target-layer-ids."
        )
    return default


class _Reader:
    """Reads fields of a config that may be absent, null, or different per layer."""

    def __init__(self, config: Any, name: str) -> None:
        self.config, self.name = config, name

    def maybe(self, field: str) -> Any:
        try:
            return getattr(self.config, field, None)
        except RuntimeError:  # Transformers >= 5.1x: the field differs by layer and has no single value
            per_layer = self.config.per_layer_config
            types = getattr(self.config, "layer_types", None) or []
            last = self.config.num_hidden_layers - 1
            full = [i for i, name in enumerate(types) if name == "full_attention"] or [last]
            return getattr(per_layer[full[-1]], field, None)

    def first(self, *fields: str, default: Any) -> Any:
        """The first of the fields that is set."""
        return next((value for field in fields if (value := self.maybe(field)) is not None), default)

    def whole(self, field: str) -> int:
        value = self.maybe(field)
        if not isinstance(value, int) or value < 1:
            raise VerifierError(
                f"{self.name}: its configuration ({self.config.model_type}) has no usable `{field}` (found {value!r}); "
                "peagle needs a decoder-only language model"
            )
        return value


def _load_config(name_or_path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    path = Path(name_or_path)
    if path.exists() and not path.is_dir():
        raise VerifierError(f"{name_or_path}: expected a model folder or a hub id, found a file")
    if path.is_dir() and not (path / "config.json").exists():
        raise VerifierError(f"{name_or_path}: no config.json in this folder; is it a model?")
    is_path = name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1 or name_or_path.endswith("/")
    if is_path and not path.is_dir():  # else a hub id: `owner/name` or `name`
        raise VerifierError(f"{name_or_path}: no such folder")
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # Transformers' checks of fields raise classes of their own
        raise VerifierError(f"{name_or_path}: its configuration cannot be read: {one_line(error)}") from None


def _experts_width(read: _Reader) -> int:
    """The width of one token's experts; 0 of a dense model, or where an expert's width is the `intermediate_size`."""
    per_token = read.first("num_experts_per_tok", "num_experts_per_token", "moe_topk", default=0)
    shared = read.maybe("n_shared_experts") or read.maybe("num_shared_experts") or 0
    width = read.maybe("moe_intermediate_size")
    if not isinstance(width, int) or not isinstance(per_token, int) or not isinstance(shared, int):
        return 0
    return width * (per_token + shared) + int(read.maybe("shared_expert_intermediate_size") or 0)


def _norm_eps(read: _Reader, model_type: str) -> float:
    value = read.first(*_RMS_EPS_NAMES, default=None)
    if value is not None:
        return float(value)
    if model_type in _RMS_WITH_LAYER_NORM_NAME:
        return float(read.maybe("layer_norm_epsilon") or 1e-5)
    raise VerifierError(
        f"{read.name}: a {model_type} model has no RMS norm (its configuration lacks `rms_norm_eps`); drafters are "
        "llama or qwen3 layers behind an RMS norm, so this family is not supported"
    )


def _rope_as_given(text: Any) -> dict[str, Any]:
    rope = getattr(text, "rope_parameters", None)
    given: dict[str, Any] = dict(rope) if rope else {}
    for key in ("rope_theta", "rope_scaling"):
        value = getattr(text, key, None)
        if value is not None and key not in given and not any(isinstance(part, dict) for part in given.values()):
            given[key] = value
    return given


def _dtype_name(config: Any, text: Any, name_or_path: str) -> str:
    """As the configuration says, or else of the first float tensor in local safetensors files."""
    from safetensors import safe_open

    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    for holder in (text, config):
        named = str(getattr(holder, "dtype", None)).removeprefix("torch.")
        if named in names.values():
            return named
    for file in sorted(Path(name_or_path).glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for key in handle.keys():  # noqa: SIM118 (safe_open is no dictionary)
                name = names.get(handle.get_slice(key).get_dtype())
                if name:
                    return name
    return "float32"


def _eos_token_ids(config: Any, text: Any, name_or_path: str) -> tuple[int, ...]:
    from transformers import GenerationConfig

    def listed(ids: Any) -> list[int]:
        return [] if ids is None else [int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids])]

    own = None
    with contextlib.suppress(OSError, ValueError):  # no generation_config.json: common, and not needed
        own = GenerationConfig.from_pretrained(name_or_path).eos_token_id
    if own is not None:
        return tuple(listed(own))
    # The wrapper's list first: its text part often has the class's default, or one of several.
    return tuple(dict.fromkeys(i for holder in (config, text) for i in listed(getattr(holder, "eos_token_id", None))))


def _quantization(config: Any, text: Any) -> str | None:
    block = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if not block:
        return None
    return str((block if isinstance(block, dict) else block.to_dict()).get("quant_method") or "unnamed")
