"""Time and memory of one training step against Speculators 0.9.0: same weights, same layout, same machine.

    .venv/bin/python benchmarks/train_step.py --tokens 2048 [--json] [--no-peer] [--repeat 3]

Each side runs in a process of its own on one thread, in turns. Ours is timed between two runs of the best float32
matrix product of the same process, which gives `limit_ratio`: step time over (fewest possible multiply-adds / that
rate). The peer is Speculators' model class with sdpa attention, eager loss and no anchor limit; it is installed into
`.venv-peer` on first use. Without `--no-peer` the losses and gradients of the two are compared too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".venv-peer"
PEER_PACKAGES = ["torch==2.13.0", "transformers", "datasets", "safetensors", "pydantic", "pydantic-settings", "loguru"]
PEER_PACKAGES += ["typer", "rich", "httpx", "openai", "numpy"]
SIZES = {"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 64, "inter": 2048, "vocab": 32_000}


def rss_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def inputs(tokens: int, depths: int, sizes: dict, seed: int) -> dict:
    """One document, supervised but for its first position; the layout of ratio 0.7 and floor 0.2."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    pairs = tokens - 1
    return {
        "ids": torch.randint(0, sizes["vocab"], (pairs,), generator=generator),
        "aux": torch.randn(pairs, 3 * sizes["hidden"], generator=generator),
        "last": torch.randn(pairs, sizes["hidden"], generator=generator),
    }


def layout_of(pairs: int, depths: int, seed: int):
    import torch

    from peagle.layout import sample

    supervised = torch.ones(pairs, dtype=torch.bool)
    supervised[0] = False
    generator = torch.Generator().manual_seed(seed)
    return supervised, sample(supervised, torch.zeros(pairs, dtype=torch.int64), depths, 0.7, 0.2, [generator])


def minimal_multiply_adds(pairs: int, layout, supervised: int, sizes: dict) -> float:
    """Multiply-adds nobody can do without: no recomputation, no gradient of the head, the verifier once per label.

    Projections count three times (forward, inputs' and weights' gradients); layer 0 of the mask slots is one vector;
    a frozen input needs no gradient (`fc`). Attention counts visible (query, key) pairs: two forward, four back.
    """
    h, heads, kv, d, inter = (sizes[key] for key in ("hidden", "heads", "kv_heads", "head_dim", "inter"))
    deep = layout.num_slots
    slots = pairs + deep
    first = 2 * h * (heads + 2 * kv) * d
    later = h * (heads + 2 * kv) * d
    rest = heads * d * h + 3 * h * inter
    total = 2.0 * pairs * 3 * h * h
    total += 3.0 * pairs * first + 3.0 * slots * (sizes["layers"] - 1) * later + 3.0 * slots * sizes["layers"] * rest
    seen = pairs * (pairs + 1) / 2 + float((layout.anchor_pos + 1 + layout.depth).sum())
    total += 6.0 * seen * heads * d * sizes["layers"]
    total += 2.0 * (supervised + deep) * h * sizes["vocab"] + supervised * h * sizes["vocab"]
    return total


