"""Toy tokenizers and chat templates in the manner of the families that users train on, and folders that hold them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from peagle.cli.main import main

TEXT = (
    "system user assistant tool hello world what is the answer to this question The answer is 42 .\n\n"
    "I think that we can do it . work then say so </think> <think>\n analysis final commentary\n\n\n"
) * 30

# How Llama 3 and Qwen split text: line feeds with what is before them, digits alone.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

CHATML_TAGGED = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}{{ '\\n' }}
{%- else -%}{{ message['content'] + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

LLAMA3 = """{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""

GEMMA = """{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

MISTRAL = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' -%}{{ ' ' + message['content'] + eos_token }}
{%- else -%}{{ raise_exception('Only user and assistant roles are supported!') }}{%- endif -%}
{%- endfor -%}"""

# GPT-OSS: the last reply ends in <|return|>, older ones in <|end|> and without their analysis, calls in <|call|>.
HARMONY = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- if message.tool_calls -%}
{%- if message.thinking -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif loop.last -%}
{%- if message.thinking -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif -%}
{%- elif message['role'] == 'tool' -%}
{{ '<|start|>functions to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- else -%}
{{ '<|start|>' + message['role'] + '<|message|>' + message.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"""

# Qwen3: reasoning only behind the last user turn, an empty block where the last reply has none.
QWEN3 = """{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- set content = message.content -%}{%- set thought = message.reasoning_content or '' -%}
{%- if not thought and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() -%}
{%- set content = content.split('</think>')[-1].lstrip() -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last -%}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif -%}
{{ content }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n' }}
{{- '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message['role'] == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}"""
# Qwen3-Thinking: the generation prompt opens the block.
QWEN3_THINKING = QWEN3.replace(
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}",
    "{{- '<think>\\n' }}",
)

# DeepSeek-R1: the prompt opens the block, and every rendering drops what was thought.
R1 = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '<|User|>' + message.content }}
{%- elif message['role'] == 'assistant' -%}{{ '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
{%- else -%}{{ message.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|Assistant|><think>\\n' }}{%- endif -%}"""

# Prints every turn as it is, but its prompt opens a think block: replies without one begin at the header.
OPENING = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")

# Looks whether both tags are there and prints an empty block if not: doubles a self-generated reply's closing tag.
BOTH_TAGS = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' and loop.last and '<think>' not in message.content -%}
{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content + '<|im_end|>\\n' }}
{%- else -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"""

COUNTER = CHATML.replace("{{ '<|im_start|>' +", "{{ '<|im_start|>' + (messages | length) | string + ' turns ' +", 1)

TOOLS = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<call>' + call.function.name + ' ' + ARGUMENTS + '</call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
TOOLS_SERIALISED = TOOLS.replace("ARGUMENTS", "call.function.arguments | tojson")
TOOLS_PASTED = TOOLS.replace("ARGUMENTS", "call.function.arguments")
TOOLS_LOOPED = TOOLS.replace(
    "{{ '<call>' + call.function.name + ' ' + ARGUMENTS + '</call>' }}",
    "{{ '<call>' + call.function.name + ' {' }}{%- for key, value in call.function.arguments.items() -%}"
    "{{ '\"' + key + '\": ' + value | tojson }}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}{%- endfor -%}"
    "{{ '}</call>' }}",
)

CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES: dict[str, tuple[str, tuple[str, ...], str, str | None, str]] = {
    # name: template, special tokens, eos, bos, end token of a reply
    "chatml": (CHATML, CHATML_SPECIALS, "<|im_end|>", None, "<|im_end|>"),
    "llama3": (
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "gemma": (GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", "<end_of_turn>"),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", "</s>"),
    "harmony": (
        HARMONY,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        "<|return|>",
        None,
        "<|return|>",
    ),
    "qwen3": (QWEN3, CHATML_SPECIALS, "<|im_end|>", None, "<|im_end|>"),
}


@functools.cache
def _trained(specials: tuple[str, ...], plain: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(list(specials))
    tokenizer.add_tokens(list(plain))
    return tokenizer.to_str()


def toy_tokenizer(
    template: str | None,
    specials: tuple[str, ...] = CHATML_SPECIALS,
    eos: str = "<|im_end|>",
    bos: str | None = None,
    adds_bos: bool = False,
    adds_eos: bool = False,
    plain: tuple[str, ...] = ("<think>", "</think>"),
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges across newlines, so that tokens can cross the end of a prompt."""
    tokenizer = Tokenizer.from_str(_trained(specials, plain))
    if adds_bos or adds_eos:
        before, behind = (f"{bos} " if adds_bos else ""), (f" {eos}" if adds_eos else "")
        names = [name for name, on in ((bos, adds_bos), (eos, adds_eos)) if on and name]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{behind}", special_tokens=[(name, tokenizer.token_to_id(name)) for name in names]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The toy tokenizer of one of `FAMILIES`."""
    template, specials, eos, bos, _ = FAMILIES[name]
    return toy_tokenizer(template, specials, eos, bos)


def model_folder(folder: Path, tokenizer: Any, vocab_size: int | None = None) -> Path:
    """A folder with this tokenizer and a config of `vocab_size` (default: the tokenizer's length), no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": len(tokenizer) if vocab_size is None else vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    """JSON lines; a row that is text is written as it is (to break a line on purpose)."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def prepare(model: Path, data: Path, output: Path, *flags: str) -> int:
    """Run `peagle prepare` as a user does; returns the exit status."""
    arguments = ["prepare", "--model", str(model), "--data", str(data), "--output", str(output)]
    return main([*arguments, "--num-workers", "1", *flags] if "--num-workers" not in flags else [*arguments, *flags])


def rejected(output: Path) -> list[dict[str, Any]]:
    """The rows that were rejected."""
    return [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]


def chat(*texts: str, system: str | None = None) -> dict[str, Any]:
    """An OpenAI-style row of alternating user and assistant turns."""
    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": turns}


def supervised(row: Any, tokenizer: Any) -> list[str]:
    """The supervised text of a row, one string per run of ones."""
    found: list[list[int]] = []
    before = 0
    for token, mask in zip(row.input_ids, row.loss_mask):
        if mask and not before:
            found.append([])
        if mask:
            found[-1].append(token)
        before = mask
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in found]
