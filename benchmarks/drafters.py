"""P-EAGLE and EAGLE-3 side by side: the same verifier, answers, layers, K and compute; then the same questions in turn.

    python benchmarks/drafters.py [--cpu-seconds 240] [--layers 2] [--depth 4] [--json] [--output FOLDER]

Both are trained on the embedded verifier's own answers to its training questions, for the same processor time: what a
step costs is measured first, and each gets as many steps as fit. They are measured on test questions that neither saw,
one prompt at a time, taking turns on every prompt. Prints `{"eagle3": {...}, "peagle": {...}}`, each with
`acceptance_length`, `acceptance_per_position`, `draft_ms_per_pass`, `verify_ms_per_pass`, `tokens_per_s` and `lossless`
(every answer is, token by token, what the verifier writes alone), and what it was trained with.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from peagle import embedded, log
from peagle.data.tokenizer import load_tokenizer
from peagle.drafter.checkpoint import load
from peagle.engine import Engine, Laps, Request, Sampling
from peagle.evaluate.counts import PassCounts
from peagle.train.config import TrainConfig
from peagle.train.run import train
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.special_tokens import eos_ids

TYPES = ("eagle3", "peagle")
ANSWER_LIMIT = 200
_SHORT, _LONG = 4, 16  # steps of the two runs whose difference tells what a step costs


def make_data(folder: Path, questions: int) -> None:
    """The verifier's answers, as rows, with their hidden states."""
    from peagle.data.config import PrepareConfig
    from peagle.data.prepare import prepare
    from peagle.hidden_states.config import ExtractConfig
    from peagle.hidden_states.extract import extract
    from peagle.regenerate.config import RegenerateConfig
    from peagle.regenerate.run import regenerate

    answers = folder / "answers.jsonl"
    asked = {"model": str(embedded.VERIFIER), "data": ["gsm8k=embedded:train"], "output": answers}
    more = {"max_samples": questions, "max_new_tokens": ANSWER_LIMIT, "batch_size": 64, "dtype": "float32"}
    regenerate(RegenerateConfig.build({**asked, **more}))
    rows = {"model": str(embedded.VERIFIER), "data": [str(answers)], "output": folder / "rows", "seq_length": 1024}
    prepare(PrepareConfig.build(rows))
    states = {"preprocessed_data": folder / "rows", "output": folder / "states", "dtype": "float32"}
    extract(ExtractConfig.build(states))


def train_for(kind: str, folder: Path, save_path: Path, steps: int, options: argparse.Namespace) -> float:
    """Train a drafter for some steps; returns the processor time that it took, in seconds."""
    depths = {"num_depths": options.depth} if kind == "peagle" else {"ttt_steps": options.depth}
    config = TrainConfig.build(
        {
            "verifier_name_or_path": str(embedded.VERIFIER),
            "data_path": folder / "rows",
            "hidden_states_path": folder / "states",
            "save_path": save_path,
            "speculator_type": kind,
            "num_layers": options.layers,
            "total_seq_len": 1024,
            "batch_size": 1,
            "epochs": 1000,
            "max_steps": steps,
            "optimizer": "muon",
            "lr": 1.6e-3,
            "scheduler_type": "cosine",
            "depth_loss_decay": 1.0,
            "checkpoint_freq": 1000,
            "train_data_ratio": 0.95,
            "save_dtype": "float32",
            "seed": options.seed,
            **depths,
        }
    )
    began_s = time.process_time()
    if train(config).signal_number is not None:
        raise SystemExit("stopped by a signal; the same command with --output continues")
    return time.process_time() - began_s


