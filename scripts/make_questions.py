"""Choose the questions that ship inside `peagle`: an even spread over GSM8K's train and test files.

    python scripts/make_questions.py --train train.jsonl --test test.jsonl --output src/peagle/embedded/questions

Each row keeps its place in the original file as its id, and the human answer without the `<<...>>` calculator marks.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path


def choose(path: Path, split: str, count: int) -> list[dict[str, str]]:
    """`count` rows spread evenly over a GSM8K file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for index in range(count):
        line = index * len(lines) // count
        row = json.loads(lines[line])
        answer = re.sub(r"<<[^>]*>>", "", row["answer"]).strip()
        rows.append({"id": f"gsm8k-{split}-{line}", "question": row["question"].strip(), "answer": answer})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-train", type=int, default=1000)
    parser.add_argument("--num-test", type=int, default=100)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for split, path, count in (("train", args.train, args.num_train), ("test", args.test, args.num_test)):
        rows = choose(path, split, count)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (args.output / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(f"{split}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
