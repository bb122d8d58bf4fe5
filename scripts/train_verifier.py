"""Train the verifier that ships inside `peagle`: a small Qwen3 on GSM8K's train questions and answers.

    python scripts/train_verifier.py --data train.jsonl --held-out test.jsonl --output src/peagle/embedded/verifier

GSM8K (MIT, openai/grade-school-math) has 7,473 training rows; the `<<...>>` calculator marks are stripped. One CPU
thread is enough. The script writes the model folder (bf16 safetensors, tokenizer, chat template) and prints the
held-out loss per answer token (the end token counts as one); `scripts/measure_verifier.py` writes its model card.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
VOCAB_SIZE = 2048  # rows of the embedding; the tokenizer fills 2,040 of them, like real models with padded tables
SPARE_ROWS = 8


def read_rows(path: Path) -> list[tuple[str, str]]:
    """Questions and answers of a GSM8K file, calculator marks removed."""
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows.append((row["question"].strip(), re.sub(r"<<[^>]*>>", "", row["answer"]).strip()))
    return rows


def train_tokenizer(rows: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, trained on the training rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - SPARE_ROWS,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in rows for text in row), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """Token ids of each row and the index of its first answer token; the row ends with the end token."""
    encoded = []
    for question, answer in rows:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        answer_ids = tokenizer(answer + "<|im_end|>", add_special_tokens=False).input_ids
        encoded.append((prompt_ids + answer_ids, len(prompt_ids)))
    return encoded


def batches(rows: list[tuple[list[int], int]], num_tokens: int, rng: random.Random):
    """Batches of rows of similar length, about `num_tokens` each, in random order."""
    order = list(range(len(rows)))
    rng.shuffle(order)
    groups: list[list[int]] = []
    for start in range(0, len(order), 512):
        pool = sorted(order[start : start + 512], key=lambda i: len(rows[i][0]))
        group: list[int] = []
        for i in pool:
            if group and (len(group) + 1) * len(rows[i][0]) > num_tokens:
                groups.append(group)
                group = []
            group.append(i)
        groups.append(group)
    rng.shuffle(groups)
    return groups


def pad(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and the weight of each label: 1 in the answer, 0.5 in the question, 0 in the padding."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    weight = torch.zeros(len(rows), width)
    for r, (row, start) in enumerate(rows):
        ids[r, : len(row)] = torch.tensor(row)
        weight[r, : len(row)] = 0.5
        weight[r, start : len(row)] = 1.0
    return ids, weight


def label_losses(model, ids: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keep = weight[:, 1:] > 0
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][keep]
    losses = F.cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][keep], reduction="none")
    return losses, weight[:, 1:][keep]


@torch.no_grad()
def held_out_loss(model, rows: list[tuple[list[int], int]]) -> float:
    """Mean negative log-likelihood per answer token, in nats."""
    model.eval()
    total, count = 0.0, 0
    ordered = sorted(rows, key=lambda row: len(row[0]))
    for start in range(0, len(ordered), 16):
        losses, weight = label_losses(model, *pad(ordered[start : start + 16]))
        total += losses[weight == 1.0].sum().item()
        count += int((weight == 1.0).sum())
    model.train()
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--muon-lr", type=float, default=6e-3)
    parser.add_argument("--adamw-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 matrix products (faster with AVX512-BF16)")
    parser.add_argument("--compile", action="store_true", help="compile the layers (faster after a minute)")
    parser.add_argument("--max-steps", type=int, default=0, help="stop early, to measure speed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    rows = read_rows(args.data)
    tokenizer = train_tokenizer(rows)
    train_rows = encode(tokenizer, rows)
    test_rows = encode(tokenizer, read_rows(args.held_out))
    num_tokens = sum(len(ids) for ids, _ in train_rows)
    print(f"{len(rows)} rows, {num_tokens} tokens, longest {max(len(i) for i, _ in train_rows)}", flush=True)

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=8,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.div_(math.sqrt(2 * config.num_hidden_layers))
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    if args.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(
            matrices, lr=args.muon_lr, weight_decay=args.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=args.adamw_lr, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    plan = [group for _ in range(args.epochs) for group in batches(train_rows, args.batch_tokens, rng)]
    warmup = 100

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * (1 - step / len(plan)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(opt, scale) for opt in optimizers]
    start = time.monotonic()
    seen, running = 0, None
    for step, group in enumerate(plan):
        ids, weight = pad([train_rows[i] for i in group])
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            losses, label_weight = label_losses(model, ids, weight)
        loss = (losses * label_weight).sum() / label_weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt, schedule in zip(optimizers, schedules):
            opt.step()
            opt.zero_grad()
            schedule.step()
        answer = losses.detach()[label_weight == 1.0].mean().item()
        running = answer if running is None else 0.98 * running + 0.02 * answer
        seen += int((weight > 0).sum())
        if step % 20 == 0:
            rate = seen / (time.monotonic() - start)
            left = (len(plan) - step) * (time.monotonic() - start) / (step + 1) / 60
            speed = f"{rate:.0f} tokens/s  {left:.0f} min left"
            print(f"step {step}/{len(plan)}  answer loss {running:.3f}  {speed}", flush=True)
        if args.max_steps and step >= args.max_steps:
            break
        if (step + 1) % 400 == 0 or step + 1 == len(plan):
            print(f"step {step + 1}  held-out answer loss {held_out_loss(model, test_rows):.4f}", flush=True)
            save(model, tokenizer, args.output)
    print(f"trained in {(time.monotonic() - start) / 60:.1f} min", flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the bf16 model folder; the float32 model goes on training untouched."""
    output.mkdir(parents=True, exist_ok=True)
    half = Qwen3ForCausalLM(model.config)
    half.load_state_dict({k.replace("_orig_mod.", ""): v for k, v in model.state_dict().items()})
    half = half.to(torch.bfloat16)
    half.config.dtype = "bfloat16"
    half.generation_config.eos_token_id = tokenizer.eos_token_id
    half.generation_config.pad_token_id = tokenizer.pad_token_id
    half.save_pretrained(output)
    tokenizer.save_pretrained(output)
    model.config.dtype = "float32"


if __name__ == "__main__":
    main()
