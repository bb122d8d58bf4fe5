"""How long `peagle prepare` takes for 5,000 synthetic conversations in the manner of ShareGPT: at most 30 s on 2 cores.

    python benchmarks/prepare.py --json

The texts are random, but lengths are ShareGPT's: 3.5 exchanges on average, prompts of 60 words, replies of 170, some of
them lists or code. The tokenizer is trained on the spot (8,192 tokens) unless --model names one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S = 30.0
CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def main() -> int:
    """Make the data, time `peagle prepare` on it, print the figures; exit 1 past the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=5000)
    parser.add_argument("--model", default=None, help="a verifier's folder or hub id (default: a tokenizer made here)")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--num-workers", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line last")
    asked = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from peagle.cli.main import main as peagle

    with tempfile.TemporaryDirectory() as folder:
        data, output = Path(folder) / "sharegpt.json", Path(folder) / "out"
        rows = conversations(asked.conversations, random.Random(asked.seed))
        data.write_text(json.dumps(rows), encoding="utf-8")
        model = asked.model or str(make_model(Path(folder) / "model", rows[:300]))
        arguments = ["prepare", "--model", model, "--data", str(data), "--output", str(output)]
        arguments += ["--seq-length", str(asked.seq_length)]
        arguments += ["--num-workers", str(asked.num_workers)] if asked.num_workers else []
        started_s, started_cpu_s = time.perf_counter(), cpu_seconds()
        status = peagle(arguments)
        seconds, used_s = time.perf_counter() - started_s, cpu_seconds() - started_cpu_s
        summary = json.loads((output / "summary.json").read_text()) if status == 0 else {}
    result = {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used_s, 2),
        "limit_s": LIMIT_S,
        "within_limit": status == 0 and seconds <= LIMIT_S,
        "conversations": asked.conversations,
        "rows": summary.get("rows"),
        "tokens": summary.get("tokens"),
        "supervised_tokens": summary.get("supervised_tokens"),
        "read_equals_kept_plus_dropped": bool(summary)
        and summary["read"] == summary["kept"] + sum(summary["dropped"].values()),
        "conversations_per_s": round(asked.conversations / seconds, 1),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
    }
    if asked.json:
        print(json.dumps(result))
    else:
        print(f"{seconds:.1f} s for {asked.conversations} conversations, {result['tokens']} tokens (limit {LIMIT_S} s)")
    return 0 if result["within_limit"] else 1


def cpu_seconds() -> float:
    """Processor time of this process and its finished workers: what a busy machine does not change."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def conversations(number: int, rng: random.Random) -> list[dict[str, Any]]:
    """ShareGPT rows of random words with a natural spread of frequencies."""
    letters = "etaoinshrdlucmfwypvbgk"
    words = sorted({"".join(rng.choices(letters, k=rng.randint(1, 11))) for _ in range(20_000)})
    weights = [1 / (rank + 5) for rank in range(len(words))]
    rng.shuffle(words)
    pool = rng.choices(words, weights, k=400_000)

    def text(mean: float) -> str:
        length = max(1, int(rng.lognormvariate(0, 0.8) * mean / 1.38))
        start = rng.randrange(len(pool) - 1)
        picked = (pool[start:] + pool)[:length] if start + length > len(pool) else pool[start : start + length]
        kind = rng.random()
        if kind < 0.1:
            return "```python\n" + "\n".join(f"    {w} = {w}({i})" for i, w in enumerate(picked)) + "\n```"
        if kind < 0.3:
            return "\n".join(
                f"{i + 1}. {' '.join(picked[i * 12 : i * 12 + 12])}." for i in range((len(picked) + 11) // 12)
            )
        lines = [" ".join(picked[i : i + 15]).capitalize() + "." for i in range(0, len(picked), 15)]
        return " ".join(lines[: len(lines) // 2]) + "\n\n" + " ".join(lines[len(lines) // 2 :])

    rows = []
    for place in range(number):
        turns = []
        for _ in range(min(1 + int(rng.expovariate(1 / 2.6)), 30)):
            turns += [{"from": "human", "value": text(60)}, {"from": "gpt", "value": text(170)}]
        rows.append({"id": f"row{place}", "conversations": turns})
    return rows


def make_model(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A tokenizer trained on some of the rows, ChatML, in a folder that `peagle prepare` takes for a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
        show_progress=False,
    )
    tokenizer.train_from_iterator((turn["value"] for row in rows for turn in row["conversations"]), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": len(fast)}))
    return folder


if __name__ == "__main__":
    sys.exit(main())
