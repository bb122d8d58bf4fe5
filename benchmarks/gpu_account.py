"""What one optimizer step would cost on a GPU, counted without one: `python benchmarks/gpu_account.py [--json]`.

The training loop itself runs three steps on a pretended GPU (`benchmarks/pretended_gpu.py`) for a drafter of Qwen3-8B's
shapes: indices are real, floats are shapes. A small pack makes the optimizer's state; then everything from the end of
its step to the end of the next is counted: reading ahead, upload, forward, backward, clipping, AdamW, publishing.

Counted: kernels, host synchronisations, bytes, multiply-adds, live memory. From tables: kernels of an operation and the
traffic of fused ones (see the other file). Assumed: the rates below, a large GPU's. So times are estimates, and nothing
here was measured on a GPU.

    seconds = max(products / 400 TFLOP/s + attention / 300 TFLOP/s + bytes / 3 TB/s, kernels x 5 us)
              + synchronisations x 0.1 ms + pageable uploads / 6 GB/s

Launches run ahead of the device as long as it is busier than the host; a synchronisation lets the queue run dry, and an
upload out of pageable memory holds both. `bytes` are those of everything but matrix products, the optimizer included;
`elementwise_gb` is the forward and backward passes' part with the gradients' accumulation, `optimizer_gb` the rest.

`mismatches` counts what goes wrong when random small problems with real numbers train on the pretended GPU and on the
CPU in float64: an operation that mixes devices, a loss or a gradient that differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from benchmarks import pretended_gpu
from benchmarks.pretended_gpu import CUDA, Counts, Device, pretend
from peagle.data.records import TokenRow
from peagle.drafter.model_config import DrafterConfig
from peagle.drafter.network import Drafter
from peagle.hidden_states.batch import StoredRow
from peagle.layout.supervision import Extent, extent, label_positions
from peagle.train import batches, loop
from peagle.train.config import CHAIN_SETTINGS, FitConfig
from peagle.train.parallel import World
from peagle.train.plan import TrainPlan, resolve
from peagle.verifier.weights import VerifierHead

PRODUCTS, ATTENTION, MEMORY = 400e12, 300e12, 3e12
"""Multiply-adds count twice; bytes per second."""
LAUNCH_S, WAIT_S, PAGEABLE = 5e-6, 1e-4, 6e9
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "draft_vocab_size": 151_936,
}  # fmt: skip
TOKENS = (8192, 20480, 131_072)
CHECKPOINTED_FROM = 100_000
SHARE, DOCUMENTS = 0.6, 6


def drafter_config(sizes: dict[str, int], kind: str, depths: int, max_tokens: int) -> DrafterConfig:
    """A drafter of these sizes."""
    is_parallel = kind == "peagle"
    return DrafterConfig.build(
        {
            "speculators_model_type": kind,
            "layer_type": "qwen3" if is_parallel else "llama",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "max_position_embeddings": max_tokens + depths + 8,
            "attention_bias": False,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "aux_layer_ids": (2, 18, 33),
            "mask_token_id": 3 if is_parallel else None,
            "num_speculative_tokens": depths,
            "verifier": "account",
            "verifier_architectures": (),
            **sizes,
        }
    )


class RandomRows:
    """Rows made when they are read. Their floats exist as shapes where `generator` is None."""

    def __init__(
        self, lengths: Sequence[int], share: float, config: DrafterConfig, dtype: torch.dtype, seed: int | None
    ) -> None:
        self.lengths, self.config, self.dtype, self.seed = list(lengths), config, dtype, seed
        self.masks = [[int(i >= max(1, int(n * (1 - share)))) for i in range(n)] for n in self.lengths]

    def extents(self) -> dict[str, Extent]:
        return {f"{self.seed}-{i}": extent(mask, False) for i, mask in enumerate(self.masks)}

    def expect(self, row_ids: Sequence[str]) -> None:
        pass

    def read(self, row_id: str) -> StoredRow:
        index = int(row_id.split("-")[-1])
        mask, hidden = self.masks[index], self.config.hidden_size
        label_pos = torch.tensor(label_positions(mask, False, 0), dtype=torch.int64)
        shapes = (len(mask), 3 * hidden), (len(label_pos), hidden)
        if self.seed is None:
            ids = [index % self.config.vocab_size] * len(mask)
            states = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes]
        else:
            made = torch.Generator().manual_seed(1000 * self.seed + index)
            ids = torch.randint(0, self.config.vocab_size, (len(mask),), generator=made).tolist()
            states = [torch.randn(shape, generator=made, dtype=self.dtype) for shape in shapes]
        row = TokenRow(
            row_id=row_id, source="account", input_ids=ids, loss_mask=mask, next_is_supervised=False, tail_length=0
        )
        return StoredRow(row, states[0], label_pos, states[1])


class _Done(Exception):
    """Ends a run behind the step that is counted."""


@contextlib.contextmanager
def _replaced(*what: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in what]
    try:
        for owner, name, new in what:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)


def count_step(
    tokens: int, depths: int, checkpoint: bool, detail: bool, **settings: Any
) -> tuple[Counts, TrainPlan, int, float]:
    """One optimizer step on a pack of `tokens`: its counts, the plan, slots, and bytes alive before its batch."""
    lengths = [120, *[tokens // DOCUMENTS] * DOCUMENTS, *[tokens // DOCUMENTS] * DOCUMENTS]
    order = [range(1), range(1, DOCUMENTS + 1), range(DOCUMENTS + 1, 2 * DOCUMENTS + 1)]
    config = drafter_config(QWEN3_8B, "peagle", depths, tokens)
    slots = 0
    with pretend(ghost=True) as device:
        device.keep_places = detail
        with torch.device("meta"):
            drafter = Drafter(config)
        head = VerifierHead(
            norm_weight=torch.ones(config.hidden_size),
            norm_eps=1e-6,
            weight=torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device="meta"),
            logit_scale=1.0,
            logit_softcap=None,
        )
        fit = FitConfig.build(
            {"num_depths": depths, "total_seq_len": tokens, "epochs": 1, "activation_checkpointing": checkpoint}
            | settings
        )
        world = World(0, 1, CUDA)
        plan = resolve(fit, config, world)
        rows = RandomRows(lengths, SHARE, config, torch.bfloat16, None)
        packs = [
            batches.Pack(tuple(f"None-{i}" for i in indices), sum(lengths[i] for i in indices)) for indices in order
        ]
        step, lay_out = loop._Loop._step, loop.lay_out
        steps: list[Counts] = []
        alive: list[int] = []

        def counted(self: Any, *args: Any) -> Any:
            if len(steps) == 2:
                raise _Done
            made = step(self, *args)
            device.counts.peak = max(device.counts.peak, device.live)
            steps.append(device.counts)
            alive.append(device.live)
            device.start()
            return made

        def noted(*args: Any) -> Any:
            nonlocal slots
            pack = lay_out(*args)
            slots = pack.batch.pair_ids.numel() + pack.layout.num_slots
            return pack

        changes = [
            (loop._Loop, "_step", counted),
            (loop, "packs", lambda lengths, *_: packs if lengths else []),
            (loop, "lay_out", noted),
            *_phases(device),
        ]
        with _replaced(*changes), contextlib.suppress(_Done):
            loop.fit(
                drafter, head, rows, RandomRows([], 1.0, config, torch.bfloat16, None), plan, world, None, None, None
            )
    return steps[1], plan, slots, alive[0]


def _phases(device: Device) -> list[tuple[Any, str, Any]]:
    """What is the optimizer's, among the places."""
    from peagle.train.masters import Masters
    from peagle.train.optimizer import Optimizer

    def marked(method: Any) -> Any:
        def call(*args: Any) -> Any:
            before, device.phase = device.phase, "optimizer: "
            try:
                return method(*args)
            finally:
                device.phase = before

        return call

    found = [(Optimizer, "step"), (Masters, "norm"), (Masters, "scale"), (Masters, "publish"), (Masters, "drop")]
    return [(owner, name, marked(getattr(owner, name))) for owner, name in found]


