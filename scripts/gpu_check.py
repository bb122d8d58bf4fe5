"""The steps behind `scripts/gpu_check.sh`: `python scripts/gpu_check.py --output FOLDER [--device cpu --toy]`.

In the order of their value, under one deadline. Steps on PyTorch's side share one process (`--worker`), so that imports
and compiled kernels are paid once; the others are commands of `peagle` and pytest. `--toy` runs all of them on a CPU in
small: what it checks is this script.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVING = "not checked: vLLM is no part of this script"
MARK = "RESULT "


@dataclass(frozen=True)
class Setting:
    """Where the steps run, and at what size."""

    device: str
    toy: bool


# -------------------- in one process


def flex(setting: Setting) -> dict[str, Any]:
    """Training steps and validations with FlexAttention against the definition on the CPU, in float64.

    One document each: its length decides how many queries a rollout has (a few, 33 to 127, more than one block).
    """
    import torch

    from benchmarks.gpu_account import Case, differences, drafter_config
    from peagle.train.parallel import World

    on_cpu = World(0, 1, torch.device("cpu"))
    world = World(0, 1, torch.device("cuda", 0)) if setting.device == "cuda" else on_cpu
    head_dim = 16 if setting.toy else 128
    errors = []
    for heads, kv_heads in ((8, 2),) if setting.toy else ((32, 8), (8, 2), (16, 2)):
        sizes = {
            "hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": 96, "draft_vocab_size": 96,
        }  # fmt: skip
        for length in (20, 100) if setting.toy else (4, 14, 60, 85, 100, 460):
            case = Case(
                name=f"{heads}/{kv_heads} heads, {length} tokens",
                config=drafter_config(sizes, "peagle", 4, 1024),
                settings={"num_depths": 4, "total_seq_len": 1024, "epochs": 1, "lr": 1e-3},
                sizes={"block_slots": 1 << 20, "chunk_rows": 512},
                lengths=[length],
                share=0.95,
                padding=0,
                attention="flex",
                seed=length,
            )
            wanted = case.run(on_cpu, "reference", torch.float64)
            for dtype, loss_error, grad_error in ((torch.float32, 1e-3, 5e-3), (torch.bfloat16, 0.03, 0.1)):
                found = differences(case.run(world, "flex", dtype), wanted, loss_error, grad_error)
                errors += [f"{case.name}, {str(dtype)[6:]}: {line}" for line in found]
    return {"differences": errors[:20], "ok": not errors}


def graphs(setting: Setting) -> dict[str, Any]:
    """Graphs that a run with a validation compiles on a GPU: four, whatever its lengths."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    num_steps = 2 if setting.toy else 10
    result = _small_run(setting, "auto", num_steps, "flex")
    found = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    is_right = found == 4 or setting.device == "cpu"
    return {"graphs": found, "steps": len(result.steps), "ok": is_right and len(result.steps) == num_steps}


def step(setting: Setting) -> dict[str, Any]:
    """Optimizer steps at Qwen3-8B's shapes: time, memory, waits; at the chosen block size kernels by name as well."""
    import torch

    from benchmarks.gpu_account import QWEN3_8B, problem
    from benchmarks.gpu_step import TOY, measure
    from peagle.train.parallel import World

    tokens, sizes = (384, TOY) if setting.toy else (8192, QWEN3_8B)
    world = World(0, 1, torch.device(setting.device, 0) if setting.device == "cuda" else torch.device("cpu"))
    found: dict[str, Any] = {"tokens": tokens}
    for block_slots in (0, 64) if setting.toy else (0, 4096, 8192):
        made = problem(sizes, tokens, 4, world, seed=1)
        found[f"block {block_slots or 'chosen'}"] = measure(made, tokens, block_slots, 4, not block_slots)
        del made
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
        print(MARK + json.dumps({"step": "step", "so_far": found}), flush=True)
    return {**found, "ok": True}