def our_worker(options: argparse.Namespace) -> None:
    import torch

    from peagle.drafter.model_config import DrafterConfig
    from peagle.drafter.network import Drafter
    from peagle.hidden_states.batch import Batch
    from peagle.kernels.cpu import native_attention_problem
    from peagle.train.blocks import StepSettings
    from peagle.train.step import keep_pages, num_supervised, train_step
    from peagle.verifier.weights import VerifierHead

    torch.set_num_threads(1)
    keep_pages()  # as training does
    sizes = SIZES
    torch.manual_seed(0)
    drafter = Drafter(drafter_config(DrafterConfig, options, sizes))
    if options.weights and Path(options.weights).exists():
        from safetensors.torch import load_file

        loaded = load_file(options.weights)
        head_weight = loaded.pop("verifier_lm_head.weight")
        norm_weight = loaded.pop("verifier_norm.weight")
        drafter.load_state_dict(loaded)
    else:
        head_weight = drafter.lm_head.weight.detach().clone()
        norm_weight = torch.ones(sizes["hidden"])
    drafter.lm_head.weight.requires_grad_(False)
    made = inputs(options.tokens, options.depths, sizes, 1)
    pairs = options.tokens - 1
    supervised, layout = layout_of(pairs, options.depths, 2)
    index = torch.arange(pairs)
    batch = Batch(
        pair_ids=made["ids"],
        aux_states=made["aux"],
        rope_pos=index,
        document_ids=torch.zeros(pairs, dtype=torch.int64),
        label_of_pair=torch.where(supervised, index, -1),
        last_states=made["last"],
        row_ids=("0",),
    )
    head = VerifierHead(norm_weight=norm_weight, norm_eps=1e-6, weight=head_weight, logit_scale=1.0, logit_softcap=None)
    count = num_supervised(batch, layout)
    problem = native_attention_problem(torch.device("cpu"), torch.float32, sizes["head_dim"])
    attention = options.attention or ("sdpa" if problem else "native")
    settings = StepSettings(
        loss="kl_div",
        depth_weights=(1.0,) * options.depths,
        attention=attention,
        block_slots=options.block,
        chunk_rows=options.chunk,
        checkpoint_base=options.checkpoint,
    )
    macs = minimal_multiply_adds(pairs, layout, int(supervised.sum()), sizes)
    left, right, out = torch.randn(2048, 1024), torch.randn(1024, 2048), torch.empty(2048, 2048)
    torch.mm(left, right, out=out)

    def rate() -> float:
        best = 0.0
        for _ in range(12):
            begin = time.perf_counter()
            torch.mm(left, right, out=out)
            best = max(best, 2048 * 1024 * 2048 / (time.perf_counter() - begin))
        return best

    start_bytes = rss_bytes("VmRSS")
    for line in sys.stdin:
        if line.strip() != "step":
            break
        for parameter in drafter.parameters():
            parameter.grad = None
        before = rate()
        begin = time.perf_counter()
        result = train_step(drafter, head, batch, layout, count, settings)
        seconds = time.perf_counter() - begin
        best = max(before, rate())
        report = {
            "attention": attention,
            "seconds": seconds,
            "gb": (rss_bytes("VmHWM") - start_bytes) / 1e9,
            "loss": result.loss_sum.sum().item() / count,
            "limit_s": macs / best,
            "rate": best,
            "slots": pairs + layout.num_slots,
            "gradients": {n: p.grad.norm().item() for n, p in drafter.named_parameters() if p.grad is not None},
        }
        print(json.dumps(report), flush=True)


def drafter_config(config_type, options: argparse.Namespace, sizes: dict):
    return config_type.build(
        {
            "speculators_model_type": "peagle",
            "layer_type": "llama",
            "hidden_size": sizes["hidden"],
            "intermediate_size": sizes["inter"],
            "num_layers": sizes["layers"],
            "num_attention_heads": sizes["heads"],
            "num_key_value_heads": sizes["kv_heads"],
            "head_dim": sizes["head_dim"],
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": options.tokens + options.depths,
            "attention_bias": False,
            "vocab_size": sizes["vocab"],
            "draft_vocab_size": sizes["vocab"],
            "norm_before_residual": False,
            "norm_before_fc": False,
            "aux_layer_ids": (2, 18, 33),
            "mask_token_id": 3,
            "num_speculative_tokens": options.depths,
            "verifier": "benchmark",
            "verifier_architectures": (),
        }
    )


def peer_worker(options: argparse.Namespace) -> None:
    """Speculators' own model, given our layout instead of its random one."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its forward is compiled only on GPUs
    import torch

    torch.set_num_threads(1)
    sys.path.append(str(ROOT / "src"))
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core
    from speculators.models.peagle.config import PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    sizes = SIZES
    torch.manual_seed(0)
    layers = LlamaConfig(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inter"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab"],
        rms_norm_eps=1e-6,
        max_position_embeddings=options.tokens + options.depths,
    )
    layers._attn_implementation = "sdpa"
    model = core.PEagleDraftModel(
        PEagleSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=sizes["vocab"],
            eagle_aux_hidden_state_layer_ids=[2, 18, 33],
            mask_token_id=3,
            speculators_config=SpeculatorsConfig(
                algorithm="peagle",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=options.depths)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    # Weights come from us, so that both sides start alike.
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            else:
                parameter.fill_(1.0)
        model.mask_hidden.copy_(torch.randn(model.mask_hidden.shape, generator=generator))
    model.lm_head.weight.requires_grad_(False)
    model.verifier_lm_head.weight.requires_grad_(False)
    if options.weights:
        from safetensors.torch import save_file

        kept = {n: t.contiguous().clone() for n, t in model.state_dict().items() if n not in ("d2t", "t2d")}
        save_file(kept, options.weights)
    made = inputs(options.tokens, options.depths, sizes, 1)
    pairs = options.tokens - 1
    supervised, layout = layout_of(pairs, options.depths, 2)
    anchor = torch.cat([torch.arange(pairs), layout.anchor_pos])
    depth = torch.cat([torch.zeros(pairs, dtype=torch.int64), layout.depth])
    order = torch.argsort(depth * pairs + anchor)
    core.generate_cod_sample_indices = lambda **_: (anchor[order], depth[order])
    loss_config = resolve_loss_config("kl_div", "eager")
    print("ready", flush=True)
    start_bytes = rss_bytes("VmRSS")
    for line in sys.stdin:
        if line.strip() != "step":
            break
        model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        _, loss, _ = model(
            hidden_states=made["aux"][None],
            input_ids=made["ids"][None],
            document_ids=torch.zeros(1, pairs, dtype=torch.int64),
            loss_mask=supervised.float()[None],
            verifier_last_hidden_states=made["last"][None],
            loss_config=loss_config,
            num_depths=options.depths,
        )
        loss.backward()
        report = {
            "seconds": time.perf_counter() - begin,
            "gb": (rss_bytes("VmHWM") - start_bytes) / 1e9,
            "loss": loss.item(),
            "gradients": {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None},
        }
        print(json.dumps(report), flush=True)


def ensure_peer() -> Path:
    """The peer's Python; installs it on first use."""
    python = PEER / "bin" / "python"
    if not (PEER / "ready").exists():
        print("installing Speculators 0.9.0 into .venv-peer (once)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *PEER_PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"], check=True)
        (PEER / "ready").touch()
    return python


