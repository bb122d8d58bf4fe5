"""Tiny things that tests share: a byte tokenizer with a chat template, and random verifiers of every family.

Nothing here needs a network. A verifier folder takes a tenth of a second to make.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from peagle.data.records import TokenRow
from peagle.drafter.model_config import DrafterConfig, config_for
from peagle.verifier.model_config import load_verifier_config

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_VOCABULARY = 256 + len(SPECIAL)
TEXT_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "gpt_oss", "granite")
TEXT_FAMILIES += ("hyperclovax", "llama4_text")
WRAPPERS = ("gemma3", "qwen2_5_vl", "mistral3", "llama4")


def byte_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte (ids 3 to 258) behind `<|endoftext|>` (0, pad) and the chat marks (1 and 2; 2 is eos)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast


def word_tokenizer(size: int, **special_tokens: str) -> PreTrainedTokenizerFast:
    """`size` tokens "w0", "w1" ... split at spaces; `special_tokens` names roles, as `eos_token="w0"`."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special_tokens)


def tiny_config(family: str, **changes: Any) -> Any:
    """A small config of a family; `changes` override fields of the text model."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 272,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    if family in ("qwen3_moe",):
        values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    if family == "gpt_oss":
        values |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "tie_word_embeddings": False}
    if family.startswith("gemma"):
        values |= {"sliding_window": 32, "query_pre_attn_scalar": 16}
    if family == "gemma2":
        values |= {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 20.0}
    if family in ("granite", "hyperclovax"):  # the same fields; one divides logits by its scale, the other multiplies
        values |= {
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0 if family == "granite" else 0.25,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
        }
    if family == "granite":
        values.pop("head_dim")
    if family.startswith("llama4"):
        values |= {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
        values |= {"attention_chunk_size": 32, "tie_word_embeddings": False}
    values |= changes
    if family not in (*WRAPPERS, "paligemma"):
        return CONFIG_MAPPING[family](**values)
    tied = values["tie_word_embeddings"]
    if family == "qwen2_5_vl":
        values |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
        values.pop("head_dim")
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
        return CONFIG_MAPPING[family](text_config=values, vision_config=vision, tie_word_embeddings=tied)
    if family == "llama4":
        vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 64}
        vision |= {"projector_input_dim": 64, "projector_output_dim": 64}
        return CONFIG_MAPPING[family](text_config=values, vision_config=vision, tie_word_embeddings=tied)
    vision = {
        "model_type": "pixtral" if family == "mistral3" else "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    if family == "mistral3":
        values |= {"model_type": "mistral"}
    if family == "paligemma":
        values |= {"model_type": "gemma"}
        vision |= {"projection_dim": 64}
        return CONFIG_MAPPING[family](text_config=values, vision_config=vision, projection_dim=64, image_token_id=271)
    return CONFIG_MAPPING[family](text_config=values, vision_config=vision, tie_word_embeddings=tied)


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family, float32, in eval mode, with norms that are not all ones and sharp logits."""
    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim >= 2 and "embed" not in name:
                parameter.mul_(6.0)  # initial std 0.02 gives a network that hardly moves its embedding
    return model


def tiny_verifier(
    folder: Path,
    family: str = "qwen3",
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    tokenizer: PreTrainedTokenizerFast | None = None,
    **changes: Any,
) -> Path:
    """Save a random verifier with a byte tokenizer and a ChatML template.

    Args:
        folder: where to save it.
        family: a model type of `TEXT_FAMILIES` or `WRAPPERS`.
        seed: of its weights.
        dtype: of its files and its config.
        max_shard_size: "20KB" gives several shards and an index.
        tokenizer: another tokenizer.
        changes: config fields; `num_layers` is short for `num_hidden_layers`; vocab_size defaults to 272 (259 used).

    Returns:
        The folder.
    """
    if "num_layers" in changes:
        changes["num_hidden_layers"] = changes.pop("num_layers")
    model = tiny_model(family, seed, **changes).to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return Path(folder)


def drafter_config(**changes: Any) -> DrafterConfig:
    """A tiny drafter's shape; `changes` override fields.

    Its kind decides the mask token (the last row, or none for EAGLE-3) and its vocabulary is whole, unless said.
    """
    kind, vocab_size = changes.get("speculators_model_type", "peagle"), changes.get("vocab_size", 32)
    values = {
        "speculators_model_type": kind,
        "layer_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "attention_bias": False,
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "aux_layer_ids": (1, 2, 3),
        "mask_token_id": vocab_size - 1 if kind == "peagle" else None,
        "num_speculative_tokens": 3,
        "verifier": "nowhere",
        "verifier_architectures": ("Qwen3ForCausalLM",),
    }
    return DrafterConfig.build({**values, **changes})


def drafter_for(folder: Path, **changes: Any) -> DrafterConfig:
    """The shape of a two-layer drafter for a verifier's folder; `changes` override arguments of `config_for`."""
    values = {
        "speculators_model_type": "peagle",
        "layer_type": None,
        "num_layers": 2,
        "intermediate_size": None,
        "num_speculative_tokens": 4,
        "aux_layer_ids": (2, 4, 5),
        "draft_vocab_size": None,
        "mask_token_id": 3,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
    }
    return config_for(load_verifier_config(str(folder), False), **{**values, **changes})


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a saved model's config.json; a value of `...` removes the field."""
    path = Path(folder) / "config.json"
    values = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            values.pop(key, None)
        else:
            values[key] = value
    path.write_text(json.dumps(values))


def random_row(row_id: str, num_tokens: int, prompt_tokens: int, vocab_size: int, seed: int) -> TokenRow:
    """A row of random tokens whose first `prompt_tokens` are the prompt."""
    rng = random.Random(seed)
    ids = [rng.randrange(3, vocab_size) for _ in range(num_tokens)]
    mask = [0] * prompt_tokens + [1] * (num_tokens - prompt_tokens)
    return TokenRow(
        row_id=row_id, source="random", input_ids=ids, loss_mask=mask, next_is_supervised=False, tail_length=0
    )


def random_rows(count: int, vocab_size: int, seed: int, shortest: int = 6, longest: int = 60) -> list[TokenRow]:
    """Rows "row-0" ... of random lengths."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        length = rng.randint(shortest, longest)
        rows.append(random_row(f"row-{i}", length, rng.randint(2, length - 3), vocab_size, seed * 1000 + i))
    return rows
