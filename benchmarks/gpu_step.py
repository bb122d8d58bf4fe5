"""Time, memory and waits of an optimizer step on a GPU for Qwen3-8B's shapes; needs one.

    python benchmarks/gpu_step.py [--tokens 8192] [--blocks 0 4096 8192] [--profile] [--json]

The training loop itself on packs of six documents, 60 % supervised (`gpu_account.problem`): reading ahead, upload, both
passes, clipping, AdamW, publishing. The figures to set against `gpu_account.py`, which counts the same steps without a
GPU. `--device cpu --toy` runs every line of it on a CPU, with a small drafter: a test of the script, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from benchmarks.gpu_account import QWEN3_8B, Problem, problem
from peagle.train.parallel import World

TOY = {
    "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 96, "draft_vocab_size": 96,
}  # fmt: skip
WARM_UP = 2


class Meter:
    """Watches a run's steps: times them, then profiles one, then notes where one waits for the device."""

    def __init__(self, device: torch.device, num_timed: int, profile: bool) -> None:
        self.device, self.num_timed, self.profile = device, num_timed, profile
        self.seconds: list[float] = []
        self.peak_bytes = 0
        self.waits: Counter[str] = Counter()
        self.profiled: dict[str, Any] = {}
        self._began_s = 0.0
        self._profiler: Any = None
        self._caught: Any = None

    @property
    def num_steps(self) -> int:
        """Steps that it asks for: warm-up, timed, profiled, and one that notes waits."""
        return WARM_UP + self.num_timed + int(self.profile) + 1

    def after(self, index: int) -> None:
        """Behind step `index`: end what was measured of it, begin what is of the next."""
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        if WARM_UP <= index < WARM_UP + self.num_timed:
            self.seconds.append(now_s - self._began_s)
        if index == WARM_UP + self.num_timed - 1 and is_cuda:
            self.peak_bytes = torch.cuda.max_memory_allocated()
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self.profiled = summary(self._profiler, now_s - self._began_s, is_cuda)
            self._profiler = None
        if index == self.num_steps - 1:
            self._note_waits(is_cuda)
            return
        if index == WARM_UP - 1 and is_cuda:
            torch.cuda.reset_peak_memory_stats()
        if self.profile and index == WARM_UP + self.num_timed - 1:
            kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * is_cuda
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.__enter__()
        if index == self.num_steps - 2:
            self._caught = warnings.catch_warnings(record=True)
            self._warnings = self._caught.__enter__()
            warnings.simplefilter("always")
            if is_cuda:
                torch.cuda.set_sync_debug_mode("warn")
        self._began_s = time.perf_counter()

    def _note_waits(self, is_cuda: bool) -> None:
        if is_cuda:
            torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)
        for warning in self._warnings:
            if "synchroniz" in str(warning.message):
                self.waits[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


def summary(profiler: Any, seconds: float, is_cuda: bool) -> dict[str, Any]:
    """Of a profiled step: the share of time without a kernel, and the kernels (on a CPU operations) that take most."""
    kind = torch.autograd.DeviceType.CUDA if is_cuda else torch.autograd.DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == kind]
    busy_us, end = 0.0, float("-inf")
    by_name: Counter[str] = Counter()
    for event in sorted(events, key=lambda event: event.time_range.start):
        busy_us += max(0.0, event.time_range.end - max(end, event.time_range.start))
        end = max(end, event.time_range.end)
        by_name[event.name[:80]] += event.self_device_time_total if is_cuda else event.self_cpu_time_total
    return {
        "idle_share": round(max(0.0, 1 - busy_us / 1e6 / seconds), 3),
        "num_events": len(events),
        "top_ms": {name: round(us / 1e3, 2) for name, us in by_name.most_common(25)},
    }


def measure(made: Problem, tokens: int, block_slots: int, num_timed: int, profile: bool) -> dict[str, Any]:
    """Steps of one block size (0: what training chooses); `made` is used up."""
    device = made.world.device
    if block_slots:
        made = replace(made, plan=replace(made.plan, step=replace(made.plan.step, block_slots=block_slots)))
    meter = Meter(device, num_timed, profile)
    slots = made.run(meter.num_steps, meter.after)
    best = min(meter.seconds)
    return {
        "block_slots": made.plan.step.block_slots,
        "chunk_rows": made.plan.step.chunk_rows,
        "attention": made.plan.step.attention,
        "slots": slots,
        "seconds": round(best, 4),
        "seconds_all": [round(one, 4) for one in meter.seconds],
        "tokens_per_s": round(tokens / best),
        "peak_gb": round(meter.peak_bytes / 1e9, 2),
        "num_waits": sum(meter.waits.values()),
        "waits": dict(meter.waits.most_common(20)),
        **({"profile": meter.profiled} if profile else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--depths", type=int, default=4)
    parser.add_argument("--blocks", type=int, nargs="+", default=[0], help="slots of a block; 0: what training chooses")
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="a small drafter")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu_step.py needs a CUDA device", file=sys.stderr)
        return 2
    world = World(0, 1, torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu"))
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
    report |= {"tokens": args.tokens, "steps": []}
    for block_slots in args.blocks:
        made = problem(TOY if args.toy else QWEN3_8B, args.tokens, args.depths, world, seed=1)
        report["steps"].append(measure(made, args.tokens, block_slots, args.repeat, args.profile))
        del made
    print(json.dumps(report) if args.json else json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