def bfloat16(setting: Setting) -> dict[str, Any]:
    """The same run in float32 and in bfloat16; and how many rows of rounded logits have more than one largest."""
    import torch

    runs = {dtype: _small_run(setting, dtype, 4 if setting.toy else 30, "sdpa") for dtype in ("float32", "bfloat16")}
    losses = {dtype: run.validations[-1].loss for dtype, run in runs.items()}
    lengths = {dtype: run.validations[-1].acceptance_length for dtype, run in runs.items()}
    made = torch.Generator().manual_seed(0)
    vocab_size, hidden_size = (1000, 64) if setting.toy else (151_936, 4096)
    weight, states = (torch.randn(n, hidden_size, generator=made).bfloat16() for n in (vocab_size, 256))
    logits = (states.to(setting.device) @ weight.to(setting.device).T).float()
    ties = float(((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).float().mean())
    is_close = abs(losses["bfloat16"] / losses["float32"] - 1) <= 0.02
    is_close = is_close and abs(lengths["bfloat16"] - lengths["float32"]) <= 0.05
    return {"validation_loss": losses, "acceptance_length": lengths, "share_of_ties": ties, "ok": is_close}


def _small_run(setting: Setting, dtype: str, max_steps: int, attention: str) -> Any:
    """A run with a validation on rows of many lengths, heads of 16."""
    import torch

    from benchmarks.gpu_account import RandomRows, drafter_config
    from benchmarks.gpu_step import TOY
    from peagle.drafter.network import Drafter
    from peagle.train.config import FitConfig
    from peagle.train.loop import fit
    from peagle.train.parallel import World
    from peagle.verifier.weights import VerifierHead

    config = drafter_config(TOY, "peagle", 4, 1024)
    torch.manual_seed(0)
    drafter = Drafter(config)
    made = torch.Generator().manual_seed(5)
    weight = torch.randn(config.vocab_size, config.hidden_size, generator=made) * 0.3
    drafter.lm_head.weight.data.copy_(weight)
    head = VerifierHead(
        norm_weight=torch.ones(config.hidden_size), norm_eps=1e-6, weight=weight, logit_scale=1.0, logit_softcap=None
    )
    longest = 60 if setting.toy else 400
    lengths = [int(n) for n in torch.randint(9, longest, (40,), generator=made)]
    rows = RandomRows(lengths, 0.7, config, torch.float32, 1)
    held_out = RandomRows([longest, 17], 0.7, config, torch.float32, 2)
    settings = FitConfig.build(
        {
            "num_depths": 4,
            "total_seq_len": longest + 112,
            "max_steps": max_steps,
            "epochs": 9,
            "dtype": dtype,
            "lr": 1e-3,
        }
        | {"attention": attention}
    )
    is_cuda = setting.device == "cuda"
    world = World(0, 1, torch.device("cuda", 0) if is_cuda else torch.device("cpu"))
    return fit(drafter, head, rows, held_out, settings, world, None, None, None)


WORKER: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "flex": flex,
    "graphs": graphs,
    "step": step,
    "bfloat16": bfloat16,
}


def work(setting: Setting) -> None:
    """Run the steps of the one process, a line of JSON behind each."""
    for name, run in WORKER.items():
        began_s = time.monotonic()
        try:
            result = run(setting)
        except Exception as error:
            traceback.print_exc()
            result = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:400]}"}
        report = {"step": name, "seconds": round(time.monotonic() - began_s, 1), **result}
        print(MARK + json.dumps(report), flush=True)


# -------------------- commands


def commands(setting: Setting, out: Path) -> dict[str, list[str]]:
    """What runs in processes of its own: the tests that need a GPU, and the pipeline on the embedded verifier."""
    python, peagle = [sys.executable], [sys.executable, "-m", "peagle"]
    device = [] if setting.device == "cuda" else ["--device", "cpu"]
    few = setting.toy
    tests = ["tests/gpu", "tests/kernels", "-m", "gpu", "-p", "no:cacheprovider", *["--collect-only"] * few]
    train = ["--num-layers", "1" if few else "2", "--total-seq-len", "1024", "--epochs", "1" if few else "3"]
    return {
        "tests": [*python, "-m", "pytest", *tests],
        "regenerate": [
            *peagle, "regenerate", "--model", "embedded:verifier", "--data", "gsm8k=embedded:train",
            "--output", f"{out}/answers.jsonl", "--max-samples", "4" if few else "256",
            "--max-new-tokens", "24" if few else "200",
        ],
        "prepare": [
            *peagle, "prepare", "--model", "embedded:verifier", "--data", f"{out}/answers.jsonl",
            "--output", f"{out}/prepared", "--seq-length", "1024", "--num-workers", "1" if few else "4",
        ],
        "extract": [*peagle, "extract", "--preprocessed-data", f"{out}/prepared", "--output", f"{out}/states"],
        "train": [
            *peagle, "train", "--verifier-name-or-path", "embedded:verifier", "--data-path", f"{out}/prepared",
            "--hidden-states-path", f"{out}/states", "--save-path", f"{out}/checkpoints", *train, *device,
        ],
        "check": [*peagle, "check", f"{out}/checkpoints/checkpoint_best"],
        "evaluate": [
            *peagle, "evaluate", f"{out}/checkpoints/checkpoint_best", "--data", "gsm8k=embedded:test",
            "--max-samples", "2" if few else "40", "--max-new-tokens", "16" if few else "200",
            "--output", f"{out}/evaluation.json",
        ],
    }  # fmt: skip