def figures(counts: Counts, tokens: int) -> dict[str, Any]:
    """The counts of a step as the report has them."""
    optimizer = sum(n for (_, where), n in counts.moved.items() if where.startswith("optimizer"))
    moved = sum(counts.moved.values())
    pageable = sum(n for (kind, _), n in counts.uploads.items() if kind == "pageable")
    parts = {
        "products_s": counts.flops["product"] / PRODUCTS,
        "attention_s": counts.flops["attention"] / ATTENTION,
        "memory_s": moved / MEMORY,
        "launch_s": counts.num_kernels * LAUNCH_S,
        "sync_s": counts.num_waits * WAIT_S,
        "copy_s": pageable / PAGEABLE,
    }
    on_device = parts["products_s"] + parts["attention_s"] + parts["memory_s"]
    seconds = max(on_device, parts["launch_s"]) + parts["sync_s"] + parts["copy_s"]
    return {
        "syncs_per_step": counts.num_waits,
        "kernels_per_step": counts.num_kernels,
        "elementwise_gb": round((moved - optimizer) / 1e9, 1),
        "optimizer_gb": round(optimizer / 1e9, 1),
        "peak_gb": round(counts.peak / 1e9, 2),
        "tokens_per_s_estimate": round(tokens / seconds),
        "product_tflop": round(counts.flops["product"] / 1e12, 1),
        "attention_tflop": round(counts.flops["attention"] / 1e12, 1),
        **{name: round(value, 4) for name, value in parts.items()},
    }


