"""What vLLM reads in `config.json`, field by field, and what it makes of a missing or odd one.

An independent witness: `drafter/model_config.py` reads the same fields, and what our reader and our writer both get
wrong must be caught here.

Source: vLLM 0.32, transformers_utils/configs/speculators (how the file becomes the drafter's Transformers config and
the speculative config) and model_executor/models/{llama,qwen3}_eagle3.py (what the drafter takes from it).
"""

from dataclasses import dataclass
from typing import Any

from peagle.drafter.model_config import MAX_LAYERS
from peagle.serve.files import CONFIG, Findings

ARCHITECTURES = {"peagle": "PEagleDraftModel", "eagle3": "Eagle3DraftModel"}
_LAYERS = "transformer_layer_config"
# A size in the layers' section -> its name in `ServedShape`.
_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
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

    @property
    def is_pruned(self) -> bool:
        """Whether the draft vocabulary is a part of the verifier's."""
        return self.draft_vocab_size != self.vocab_size


def check_config(config: dict[str, Any], findings: Findings) -> ServedShape | None:
    """Check every field that vLLM reads; the drafter that it would build, or None if a missing one leaves it open."""
    return _ConfigCheck(config, findings).run()


class _ConfigCheck:
    """The checks of one `config.json`."""

    def __init__(self, config: dict[str, Any], findings: Findings) -> None:
        self.config, self.findings = config, findings
        layers = config.get(_LAYERS)
        self.layers: dict[str, Any] = layers if isinstance(layers, dict) else {}
        self.kind, self.layer_type = "", ""

    def error(self, message: str) -> None:
        self.findings.error(CONFIG, message)

    def warning(self, message: str) -> None:
        self.findings.warning(CONFIG, message)

    def run(self) -> ServedShape | None:
        # 1. The kind of drafter, its layers and their sizes.
        self._types()
        sizes = {ours: self._number(self.layers, name, f"{_LAYERS}.{name}") for name, ours in _SIZES.items()}
        sizes |= {name: self._number(self.config, name, name) for name in ("draft_vocab_size", "target_hidden_size")}
        if sizes["num_layers"] > MAX_LAYERS:
            self.error(f"{_LAYERS}.num_hidden_layers is {sizes['num_layers']}, over {MAX_LAYERS}")
            sizes["num_layers"] = 0
        if sizes["draft_vocab_size"] > sizes["vocab_size"] > 0:
            self.error(f"draft_vocab_size {sizes['draft_vocab_size']} exceeds vocab_size {sizes['vocab_size']}")
        self._heads_and_rope(sizes["num_heads"], sizes["num_kv_heads"])
        self._windows(sizes["num_layers"])
        # 2. What it drafts for, and how.
        num_speculative_tokens = self._proposal()
        verifier = _at(self.config, "speculators_config", "verifier", "name_or_path")
        if not isinstance(verifier, str) or not verifier:
            self.error("speculators_config.verifier.name_or_path is missing: `vllm serve CHECKPOINT` loads it")
            verifier = ""
        architectures = _at(self.config, "speculators_config", "verifier", "architectures")
        layer_ids = self._layer_ids()
        num_aux = self._num_aux(layer_ids)
        mask_token_id = self._mask_token(sizes["vocab_size"]) if self.kind == "peagle" else None
        self._switches()
        if not (self.kind and self.layer_type and all(sizes.values())):
            return None
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        return ServedShape(
            kind=self.kind,
            layer_type=self.layer_type,
            num_aux=num_aux,
            aux_layer_ids=layer_ids,
            num_speculative_tokens=num_speculative_tokens,
            mask_token_id=mask_token_id,
            norm_before_fc=bool(self.config.get("norm_before_fc")),
            fc_norm=self.kind == "eagle3" and bool(self.config.get("fc_norm")),
            attention_bias=bool(self.layers.get("attention_bias")),
            verifier=verifier,
            verifier_architectures=tuple(map(str, architectures or [])),
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
            **sizes,
        )

    def _types(self) -> None:
        kind, named = self.config.get("speculators_model_type"), self.config.get("architectures")
        if kind not in ARCHITECTURES:
            self.error(
                f"speculators_model_type is {kind!r}; expected peagle or eagle3, which vLLM maps to its methods "
                "(peagle: eagle3 with parallel drafting)"
            )
        else:
            self.kind = str(kind)
            if named != [ARCHITECTURES[kind]]:
                self.error(f"architectures is {named!r}; expected [{ARCHITECTURES[kind]!r}] for {kind}")
        if not isinstance(self.config.get(_LAYERS), dict):
            self.error(f"{_LAYERS} is missing: vLLM builds the drafter from it")
        layer_type = self.layers.get("model_type")
        if layer_type in ("llama", "qwen3"):
            self.layer_type = layer_type
        else:
            found = f"{_LAYERS}.model_type is {layer_type!r}"
            self.error(f"{found}; vLLM serves drafters with layers of type llama or qwen3 only")

    def _number(self, holder: dict[str, Any], key: str, name: str) -> int:
        value = holder.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        if value is None:
            self.error(f"{name} is missing; vLLM would take Transformers' default without a word")
        else:
            self.error(f"{name} is {value!r}; expected a whole number of at least 1")
        return 0

    def _heads_and_rope(self, heads: int, kv_heads: int) -> None:
        eps = self.layers.get("rms_norm_eps")
        if not isinstance(eps, float) or not 0 < eps < 1:
            self.error(f"{_LAYERS}.rms_norm_eps is {eps!r}; expected a small number, the one trained with")
        if heads and kv_heads and heads % kv_heads:
            self.error(f"{heads} attention heads cannot share {kv_heads} key/value heads")
        rope = self.layers.get("rope_parameters")
        if isinstance(rope, dict) and "rope_theta" in rope:
            if "mrope_section" in rope:
                found = f"{_LAYERS}.rope_parameters has mrope_section"
                self.error(f"{found}; vLLM's drafters take plain text positions: leave it out")
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

    def _layer_ids(self) -> tuple[int, ...]:
        key = "eagle_aux_hidden_state_layer_ids"
        ids = self.config.get(key)
        if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
            self.error(f"{key} is missing: vLLM would feed the drafter the layers that it guesses (2, n / 2, n - 3)")
            return ()
        if ids != sorted(set(ids)) or ids[0] < 0:
            self.error(f"{key} is {ids}; vLLM lays states out in ascending order: sort, no doubles")
        return tuple(ids)

    def _num_aux(self, ids: tuple[int, ...]) -> int:
        """How many layers vLLM would make `fc` for. Llama drafters do not count the list of ids at the top."""
        counted, is_qwen3 = self.layers.get("num_aux_hidden_states"), self.layer_type == "qwen3"
        if is_qwen3 and self.layers.get("num_aux_layers") is not None:
            counted = self.layers["num_aux_layers"]
        found = f"is {counted}"
        if counted is None:
            nested = (self.layers.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
            counted = len(ids) if is_qwen3 and ids else len(nested) if nested else _DEFAULT_NUM_AUX
            found = f"is missing: vLLM builds this drafter's input layer for {counted} verifier layers"
        if ids and counted != len(ids):
            self.error(f"{_LAYERS}.num_aux_hidden_states {found}, but {len(ids)} layer ids are given")
        return int(counted)

    def _mask_token(self, vocab_size: int) -> int | None:
        token = self.config.get("mask_token_id")
        if not isinstance(token, int) or isinstance(token, bool):
            self.error(f"mask_token_id is {token!r}; a P-EAGLE drafter needs the token of its mask slots")
            return None
        if not 0 <= token < (vocab_size or token + 1):
            self.error(f"mask_token_id {token} has no row among {vocab_size} embeddings")
        return token

    def _switches(self) -> None:
        """What is not written, and what vLLM would not read."""
        if not isinstance(self.config.get("norm_before_residual"), bool):
            default = str(self.kind == "eagle3").lower()
            self.error(f"norm_before_residual is not written; vLLM takes {default} for {self.kind or 'this kind'}")
        for name in ("norm_before_fc", "fc_norm", "norm_output"):
            value = self.config.get(name, False)
            if not isinstance(value, bool):
                self.error(f"{name} is {value!r}; expected true or false")
            if self.kind != "peagle" or name == "norm_before_fc":
                continue
            if value is True:
                self.error(f"{name} is set, but vLLM does not read it for peagle: it would have no effect")
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