def trained(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure what a step costs, then train for `--cpu-seconds`; what an interrupted run has measured is kept."""
    plan, save_path = folder / f"{kind}.json", folder / kind
    if not plan.exists():
        costs = [train_for(kind, folder, folder / f"{kind}-{steps}", steps, options) for steps in (_SHORT, _LONG)]
        per_step_s = (costs[1] - costs[0]) / (_LONG - _SHORT)
        steps = max(1, round(options.cpu_seconds / per_step_s))
        plan.write_text(json.dumps({"steps": steps, "cpu_s_per_step": round(per_step_s, 4)}))
    found = json.loads(plan.read_text())
    train_for(kind, folder, save_path, found["steps"], options)
    metrics = [json.loads(line) for line in (save_path / "metrics.jsonl").read_text().splitlines()]
    length = metrics[-1]["acceptance_length"]
    return {"checkpoint": str(save_path / "checkpoint_last"), "validation_acceptance_length": length, **found}


def measured(checkpoints: dict[str, str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Decode the test questions with both drafters in turn, and with none."""
    verifier_config = load_verifier_config(str(embedded.VERIFIER), False)
    tokenizer = load_tokenizer(str(embedded.VERIFIER), False)
    verifier = TransformersVerifier(verifier_config, "float32", "cpu")
    ends = eos_ids(verifier_config, tokenizer)
    lines = embedded.TEST_QUESTIONS.read_text(encoding="utf-8").splitlines()[: options.test_questions]
    requests = []
    for line in lines:
        chat = [{"role": "user", "content": json.loads(line)["question"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        requests.append(Request(ids, ANSWER_LIMIT))
    drafters = {kind: load(path, torch.float32, torch.device("cpu")) for kind, path in checkpoints.items()}
    engines = {k: Engine(verifier.model, d, options.depth, ends, Sampling(), 1) for k, d in drafters.items()}
    engines["plain"] = Engine(verifier.model, None, 0, ends, Sampling(), 1)
    answers: dict[str, list[Any]] = {kind: [] for kind in engines}
    seconds, laps = dict.fromkeys(engines, 0.0), {kind: Laps() for kind in engines}
    for engine in engines.values():
        engine.generate(requests[:2])
    names = list(engines)
    with log.progress("decode", len(requests), "prompts") as meter:
        for turn, request in enumerate(requests):
            for kind in names[turn % 3 :] + names[: turn % 3]:
                began_s = time.perf_counter()
                answers[kind] += engines[kind].generate([request], laps[kind])
                seconds[kind] += time.perf_counter() - began_s
            meter.advance(1)
    own = [answer.ids for answer in answers["plain"]]
    found = {}
    for kind in engines:
        mine, lap = answers[kind], laps[kind]
        tokens = sum(len(answer.ids) for answer in mine)
        accepted = [one.num_accepted for answer in mine for one in answer.passes]
        counts = PassCounts.of_passes(accepted, max(1, options.depth), tokens)
        found[kind] = {"tokens_per_s": tokens / seconds[kind]}
        if kind != "plain":
            found[kind] |= {
                "acceptance_length": counts.acceptance_length,
                "acceptance_per_position": list(counts.acceptance_per_position or ()),
                "draft_ms_per_pass": 1e3 * lap.draft_s / lap.num_steps,
                "verify_ms_per_pass": 1e3 * lap.verify_s / lap.num_steps,
                "lossless": [answer.ids for answer in mine] == own,
            }
    return found


def shown(found: dict[str, dict[str, Any]], depth: int) -> str:
    """The comparison as a Markdown table."""
    head = ["drafter", *(f"pos {k + 1}" for k in range(depth)), "length", "draft ms/pass", "tokens/s", "lossless"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for kind, name in (("eagle3", "EAGLE-3"), ("peagle", "P-EAGLE")):
        one = found[kind]
        rates = [f"{100 * rate:.1f}" for rate in one["acceptance_per_position"]]
        rest = [f"{one['acceptance_length']:.3f}", f"{one['draft_ms_per_pass']:.2f}", f"{one['tokens_per_s']:.0f}"]
        lines.append("| " + " | ".join([name, *rates, *rest, "yes" if one["lossless"] else "NO"]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-seconds", type=float, default=240.0, help="processor time of each training")
    parser.add_argument("--layers", type=int, default=2, help="of both drafters")
    parser.add_argument("--depth", type=int, default=4, help="K: trained, and drafted per pass")
    parser.add_argument("--questions", type=int, default=640, help="training questions that the verifier answers")
    parser.add_argument("--test-questions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, for training and for measuring")
    parser.add_argument("--output", type=Path, help="keep data and checkpoints here, and use what is there")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    log.set_up(quiet=options.json, verbose=False)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "states" / "store.json").exists():
            make_data(folder, options.questions)
        made = {kind: trained(kind, folder, options) for kind in TYPES}
        found = measured({kind: one["checkpoint"] for kind, one in made.items()}, options)
    for kind in TYPES:
        found[kind] |= {name: value for name, value in made[kind].items() if name != "checkpoint"}
    setting = {"layers": options.layers, "depth": options.depth, "cpu_s": options.cpu_seconds}
    result = {**found, "setting": {**setting, "threads": options.threads, "versions": log.versions()}}
    print(json.dumps(result) if options.json else shown(found, options.depth))
    is_sound = all(found[kind]["lossless"] for kind in TYPES)
    return int(not is_sound or found["peagle"]["draft_ms_per_pass"] >= found["eagle3"]["draft_ms_per_pass"])


if __name__ == "__main__":
    sys.exit(main())
