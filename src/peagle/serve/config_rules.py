"""What vLLM reads in `config.json`, field by field, and what it makes of a missing or odd one.

An independent witness: `drafter/model_config.py` reads the same fields, and what our reader and our writer both get
wrong must be caught here.

Source: vLLM 0.32, transformers_utils/configs/speculators (how the file becomes the drafter's Transformers config and
the speculative config) and model_executor/models/{llama,qwen3}_eagle3.py (what the drafter takes from it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peagle.drafter.model_config import MAX_LAYERS
from peagle.serve.files import CONFIG, Findings

ARCHITECTURES = {"peagle": "PEagleDraftModel", "eagle3": "Eagle3DraftModel"}
_LAYERS = "transformer_layer_config"
_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_DEFAULT_NUM_AUX = 3


@dataclass(frozen=True, kw_only=True)
class ServedShape:
    """The drafter that vLLM would build from a `config.json`."""

    kind: str
    """"peagle" or "eagle3"."""
    layer_type: str
    """"llama" or "qwen3"."""
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    """Verifier layers that vLLM would give `fc` its width for."""
    aux_layer_ids: tuple[int, ...]
    max_position_embeddings: int
    num_speculative_tokens: int
    mask_token_id: int | None
    norm_before_fc: bool
    fc_norm: bool
    attention_bias: bool
    verifier: str
    verifier_architectures: tuple[str, ...]
    dtype: str | None
    """As torch names it: "bfloat16"."""


def check_config(config: dict[str, Any], findings: Findings) -> ServedShape | None:
    """Check every field that vLLM reads.

    Returns:
        The drafter that it would build, or None where a missing field leaves that open.
    """
    return _ConfigCheck(config, findings).run()


class _ConfigCheck:
    """The checks of one `config.json`; what several of them read stands in `layers` and `kind`."""

    def __init__(self, config: dict[str, Any], findings: Findings) -> None:
        self.config, self.findings = config, findings
        self.layers: dict[str, Any] = {}
        self.kind = ""

    def error(self, message: str) -> None:
        self.findings.error(CONFIG, message)

    def warning(self, message: str) -> None:
        self.findings.warning(CONFIG, message)

    def run(self) -> ServedShape | None:
        # 1. The kind of drafter and its layers.
        self.kind = self._kind()
        layers = self.config.get(_LAYERS)
        if isinstance(layers, dict):
            self.layers = layers
        else:
            self.error(f"{_LAYERS} is missing: vLLM builds the drafter from it")
        layer_type = self.layers.get("model_type")
        if layer_type not in ("llama", "qwen3"):
            self.error(
                f"{_LAYERS}.model_type is {layer_type!r}; vLLM serves drafters with layers of type llama or qwen3 only"
            )
            layer_type = ""
        # 2. Its sizes.
        numbers = {name: self._number(self.layers, name, f"{_LAYERS}.{name}") for name in _NUMBERS}
        if numbers["num_hidden_layers"] > MAX_LAYERS:
            self.error(f"{_LAYERS}.num_hidden_layers is {numbers['num_hidden_layers']}, over {MAX_LAYERS}")
            numbers["num_hidden_layers"] = 0
        self._heads_and_rope(numbers)
        self._windows(numbers["num_hidden_layers"])
        vocab_size = numbers["vocab_size"]
        draft_vocab_size = self._number(self.config, "draft_vocab_size", "draft_vocab_size")
        target_hidden_size = self._number(self.config, "target_hidden_size", "target_hidden_size")
        if draft_vocab_size and vocab_size and draft_vocab_size > vocab_size:
            self.error(f"draft_vocab_size {draft_vocab_size} exceeds vocab_size {vocab_size}")
        # 3. What it drafts for, and how.
        num_speculative_tokens = self._proposal()
        verifier, architectures = self._verifier()
        layer_ids = self._layer_ids()
        num_aux = self._num_aux(layer_type, layer_ids)
        mask_token_id = self._mask_token(vocab_size)
        self._flags()
        self._ignored()
        if not (draft_vocab_size and target_hidden_size and self.kind and layer_type and all(numbers.values())):
            return None
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        return ServedShape(
            kind=self.kind,
            layer_type=layer_type,
            hidden_size=numbers["hidden_size"],
            target_hidden_size=target_hidden_size,
            intermediate_size=numbers["intermediate_size"],
            num_layers=numbers["num_hidden_layers"],
            num_heads=numbers["num_attention_heads"],
            num_kv_heads=numbers["num_key_value_heads"],
            head_dim=numbers["head_dim"],
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_aux=num_aux,
            aux_layer_ids=layer_ids,
            max_position_embeddings=numbers["max_position_embeddings"],
            num_speculative_tokens=num_speculative_tokens,
            mask_token_id=mask_token_id,
            norm_before_fc=bool(self.config.get("norm_before_fc")),
            fc_norm=self.kind == "eagle3" and bool(self.config.get("fc_norm")),
            attention_bias=bool(self.layers.get("attention_bias")),
            verifier=verifier,
            verifier_architectures=architectures,
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
        )

    def _kind(self) -> str:
        kind = self.config.get("speculators_model_type")
        if kind not in ARCHITECTURES:
            self.error(
                f"speculators_model_type is {kind!r}; expected peagle or eagle3, which vLLM maps to its methods "
                "(peagle: eagle3 with parallel drafting)"
            )
            return ""
        named = self.config.get("architectures")
        if named != [ARCHITECTURES[kind]]:
            self.error(f"architectures is {named!r}; expected [{ARCHITECTURES[kind]!r}] for {kind}")
        return str(kind)

    def _number(self, holder: dict[str, Any], key: str, name: str) -> int:
        value = holder.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        if value is None:
            self.error(f"{name} is missing; vLLM would take Transformers' default without a word")
        else:
            self.error(f"{name} is {value!r}; expected a whole number of at least 1")
        return 0

    def _heads_and_rope(self, numbers: dict[str, int]) -> None:
        eps = self.layers.get("rms_norm_eps")
        if not isinstance(eps, float) or not 0 < eps < 1:
            self.error(f"{_LAYERS}.rms_norm_eps is {eps!r}; expected a small number, the one trained with")
        heads, kv_heads = numbers["num_attention_heads"], numbers["num_key_value_heads"]
        if heads and kv_heads and heads % kv_heads:
            self.error(f"{heads} attention heads cannot share {kv_heads} key/value heads")
        rope = self.layers.get("rope_parameters")
        if isinstance(rope, dict) and "rope_theta" in rope:
            if "mrope_section" in rope:
                self.error(
                    f"{_LAYERS}.rope_parameters has mrope_section; vLLM's drafters take plain text positions: leave it "
                    "out"
                )
        elif "rope_theta" in self.layers:
            self.warning(f"{_LAYERS} has the old rope_theta and no rope_parameters; vLLM reads both for now")
        else:
            self.error(f"{_LAYERS}.rope_parameters is missing or has no rope_theta: the base would be 10000")
        act = self.layers.get("hidden_act", "silu")
        if act != "silu":
            self.error(f"{_LAYERS}.hidden_act is {act!r}; vLLM's drafter layers have silu only")

    def _windows(self, num_layers: int) -> None:
        types, window = self.layers.get("layer_types"), self.layers.get("sliding_window")
        if types is not None:
            if not isinstance(types, list) or len(types) < num_layers:
                self.error(f"{_LAYERS}.layer_types must name {num_layers} layers")
                return
            mixed = sorted(set(types[:num_layers]))
            if len(mixed) > 1:
                self.error(f"{_LAYERS}.layer_types mixes {mixed}; vLLM cannot serve that in a drafter")
                return
        uses = self.layers.get("use_sliding_window", True) if types is None else "sliding_attention" in types
        if window and uses:
            self.warning(
                f"{_LAYERS}.sliding_window is {window}; some vLLM versions take the verifier's window instead: compare "
                "acceptance on long prompts"
            )

    def _proposal(self) -> int:
        where = "speculators_config.proposal_methods"
        methods = _at(self.config, *where.split("."))
        if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
            self.error(f"{where} is missing; vLLM reads its first entry")
            return 0
        if len(methods) > 1:
            self.warning(f"{where} has {len(methods)} entries; vLLM reads the first")
        return self._number(methods[0], "speculative_tokens", f"{where}[0].speculative_tokens")

    def _verifier(self) -> tuple[str, tuple[str, ...]]:
        entry = _at(self.config, "speculators_config", "verifier")
        name = entry.get("name_or_path") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            self.error("speculators_config.verifier.name_or_path is missing: `vllm serve CHECKPOINT` loads it")
            return "", ()
        return name, tuple(str(part) for part in entry.get("architectures") or [])

    def _layer_ids(self) -> tuple[int, ...]:
        key = "eagle_aux_hidden_state_layer_ids"
        ids = self.config.get(key)
        if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
            self.error(f"{key} is missing: vLLM would feed the drafter the layers that it guesses (2, n / 2, n - 3)")
            return ()
        if ids != sorted(set(ids)) or ids[0] < 0:
            self.error(f"{key} is {ids}; vLLM lays states out in ascending order: sort, no doubles")
        return tuple(ids)

    def _num_aux(self, layer_type: str, ids: tuple[int, ...]) -> int:
        """How many layers vLLM would make `fc` for. Llama drafters do not count the list of ids at the top."""
        counted = self.layers.get("num_aux_hidden_states")
        if layer_type == "qwen3" and self.layers.get("num_aux_layers") is not None:
            counted = self.layers["num_aux_layers"]
        if counted is None:
            nested = (self.layers.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
            counted = len(ids) if layer_type == "qwen3" and ids else len(nested) if nested else _DEFAULT_NUM_AUX
            if ids and counted != len(ids):
                self.error(
                    f"{_LAYERS}.num_aux_hidden_states is missing: vLLM builds this drafter's input layer for {counted} "
                    f"verifier layers, it has {len(ids)}"
                )
        elif ids and counted != len(ids):
            self.error(f"{_LAYERS}.num_aux_hidden_states is {counted}, but {len(ids)} layer ids are given")
        return int(counted)

    def _mask_token(self, vocab_size: int) -> int | None:
        if self.kind != "peagle":
            return None
        token = self.config.get("mask_token_id")
        if not isinstance(token, int) or isinstance(token, bool):
            self.error(f"mask_token_id is {token!r}; a P-EAGLE drafter needs the token of its mask slots")
            return None
        if not 0 <= token < (vocab_size or token + 1):
            self.error(f"mask_token_id {token} has no row among {vocab_size} embeddings")
        return token

    def _flags(self) -> None:
        if not isinstance(self.config.get("norm_before_residual"), bool):
            default = str(self.kind == "eagle3").lower()
            self.error(f"norm_before_residual is not written; vLLM takes {default} for {self.kind or 'this kind'}")
        for name in ("norm_before_fc", "fc_norm", "norm_output"):
            if name in self.config and not isinstance(self.config[name], bool):
                self.error(f"{name} is {self.config[name]!r}; expected true or false")

    def _ignored(self) -> None:
        """What vLLM would not read."""
        if self.kind == "peagle":
            for name in ("fc_norm", "norm_output"):
                if self.config.get(name) is True:
                    self.error(
                        f"{name} is set, but vLLM does not read it for peagle: what was trained would have no effect"
                    )
                if self.layers.get(name) is True:
                    self.error(f"{_LAYERS}.{name} is set; our P-EAGLE drafters have no such norm")
        if self.config.get("tie_word_embeddings") or self.layers.get("tie_word_embeddings"):
            self.warning("tie_word_embeddings is true; vLLM reads the head from the checkpoint all the same")
        if self.config.get("quantization_config") or self.layers.get("quantization_config"):
            self.warning("has a quantization_config; peagle neither makes nor checks quantized drafters")
        if not self.config.get("speculators_version"):
            self.warning("speculators_version is missing; Speculators itself will not load this checkpoint")


def _at(holder: Any, *keys: str) -> Any:
    for key in keys:
        holder = holder.get(key) if isinstance(holder, dict) else None
    return holder
