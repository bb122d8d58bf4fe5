"""Measure the verifier that ships inside `peagle`, and write its model card.

    python scripts/measure_verifier.py --model src/peagle/embedded/verifier --held-out test.jsonl

On GSM8K's test file: the held-out loss per answer token (in nats, the end token included), the share of greedy
answers that end by themselves within the token limit, and the share of repeated 4-grams in them beside the human
answers'. Writes README.md into the model folder and prints the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

CARD = """---
license: apache-2.0
datasets:
- openai/gsm8k
language:
- en
pipeline_tag: text-generation
tags:
- peagle
---

# The embedded verifier

A small Qwen3 ({parameters:,} parameters, {num_layers} layers, hidden size {hidden_size}, {vocab_size:,} embedding
rows, {megabytes:.1f} MB of bfloat16 weights) that ships inside `peagle`, so that the whole pipeline from
conversations to a served drafter runs without a download. `scripts/train_verifier.py` trained it on the 7,473 train
rows of GSM8K (MIT, openai/grade-school-math; calculator marks stripped). It writes fluent answers in the style of that
set and solves few of the problems: it is there to test speculative decoding, nothing else.

| measured on the {num_held_out:,} test rows, which it never saw | |
| --- | --- |
| loss per answer token, nats, end token included | {loss:.3f} |
| greedy answers that end by themselves within {limit} tokens ({num_greedy} questions) | {ended:.1%} |
| repeated 4-grams in its greedy answers (share of an answer's 4-grams seen earlier in it) | {repeated:.1%} |
| the same in the human answers to these questions | {repeated_human:.1%} |
| mean answer length, tokens: greedy, human | {length:.0f}, {length_human:.0f} |

Weights as stored (bfloat16), computed in float32. Measured by `scripts/measure_verifier.py`.

## A greedy answer

> {question}

{answer}
"""


def read_rows(path: Path) -> list[tuple[str, str]]:
    """Questions and answers of a GSM8K file, calculator marks removed."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.append((row["question"].strip(), re.sub(r"<<[^>]*>>", "", row["answer"]).strip()))
    return rows


def groups(lengths: list[int], size: int) -> Iterator[list[int]]:
    """Indices in groups of `size`, of similar length."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start in range(0, len(order), size):
        yield order[start : start + size]


@torch.inference_mode()
def held_out_loss(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Mean negative log-likelihood per answer token, in nats."""
    total, count = 0.0, 0
    for group in groups([len(p) + len(a) for p, a in zip(prompts, answers)], 16):
        width = max(len(prompts[i]) + len(answers[i]) for i in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        in_answer = torch.zeros(len(group), width, dtype=torch.bool)
        for r, i in enumerate(group):
            row = prompts[i] + answers[i]
            ids[r, : len(row)] = torch.tensor(row)
            in_answer[r, len(prompts[i]) : len(row)] = True
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][in_answer[:, 1:]]
        total += F.cross_entropy(model.lm_head(states), ids[:, 1:][in_answer[:, 1:]], reduction="sum").item()
        count += int(in_answer.sum())
    return total / count


@torch.inference_mode()
def greedy_answers(model: Any, prompts: list[list[int]], limit: int, eos_id: int, pad_id: int) -> list[list[int]]:
    """Greedy continuation of each prompt, end token included where it came within `limit`."""
    answers: list[list[int]] = [[] for _ in prompts]
    for group in groups([len(p) for p in prompts], 32):
        width = max(len(prompts[i]) for i in group)
        ids = torch.full((len(group), width), pad_id)
        keep = torch.zeros(len(group), width, dtype=torch.long)
        for r, i in enumerate(group):
            ids[r, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            keep[r, width - len(prompts[i]) :] = 1
        out = model.generate(
            input_ids=ids, attention_mask=keep, do_sample=False, max_new_tokens=limit, pad_token_id=pad_id
        )
        for r, i in enumerate(group):
            answer = out[r, width:].tolist()
            answers[i] = answer[: answer.index(eos_id) + 1] if eos_id in answer else answer
    return answers


def repeated_share(answers: list[list[int]], n: int = 4) -> float:
    """Share of n-grams that stood earlier in the same answer, over all answers."""
    repeated = total = 0
    for answer in answers:
        seen: set[tuple[int, ...]] = set()
        for start in range(len(answer) - n + 1):
            gram = tuple(answer[start : start + n])
            repeated += gram in seen
            total += 1
            seen.add(gram)
    return repeated / max(total, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=200, help="tokens after which a greedy answer is cut")
    parser.add_argument("--num-greedy", type=int, default=400, help="questions answered greedily, spread evenly")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rows = read_rows(args.held_out)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question, _ in rows
    ]
    humans = [[*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for _, answer in rows]
    chosen = [index * len(rows) // args.num_greedy for index in range(min(args.num_greedy, len(rows)))]
    greedy = greedy_answers(
        model, [prompts[i] for i in chosen], args.limit, tokenizer.eos_token_id, tokenizer.pad_token_id
    )
    chosen_humans = [humans[i] for i in chosen]
    figures = {
        "loss": held_out_loss(model, prompts, humans),
        "ended": sum(answer[-1] == tokenizer.eos_token_id for answer in greedy) / len(greedy),
        "limit": args.limit,
        "num_greedy": len(greedy),
        "num_held_out": len(rows),
        "repeated": repeated_share(greedy),
        "repeated_human": repeated_share(chosen_humans),
        "length": sum(map(len, greedy)) / len(greedy),
        "length_human": sum(map(len, chosen_humans)) / len(chosen_humans),
    }
    print(json.dumps(figures, indent=2))
    answer = tokenizer.decode(greedy[0], skip_special_tokens=True)
    card = CARD.format(
        **figures,
        parameters=sum(p.numel() for p in model.parameters()),
        num_layers=model.config.num_hidden_layers,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        megabytes=(args.model / "model.safetensors").stat().st_size / 1e6,
        question=rows[chosen[0]][0],
        answer="\n".join(f"> {line}" for line in answer.splitlines()),
    )
    (args.model / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