def account(tokens: int, depths: int, detail: bool, **settings: Any) -> dict[str, Any]:
    """A step's line in the report."""
    checkpoint = tokens >= CHECKPOINTED_FROM
    counts, plan, slots, alive = count_step(tokens, depths, checkpoint, detail, **settings)
    if detail:
        print_detail(counts, tokens)
    return {
        "tokens": tokens,
        "slots": slots,
        "block_slots": plan.step.block_slots,
        "chunk_rows": plan.step.chunk_rows,
        "checkpointing": checkpoint,
        **figures(counts, tokens),
        "before_gb": round(alive / 1e9, 2),
    }


def print_detail(counts: Counts, tokens: int) -> None:
    """Where a step's costs are."""

    def table(title: str, entries: Counter[Any], unit: float, most: int) -> None:
        print(f"\n{tokens} tokens, {title}: {sum(entries.values()) / unit:.4g}")
        for key, value in entries.most_common(most):
            print(f"  {value / unit:10.4g}  {' '.join(key) if isinstance(key, tuple) else key}")

    by_operation: Counter[str] = Counter()
    for (name, _), value in counts.moved.items():
        by_operation[name] += value
    table("GB by operation", by_operation, 1e9, 30)
    table("GB by place", counts.moved, 1e9, 50)
    table("GB of matrix products", Counter({"all": counts.product_bytes}), 1e9, 1)
    table("TFLOP of products by place", counts.product_flops, 1e12, 20)
    table("kernels", counts.kernels, 1, 40)
    table("synchronisations", counts.waits, 1, 40)
    table("MB uploaded", counts.uploads, 1e6, 20)
    table("GB alive at the peak, by place of allocation", Counter(counts.at_peak), 1e9, 40)


# -------------------- mismatches


def _small(case: random.Random, kind: str) -> dict[str, int]:
    heads = case.choice([(2, 1), (4, 2), (3, 1), (2, 2)])
    return {
        "hidden_size": 24, "intermediate_size": 32, "num_layers": case.choice([1, 2]), "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "head_dim": 8, "vocab_size": 40, "draft_vocab_size": 40,
    }  # fmt: skip