class Report:
    """What is known so far: printed as it comes, and written after each step."""

    def __init__(self, path: Path, setting: Setting) -> None:
        self.path = path
        self.found: dict[str, Any] = {"device": setting.device, "toy": setting.toy, **machine(), "serving": SERVING}
        self.steps: dict[str, Any] = {}

    def add(self, name: str, result: dict[str, Any]) -> None:
        """One step's result, or a part of it."""
        self.steps[name] = result
        self.path.write_text(json.dumps({**self.found, "steps": self.steps}, indent=1) + "\n", encoding="utf-8")
        if "so_far" not in result:
            status = "passed" if result.get("ok") else "FAILED"
            rest = {key: value for key, value in result.items() if key not in ("ok", "seconds")}
            print(f"== {name}: {status} in {result.get('seconds', 0)} s  {json.dumps(rest)[:1500]}", flush=True)

    @property
    def num_failed(self) -> int:
        return sum(not result.get("ok") for result in self.steps.values())


def machine() -> dict[str, Any]:
    """The machine and the versions."""
    import torch
    import transformers

    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_gb": round(properties.total_memory / 1e9, 1)}
    return found


def stop(process: subprocess.Popen[Any]) -> None:
    """End a process with all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def run_worker(setting: Setting, out: Path, report: Report, limit_s: float) -> None:
    """The steps of the one process, until its limit."""
    command = [sys.executable, __file__, "--worker", "--output", str(out), "--device", setting.device]
    with open(out / "worker.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command + ["--toy"] * setting.toy, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        timer = threading.Timer(limit_s, stop, (process,))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    result = json.loads(line.removeprefix(MARK))
                    report.add(result.pop("step"), result)
                else:
                    log.write(line)
            process.wait()
        finally:
            timer.cancel()
            stop(process)
    for name in WORKER:
        result = report.steps.get(name)
        if result is None or "so_far" in result:
            why = f"not finished: the process ended ({process.returncode}), see worker.log"
            report.add(name, {"ok": False, "error": why, **{k: v for k, v in (result or {}).items() if k == "so_far"}})


def run_commands(setting: Setting, out: Path, report: Report, deadline_s: float) -> None:
    """The other steps; what needs a failed one's output is not tried."""
    broken = False
    for name, command in commands(setting, out).items():
        left_s = deadline_s - time.monotonic()
        if left_s < 5 or broken:
            report.add(name, {"ok": False, "error": "not run: " + ("a step before it failed" if broken else "no time")})
            continue
        began_s = time.monotonic()
        with open(out / f"{name}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status: int | str = process.wait(timeout=left_s)
            except subprocess.TimeoutExpired:
                status = "out of time"
            finally:
                stop(process)
                process.wait()
        lines = (out / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        ok = status == 0
        broken = broken or (name != "tests" and not ok)
        report.add(
            name,
            {"ok": ok, "seconds": round(time.monotonic() - began_s, 1), "status": status, "end": lines[-1:]},
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--limit-s", type=float, default=290.0, help="the whole check's deadline")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    setting = Setting(args.device, args.toy)
    if args.worker:
        work(setting)
        return 0
    deadline_s = time.monotonic() + args.limit_s
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    out = args.output if args.output.is_absolute() else Path.cwd() / args.output
    report = Report(out / "gpu-check.json", setting)
    print(json.dumps(report.found), flush=True)
    # The process has most of the time; the commands behind it are tried with what is left.
    run_worker(setting, out, report, 0.7 * args.limit_s)
    run_commands(setting, out, report, deadline_s)
    print(f"{report.num_failed} of {len(report.steps)} steps failed; {report.path}. Serving: {SERVING}")
    return min(report.num_failed, 100)


if __name__ == "__main__":
    sys.exit(main())