def start(python: str, role: str, arguments: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [python, __file__, "--worker", role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def ask(worker: subprocess.Popen) -> dict | None:
    """One step; None when the worker died (out of memory, for the peer at length)."""
    try:
        worker.stdin.write("step\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
        return json.loads(line) if line else None
    except BrokenPipeError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--depths", type=int, default=8)
    parser.add_argument("--attention", help="by default native where the processor runs it, else sdpa")
    parser.add_argument("--block", type=int, default=0, help="slots of a block; 0: what training would choose")
    parser.add_argument("--chunk", type=int, default=0, help="rows of the head at a time; 0 likewise")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=("ours", "peer"))
    parser.add_argument("--weights", default="")
    options = parser.parse_args()
    if options.worker != "peer" and not (options.block and options.chunk):
        from peagle.train.config import FitConfig
        from peagle.train.plan import Shape, choose_sizes

        shape = Shape(
            hidden_size=SIZES["hidden"],
            intermediate_size=SIZES["inter"],
            draft_vocab_size=SIZES["vocab"],
            num_keys=options.tokens,
        )
        block, chunk = choose_sizes(FitConfig().scratch_bytes(None), shape)
        options.block = options.block or block
        options.chunk = options.chunk or chunk
    if options.worker:
        (our_worker if options.worker == "ours" else peer_worker)(options)
        return 0

    weights = ROOT / f".bench-weights-{os.getpid()}.safetensors"
    shared = ["--tokens", str(options.tokens), "--depths", str(options.depths), "--weights", str(weights)]
    ours_only = ["--block", str(options.block), "--chunk", str(options.chunk)]
    ours_only += ["--attention", options.attention] if options.attention else []
    ours_only += ["--checkpoint"] if options.checkpoint else []
    ours, theirs = [], []
    try:
        peer = None
        if not options.no_peer:
            peer = start(str(ensure_peer()), "peer", shared)
            peer.stdout.readline()
        own = start(sys.executable, "ours", [*shared, *ours_only])
        for _ in range(options.repeat):
            ours.append(ask(own))
            if peer is not None:
                theirs.append(ask(peer))
                if theirs[-1] is None:
                    peer = None
        for worker in (own, peer):
            if worker is not None:
                worker.stdin.close()
                worker.wait()
    finally:
        weights.unlink(missing_ok=True)
    best = min(ours, key=lambda r: r["seconds"])
    report = {
        "tokens": options.tokens,
        "attention": best["attention"],
        "slots": best["slots"],
        "seconds": round(best["seconds"], 3),
        "peak_gb": round(max(r["gb"] for r in ours), 3),
        "limit_ratio": round(min(r["seconds"] / r["limit_s"] for r in ours), 3),
        "matmul_gmac_per_s": round(best["rate"] / 1e9, 1),
        "block_slots": options.block,
        "chunk_rows": options.chunk,
        "speedup": None,
        "memory_ratio": None,
    }
    answered = [r for r in theirs if r]
    if answered:
        their_best = min(r["seconds"] for r in answered)
        report["peer_seconds"] = round(their_best, 3)
        report["peer_peak_gb"] = round(max(r["gb"] for r in answered), 3)
        report["speedup"] = round(their_best / best["seconds"], 3)
        report["memory_ratio"] = round(max(r["gb"] for r in ours) / max(r["gb"] for r in answered), 4)
        report["loss_error"] = abs(best["loss"] - answered[0]["loss"]) / abs(answered[0]["loss"])
        norms = answered[0]["gradients"]
        report["gradient_norm_error"] = max(
            abs(best["gradients"][n] - norms[n]) / max(norms[n], 1e-12) for n in best["gradients"] if n in norms
        )
    elif theirs:
        report["peer"] = "did not fit the memory"
    if options.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:22} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
