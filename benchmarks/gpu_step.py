"""Time and peak memory of one step on a GPU for Qwen3-8B's shapes, flex against sdpa and Speculators' flex path.

    python benchmarks/gpu_step.py [--tokens 4096] [--depths 4] [--json]

Needs a CUDA device; Speculators 0.9.0 is compared where it is importable. bfloat16, four layers, one packed batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

QWEN3_8B = {"hidden": 4096, "layers": 4, "heads": 32, "kv_heads": 8, "head_dim": 128, "inter": 12288, "vocab": 151_936}


def measure(run, repeat: int) -> tuple[float, float]:
    """(seconds of the fastest of `repeat` runs after two to warm up, peak GB above what was there before)."""
    import torch

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    best = float("inf")
    for _ in range(repeat):
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best, (torch.cuda.max_memory_allocated() - before) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--depths", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("benchmarks/gpu_step.py needs a CUDA device", file=sys.stderr)
        return 2
    from benchmarks import train_step as cpu
    from peagle.drafter.model_config import DrafterConfig
    from peagle.drafter.network import Drafter
    from peagle.hidden_states.batch import Batch
    from peagle.train.plan import choose_sizes
    from peagle.train.step import StepSettings, num_supervised, train_step
    from peagle.verifier.weights import VerifierHead

    device, dtype = torch.device("cuda"), torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        drafter = Drafter(cpu.drafter_config(DrafterConfig, args, QWEN3_8B)).to(dtype)
    drafter.lm_head.weight.requires_grad_(False)
    made = cpu.inputs(args.tokens, args.depths, QWEN3_8B, 1)
    pairs = args.tokens - 1
    supervised, layout = cpu.layout_of(pairs, args.depths, 2)
    index = torch.arange(pairs)
    batch = Batch(
        pair_ids=made["ids"],
        aux_states=made["aux"],
        rope_pos=index,
        document_ids=torch.zeros(pairs, dtype=torch.int64),
        label_of_pair=torch.where(supervised, index, -1),
        last_states=made["last"],
        row_ids=("0",),
    ).to(device, dtype)
    layout = layout.to(device)
    head = VerifierHead(
        norm_weight=torch.ones(QWEN3_8B["hidden"]),
        norm_eps=1e-6,
        weight=drafter.lm_head.weight.detach(),
        logit_scale=1.0,
        logit_softcap=None,
    )
    head = head.to(device, dtype)
    block_slots, chunk_rows = choose_sizes(8 << 30, QWEN3_8B["hidden"], QWEN3_8B["inter"], QWEN3_8B["vocab"], pairs)
    count = num_supervised(batch, layout)
    report = {"device": torch.cuda.get_device_name(), "tokens": args.tokens, "slots": pairs + layout.num_slots}
    for attention in ("flex", "sdpa"):
        settings = StepSettings(
            loss="kl_div",
            depth_weights=(1.0,) * args.depths,
            attention=attention,
            block_slots=block_slots,
            chunk_rows=chunk_rows,
            checkpoint_base=False,
        )

        def run(settings: StepSettings = settings) -> None:
            drafter.zero_grad(set_to_none=True)
            train_step(drafter, head, batch, layout, count, settings)

        seconds, peak = measure(run, args.repeat)
        report[attention] = {"seconds": round(seconds, 4), "peak_gb": round(peak, 2)}
    print(json.dumps(report) if args.json else "\n".join(f"{k:10} {v}" for k, v in report.items()))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[1]))
    sys.exit(main())