def _train(
    config: DrafterConfig, rows: RandomRows, validation: RandomRows, plan: TrainPlan, world: World, padding: int
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses of the steps and of the validation, and each step's gradients, on the CPU."""
    torch.manual_seed(0)
    drafter = Drafter(config).double()
    if drafter.mask_hidden is not None:
        torch.nn.init.normal_(drafter.mask_hidden)
    made = torch.Generator().manual_seed(11)
    weight = torch.randn(config.vocab_size, config.hidden_size, generator=made, dtype=torch.float64)
    drafter.lm_head.weight.data.copy_(weight * 0.3)
    head = VerifierHead(
        norm_weight=torch.ones(config.hidden_size, dtype=torch.float64),
        norm_eps=1e-6,
        weight=weight,
        logit_scale=1.0,
        logit_softcap=None,
    )
    found: list[dict[str, torch.Tensor]] = []
    step, pack = loop.Optimizer.step, batches.pack

    def keep(self: Any, factor: float) -> None:
        grads = {name: tensor.grad for name, tensor in self._masters.tensors.items()}
        found.append({name: pretended_gpu.on_host(grad).clone() for name, grad in grads.items()})
        step(self, factor)

    def padded(stored: list[StoredRow], num_pairs: int | None) -> Any:
        return pack(stored, sum(len(one.row.input_ids) - 1 for one in stored) + padding)

    with _replaced((loop.Optimizer, "step", keep), (batches, "pack", padded)):
        result = loop.fit(drafter, head, rows, validation, plan, world, None, None, None)
    losses = [one.loss for one in result.steps] + [one.loss for one in result.validations]
    return losses, found


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small problem with real numbers, drawn from its number."""

    name: str
    config: DrafterConfig
    settings: dict[str, Any]
    sizes: dict[str, int]
    lengths: list[int]
    share: float
    padding: int
    attention: str
    seed: int

    @staticmethod
    def draw(number: int) -> Case:
        """Every fourth an EAGLE-3 chain; of the others every second with flex."""
        draw = random.Random(number)
        kind = "eagle3" if number % 4 == 3 else "peagle"
        depths = draw.choice([1, 2, 4])
        lengths = [draw.randint(8, 120) for _ in range(draw.randint(1, 5))]
        attention = "flex" if kind == "peagle" and number % 2 == 0 else "sdpa"
        loss = draw.choice(["kl_div", "ce", "tv"])
        settings = {
            "num_depths": depths, "total_seq_len": 800, "epochs": 1, "lr": 1e-3, "loss_fn": loss,
            "activation_checkpointing": draw.random() < 0.4, **(CHAIN_SETTINGS if kind == "eagle3" else {}),
        }  # fmt: skip
        sizes = {"block_slots": draw.choice([40, 90, 1000]), "chunk_rows": draw.choice([8, 64])}
        return Case(
            name=f"case {number} ({kind}, {attention}, {loss}, lengths {lengths}, {sizes})",
            config=drafter_config(_small(draw, kind), kind, depths, 400),
            settings=settings,
            sizes=sizes,
            lengths=lengths,
            share=draw.choice([0.3, 0.6, 0.95]),
            padding=draw.choice([0, 0, 5]),
            attention=attention,
            seed=number + 1,
        )

    def run(self, world: World, attention: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
        """Train and validate; see `_train`."""
        plan = resolve(FitConfig.build({**self.settings, "attention": attention}), self.config, world)
        plan = replace(plan, dtype=torch.float64, step=replace(plan.step, **self.sizes))
        rows = RandomRows(self.lengths, self.share, self.config, torch.float64, self.seed)
        held_out = RandomRows(self.lengths[:1], 0.9, self.config, torch.float64, self.seed + 10_000)
        return _train(self.config, rows, held_out, plan, world, self.padding)


def check(num_cases: int, first: int) -> list[str]:
    """Train random small problems on the pretended GPU and on the CPU, in float64: what differs, a line each."""
    problems = []
    for number in range(first, first + num_cases):
        case = Case.draw(number)
        expected_losses, expected = case.run(World(0, 1, torch.device("cpu")), "reference")
        try:
            with pretend(ghost=False):
                losses, grads = case.run(World(0, 1, CUDA), case.attention)
        except (RuntimeError, AssertionError) as error:
            problems.append(f"{case.name}: {error}")
            continue
        if len(losses) != len(expected_losses) or len(grads) != len(expected) or not grads:
            problems.append(f"{case.name}: {len(losses)} losses, expected {len(expected_losses)}")
        for index, (loss, wanted) in enumerate(zip(losses, expected_losses)):
            if not math.isclose(loss, wanted, rel_tol=1e-9):
                problems.append(f"{case.name}: loss {index} is {loss}, expected {wanted}")
        for index, (ours, theirs) in enumerate(zip(grads, expected)):
            for key, grad in ours.items():
                if not (grad - theirs[key]).norm() <= 1e-7 * max(1e-6, theirs[key].norm()):
                    problems.append(f"{case.name}: step {index}, the gradient of {key} differs")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--depths", type=int, default=4)
    parser.add_argument("--cases", type=int, default=16, help="random problems for `mismatches`")
    parser.add_argument("--detail", action="store_true", help="bytes, kernels, synchronisations, live memory by place")
    parser.add_argument("--json", action="store_true", help="one line of JSON, the last")
    args = parser.parse_args()
    began_s = time.monotonic()
    problems = check(args.cases, 0)
    for problem in problems:
        print(problem, file=sys.stderr)
    steps = [account(tokens, args.depths, args.detail) for tokens in args.tokens]
    report = {"mismatches": len(problems), **steps[0], "others": steps[1:]}
    report["wall_s"] = round(time.monotonic() - began_s, 1)
    if args.json:
        print(json.dumps(report))
    else:
        for line in steps:
            print("\n".join(f"{key:22} {value}" for key, value in line.items()), end="\n\n")
        print("mismatches", len(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
