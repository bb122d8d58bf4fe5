"""What compute a training recipe needs: ours against Speculators' own model class and settings, on the same rows.

    .venv/bin/python benchmarks/recipe.py [--json] [--output FOLDER] [--study] [--tune]

The embedded verifier answers its training questions. Both sides train a drafter of 4 layers and 4 depths on these
answers, in the same packs in the same order, and are scored by the same code: the acceptance length of `peagle
evaluate --mode replay` on the verifier's own greedy answers to the 100 test questions, which nobody trained on. The
control is `PEagleDraftModel` of Speculators 0.9.0, made by its `from_training_args` and stepped by its
`build_optimizers`, with its defaults, in a plain loop (it has no CPU trainer); then the same with its learning rate
tuned. Ours is `peagle train` with its defaults, its whole schedule within a third (0.7) of the control's compute.

Compute is counted, not timed: multiply-adds of `train_step.minimal_multiply_adds` for the slots that each side really
drew, document by document, and of Muon's iterations. One formula for both; nobody's recomputation is counted.

Without flags: one seed, and the best learning rate that the study found for the control. `--study`: three learning
rates and three seeds. `--tune`: other settings of ours, judged on 100 training questions that were held back. Finished
runs are kept in `--output` and not done again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from train_step import ensure_peer, minimal_multiply_adds

LAYERS, DEPTHS, RATIO, RATIO_MIN = 4, 4, 0.7, 0.2
SIZES = {"hidden": 192, "layers": LAYERS, "heads": 3, "kv_heads": 1, "head_dim": 64, "inter": 576, "vocab": 2048}
ANSWER_LIMIT = 200
HELD_BACK = 100  # training questions that only `--tune` looks at
DEFAULT_LR = 1e-3  # of Speculators 0.9.0
TRIED_LRS = (4e-3, 8e-3, 1.6e-2)
BEST_LR = 4e-3
SEEDS = (0, 1, 2)
MAX_ANCHORS = 512  # its default; packs of 512 tokens never have more
SHARE_OF_DEFAULT, SHARE_OF_TUNED = 1 / 3, 0.7
MASK_HIDDEN = "mask_hidden"  # no setting of `peagle train`: what it starts from
# What a kept run of ours is known by, beside its steps and its seed.
RECIPE = ("init_layers", "num_depths", "loss_fn", "depth_loss_decay", "optimizer", "lr", "muon_lr", "embedding_lr")
RECIPE += ("weight_decay", "muon_weight_decay", "muon_momentum", "adam_beta2", "max_grad_norm", "train_embeddings")
RECIPE += ("scheduler_type", "scheduler_warmup_ratio", "norm_before_residual", "norm_before_fc")
NO_DECAY: dict[str, Any] = {"depth_loss_decay": 1.0}
FORMER: dict[str, Any] = {"optimizer": "muon", "lr": 8e-4, "scheduler_type": "cosine", **NO_DECAY}
# Steps towards the defaults, and their neighbours. Measured on three seeds, or where the step before was the best.
TRIED: list[dict[str, Any]] = [
    {},
    FORMER,
    {"scheduler_type": "cosine", **NO_DECAY},
    {**NO_DECAY},
    {"lr": 3e-3, **NO_DECAY},
    {"adam_beta2": 0.999, **NO_DECAY},
    {"weight_decay": 0.1, **NO_DECAY},
    {"scheduler_warmup_ratio": 0.05, **NO_DECAY},
]


# -------------------- compute


def pack_multiply_adds(document_ids: Any, supervised: Any, anchor_pos: Any, depth: Any) -> float:
    """Fewest multiply-adds of one step over a pack: the sum over its documents.

    Args:
        document_ids, supervised: of each pair slot, [num_pairs].
        anchor_pos, depth: of each slot of depth 1 and more.
    """
    total = 0.0
    for document in document_ids.unique().tolist():
        inside = (document_ids == document).nonzero()[:, 0]
        first = int(inside[0])
        mine = document_ids[anchor_pos] == document
        slots = SimpleNamespace(
            num_slots=int(mine.sum()), anchor_pos=anchor_pos[mine] - first, depth=depth[mine]
        )  # what the formula reads of a layout
        total += minimal_multiply_adds(len(inside), slots, int(supervised[inside].sum()), SIZES)
    return total


def muon_multiply_adds(shapes: list[tuple[int, ...]]) -> float:
    """Five Newton-Schulz iterations for each matrix that Muon steps: x x', its square, and their product with x."""
    pairs = [(min(shape), max(shape)) for shape in shapes]
    return float(sum(5 * (2 * short * short * long + short**3) for short, long in pairs))


def fit_multiply_adds(lengths: list[int]) -> float:
    """Before the first step, layer 0 is fitted on documents of these lengths (`train.first_layer`): sums and solves."""
    h, aux, q, kv = SIZES["hidden"], 3 * SIZES["hidden"], 3 * SIZES["head_dim"], SIZES["head_dim"]
    each = aux * (aux + h) + 2 * aux * h  # sums of the first solve; `fc` for the other two
    each += 2 * h * (2 * h + h) + q * (q + h)  # sums of the second and the third
    each += 3 * h * (q + 2 * kv) + 2 * q * h  # projections, the verifier's and ours
    seen = sum(length * (length + 1) / 2 for length in lengths)
    solves = sum(size**3 + size * size * h for size in (aux, 2 * h, q)) + 2 * h * h * (q + 2 * kv)
    return sum(lengths) * each + 4.0 * seen * q + solves


# -------------------- peer


def peer_worker(job_path: Path) -> None:
    """Train Speculators' model on one thread: everything that the job does not name is its own default."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its forward is compiled only on GPUs
    import torch

    torch.set_num_threads(1)
    from safetensors.torch import load_file, save_file
    from speculators.models.peagle import core
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.config import TrainConfig
    from speculators.train.optimizers import build_optimizers, split_named_params_for_muon
    from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
    from transformers import get_linear_schedule_with_warmup

    job = json.loads(job_path.read_text())
    chosen = {
        "verifier_name_or_path": job["verifier"],
        "speculator_type": "peagle",
        "num_layers": LAYERS,
        "num_depths": DEPTHS,
        "mask_token_id": job["mask_token_id"],
        "draft_attn_impl": "sdpa",
        "loss_implementation": "eager",
        "hidden_states_dtype": "float32",
        "lr": job["lr"],
        "max_anchors": job["max_anchors"],
    }
    args = TrainConfig.from_flat(chosen).flatten()
    args["draft_vocab_size"] = SIZES["vocab"]
    assert (args["down_sample_ratio"], args["down_sample_ratio_min"]) == (RATIO, RATIO_MIN)
    assert (args["optimizer"], args["muon_lr"], args["scheduler_type"]) == ("muon", job["lr"], "linear")
    torch.manual_seed(job["seed"])
    layers = create_transformer_layer_config(
        args["verifier_name_or_path"],
        args["num_layers"],
        args["draft_arch"],
        args["draft_hidden_act"],
        args["sliding_window"],
        args["full_attention_indices"],
    )
    model = core.PEagleDraftModel.from_training_args(verifier_config=layers, **args)
    model.train()
    rows = load_file(job["rows"])
    starts, lengths = rows["starts"].tolist(), rows["lengths"].tolist()
    of_row = [slice(start, start + length) for start, length in zip(starts, lengths)]
    keywords = model.get_trainer_kwargs(**args)[0]
    fields = {name: args[name] for name in TrainerConfig._fields if name in args}
    settings = TrainerConfig(num_epochs=1, **{**fields, "max_steps": len(job["packs"])})
    optimizers = build_optimizers(model, settings)
    warmup, total = _resolve_scheduler_steps(settings, len(job["packs"]))
    schedulers = [get_linear_schedule_with_warmup(one, warmup, total) for one in optimizers]
    drawn: list[tuple[Any, Any]] = []
    sample = core.generate_cod_sample_indices

    def watched(**given: Any) -> tuple[Any, Any]:
        drawn.append(sample(**given))
        return drawn[-1]

    core.generate_cod_sample_indices = watched
    matrices = split_named_params_for_muon(model)[0]
    per_step = muon_multiply_adds([tuple(parameter.shape) for _, parameter in matrices])
    began_s, macs, slots, losses = time.process_time(), 0.0, 0, []
    for step, pack in enumerate(job["packs"]):
        ids, aux, last, mask = (
            torch.cat([rows[name][of_row[r]] for r in pack]) for name in ("ids", "aux", "last", "mask")
        )
        documents = torch.cat([torch.full((lengths[r],), i) for i, r in enumerate(pack)])
        _, loss, _ = model(
            hidden_states=aux[None],
            input_ids=ids[None],
            document_ids=documents[None],
            loss_mask=mask[None],
            verifier_last_hidden_states=last[None],
            **keywords,
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
        anchor, depth = drawn.pop()
        deep = depth > 0
        macs += pack_multiply_adds(documents, mask > 0, anchor[deep], depth[deep]) + per_step
        slots += len(anchor)
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"peer step {step} of {len(job['packs'])}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    kept = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items() if "verifier_" not in name}
    save_file(kept, job["weights"])
    report = {
        "multiply_adds": macs,
        "slots": slots,
        "steps": len(job["packs"]),
        "loss": statistics.fmean(losses[-20:]),
        "cpu_s": round(time.process_time() - began_s, 1),
    }
    Path(job["report"]).write_text(json.dumps(report))


# -------------------- data


def make_data(folder: Path, questions: int) -> None:
    """Questions, the verifier's greedy answers with a tail, and the states of the answers to train on."""
    from peagle import embedded
    from peagle.data.config import PrepareConfig
    from peagle.data.prepare import prepare
    from peagle.hidden_states.config import ExtractConfig
    from peagle.hidden_states.extract import extract
    from peagle.regenerate.config import RegenerateConfig
    from peagle.regenerate.run import regenerate

    lines = embedded.TRAIN_QUESTIONS.read_text(encoding="utf-8").splitlines()
    test = embedded.TEST_QUESTIONS.read_text(encoding="utf-8").splitlines()
    sets = {"train": lines[: min(questions, len(lines) - HELD_BACK)], "tune": lines[-HELD_BACK:], "test": test}
    for name, some in sets.items():
        asked = folder / f"{name}-questions.jsonl"
        asked.write_text("".join(line + "\n" for line in some), encoding="utf-8")
        values = {"model": str(embedded.VERIFIER), "data": [f"gsm8k={asked}"], "output": folder / f"{name}.jsonl"}
        more = {"max_new_tokens": ANSWER_LIMIT, "batch_size": 64, "dtype": "float32", "tail_tokens": DEPTHS}
        regenerate(RegenerateConfig.build({**values, **more}))
    rows = {"model": str(embedded.VERIFIER), "data": [str(folder / "train.jsonl")], "output": folder / "rows"}
    prepare(PrepareConfig.build({**rows, "seq_length": 1024}))
    states = {"preprocessed_data": folder / "rows", "output": folder / "states", "dtype": "float32"}
    extract(ExtractConfig.build(states))


class Bench:
    """The data of one work folder, its runs, and how they are scored.

    Args:
        folder: data and finished runs.
        options: of the command line.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        import torch

        from peagle import embedded
        from peagle.hidden_states.store import StoreReader
        from peagle.train.decision import decide
        from peagle.train.sources import StoreRows
        from peagle.verifier.model_config import load_verifier_config

        torch.set_num_threads(1)
        self.folder, self.options, self.verifier = folder, options, str(embedded.VERIFIER)
        if not (folder / "states" / "store.json").exists():
            make_data(folder, options.questions)
        self.verifier_config = load_verifier_config(self.verifier, False)
        self.decision = decide(self.config(0, 1, {}, folder))
        extents = self.decision.extents(self.decision.train)
        self.lengths = {row_id: extent.num_tokens for row_id, extent in extents.items() if extent.num_tokens}
        self.rows = StoreRows(StoreReader.open(folder / "states"), extents)
        self.answers = {name: self.recorded(name) for name in ("tune", "test")}

    def config(self, seed: int, steps: int, changes: dict[str, Any], save_path: Path) -> Any:
        """`peagle train` with its defaults, but for what the comparison fixes and `changes`."""
        from peagle.train.config import TrainConfig

        fixed = {
            "verifier_name_or_path": self.verifier,
            "data_path": self.folder / "rows",
            "hidden_states_path": self.folder / "states",
            "save_path": save_path,
            "num_layers": LAYERS,
            "num_depths": DEPTHS,
            "down_sample_ratio": RATIO,
            "down_sample_ratio_min": RATIO_MIN,
            "total_seq_len": self.options.tokens,
            "epochs": 1000,
            "max_steps": steps,
            "seed": seed,
            "checkpoint_freq": 1000,
            "train_data_ratio": 1.0,
            "save_dtype": "float32",
        }
        return TrainConfig.build({**fixed, **changes})

    def plan(self, config: Any) -> Any:
        """The same with everything settled, on one thread of a CPU."""
        from peagle.train.parallel import World
        from peagle.train.plan import resolve

        return resolve(config, self.decision.drafter_config(), World(0, 1, torch_device()))

    def packs_of(self, seed: int) -> Iterator[tuple[int, Any]]:
        """(epoch, pack) of each step, without end, the same for both sides."""
        from peagle.train.batches import packs

        for epoch in itertools.count():
            yield from ((epoch, one) for one in packs(self.lengths, self.options.tokens, seed, epoch))

    def steps_of_epochs(self, seed: int, epochs: int) -> int:
        """Steps of whole epochs."""
        from peagle.train.batches import packs

        return sum(len(packs(self.lengths, self.options.tokens, seed, epoch)) for epoch in range(epochs))

    def start_cost(self, config: Any) -> float:
        """What ours computes before its first step."""
        from peagle.train.start import positions_wanted

        if config.init_layers != "verifier":
            return 0.0
        lengths: list[int] = []
        for row_id in self.rows.extents():
            lengths.append(len(self.rows.read(row_id).row.input_ids) - 1)
            if sum(lengths) >= positions_wanted(self.decision.drafter_config()):
                break
        return fit_multiply_adds(lengths)

    # -- runs

    def ours_within(self, seed: int, budget: float, changes: dict[str, Any]) -> dict[str, Any]:
        """Train with `peagle train`, as many steps as fit into `budget` multiply-adds; its schedule ends there."""
        from peagle.drafter.checkpoint import DTYPES, load
        from peagle.train.run import train

        settings = {name: value for name, value in changes.items() if name != MASK_HIDDEN}
        steps, macs, slots = self.fill(seed, budget, settings)
        save_path = self.folder / "runs" / f"ours-{steps}-{seed}"
        config = self.config(seed, steps, settings, save_path)
        settled = self.plan(config).settled(config)
        recorded = {name: getattr(settled, name) for name in RECIPE} | {MASK_HIDDEN: None} | changes
        digest = hashlib.sha256(json.dumps(recorded, sort_keys=True).encode()).hexdigest()[:12]
        save_path = save_path.with_name(f"{save_path.name}-{digest}")
        report = save_path.with_suffix(".json")
        if report.exists():
            return json.loads(report.read_text())
        config = config.model_copy(update={"save_path": save_path})
        began_s = time.process_time()
        with mask_hidden_from(changes.get(MASK_HIDDEN)):
            result = train(config)
        if result.signal_number is not None:
            raise SystemExit("stopped by a signal; the same command with --output continues")
        seconds = time.process_time() - began_s
        drafter = load(str(save_path / "checkpoint_last"), DTYPES["float32"], torch_device())
        found = {
            "multiply_adds": macs,
            "slots": slots,
            "steps": steps,
            "loss": statistics.fmean(step.loss for step in result.steps[-20:]),
            "cpu_s": round(seconds, 1),
            **self.scores(drafter),
        }
        report.write_text(json.dumps(found))
        return found

    def fill(self, seed: int, budget: float, changes: dict[str, Any]) -> tuple[int, float, int]:
        """Steps that fit into `budget`, their multiply-adds, their slots."""
        from peagle.drafter.network import Drafter
        from peagle.train.batches import lay_out
        from peagle.train.optimizer import groups

        config = self.config(seed, 1, changes, self.folder)
        plan = self.plan(config)
        shapes = {name: p.shape for name, p in Drafter(self.decision.drafter_config()).named_parameters()}
        del shapes["lm_head.weight"]  # frozen
        matrices = [shapes[one] for group in groups(plan, shapes) if group.is_muon for one in group.tensors]
        per_step = muon_multiply_adds([tuple(shape) for shape in matrices])
        steps, spent, slots = 0, self.start_cost(config), 0
        for epoch, one in self.packs_of(seed):
            pack = lay_out(self.rows, one, plan, epoch)
            batch, layout = pack.batch, pack.layout
            cost = pack_multiply_adds(batch.document_ids, batch.is_supervised, layout.anchor_pos, layout.depth)
            if spent + cost + per_step > budget:
                return steps, spent, slots
            steps, spent, slots = steps + 1, spent + cost + per_step, slots + pack.num_pairs + layout.num_slots
        raise AssertionError("packs never end")

    def controls(self, wanted: list[tuple[int, float]], epochs: int) -> list[dict[str, Any]]:
        """Train Speculators' model for each (seed, learning rate), `--jobs` at a time, each in its own process."""
        waiting = [one for one in dict.fromkeys(wanted) if not self.report_of(*one, epochs).exists()]
        running: list[tuple[tuple[int, float], subprocess.Popen[bytes]]] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.options.jobs:
                    running.append((waiting[0], self.start_control(*waiting.pop(0), epochs)))
                one, worker = running.pop(0)
                if worker.wait():
                    raise SystemExit(f"the control of seed {one[0]} and learning rate {one[1]:g} failed")
                self.score_control(*one, epochs)
        finally:
            for _, worker in running:
                worker.kill()
        return [json.loads(self.report_of(*one, epochs).read_text()) for one in wanted]

    def report_of(self, seed: int, lr: float, epochs: int) -> Path:
        """Where a control's figures are kept."""
        return self.folder / "runs" / f"control-{epochs}-{seed}-{lr:g}-{MAX_ANCHORS}.json"

    def start_control(self, seed: int, lr: float, epochs: int) -> subprocess.Popen[bytes]:
        """Begin to train Speculators' model."""
        self.write_rows()
        work = self.report_of(seed, lr, epochs).with_suffix("")
        work.mkdir(parents=True, exist_ok=True)
        index = {row_id: place for place, row_id in enumerate(self.lengths)}
        plan = itertools.islice(self.packs_of(seed), self.steps_of_epochs(seed, epochs))
        job = {
            "verifier": self.verifier,
            "rows": str(self.folder / "rows.safetensors"),
            "packs": [[index[row_id] for row_id in one.row_ids] for _, one in plan],
            "mask_token_id": self.decision.drafter_config().mask_token_id,
            "lr": lr,
            "max_anchors": MAX_ANCHORS,
            "seed": seed,
            "weights": str(work / "model.safetensors"),
            "report": str(work / "report.json"),
        }
        (work / "job.json").write_text(json.dumps(job))
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [str(ensure_peer()), __file__, "--worker", str(work / "job.json")]
        return subprocess.Popen(command, env={**os.environ, **threads}, stdout=sys.stderr)

    def score_control(self, seed: int, lr: float, epochs: int) -> None:
        """Score its weights in our drafter: the tensors have the same names."""
        from peagle.drafter.checkpoint import load_weights, read_weights
        from peagle.drafter.network import Drafter

        report = self.report_of(seed, lr, epochs)
        work = report.with_suffix("")
        drafter = Drafter(self.decision.drafter_config().model_copy(update={"norm_before_residual": True}))
        tables = {name: tensor for name, tensor in drafter.state_dict().items() if name in ("d2t", "t2d")}
        load_weights(drafter, {**tables, **read_weights(work)}, str(work))
        found = {**json.loads((work / "report.json").read_text()), **self.scores(drafter.eval())}
        report.write_text(json.dumps(found))

    def write_rows(self) -> None:
        """The rows that both sides train on, already shifted, for the other process."""
        import torch
        from safetensors.torch import save_file

        from peagle.hidden_states.batch import pack
        from peagle.train.batches import trim

        path = self.folder / "rows.safetensors"
        if path.exists():
            return
        made: dict[str, list[Any]] = {"ids": [], "aux": [], "last": [], "mask": []}
        for row_id in self.lengths:
            batch = pack([trim(self.rows.read(row_id))], None)
            last = torch.zeros(len(batch.pair_ids), SIZES["hidden"])
            last[batch.is_supervised] = batch.last_states[batch.label_of_pair[batch.is_supervised]].float()
            parts = (batch.pair_ids, batch.aux_states.float(), last, batch.is_supervised.float())
            for name, part in zip(made, parts):
                made[name].append(part)
        lengths = torch.tensor([len(ids) for ids in made["ids"]])
        starts = lengths.cumsum(0) - lengths
        save_file({**{n: torch.cat(parts) for n, parts in made.items()}, "lengths": lengths, "starts": starts}, path)

    # -- scores

    def recorded(self, name: str) -> list[Any]:
        """The verifier's own answers to one set of questions, with its states, as `peagle evaluate` reads them."""
        import torch

        from peagle.data.tokenizer import load_tokenizer
        from peagle.evaluate.config import EvaluateConfig
        from peagle.evaluate.prompts import read_items
        from peagle.evaluate.replay_check import Judge, on_the_spot
        from peagle.verifier.local import TransformersVerifier
        from peagle.verifier.weights import load_head

        data = str(self.folder / f"{name}.jsonl")
        values = {"checkpoint": "", "data": [data], "mode": "replay", "output": self.folder}
        config = EvaluateConfig.build(values)
        tokenizer = load_tokenizer(self.verifier, False)
        items = read_items(config, tokenizer, self.verifier_config.max_position_embeddings).items
        verifier = TransformersVerifier(self.verifier_config, torch.float32, torch.device("cpu"))
        layers = self.decision.drafter_config().aux_layer_ids
        head = load_head(self.verifier_config).to(torch.device("cpu"), torch.float32)
        return list(on_the_spot(verifier, layers, items, Judge(head)))

    def scores(self, drafter: Any) -> dict[str, Any]:
        """Acceptance lengths of replay on both sets of answers, and the share of passes that accept each depth."""
        from peagle.engine import Sampling
        from peagle.evaluate.counts import pool
        from peagle.evaluate.replay import replay

        found: dict[str, Any] = {}
        for name, answers in self.answers.items():
            replayed = [replay(drafter, None, one, DEPTHS, Sampling()) for one in answers]
            counts = pool([part for one in replayed for part in one.by_context.values()], DEPTHS)
            found[name] = round(counts.acceptance_length or 0.0, 4)
            found[f"{name}_per_position"] = [round(rate, 4) for rate in counts.acceptance_per_position or ()]
        found["questions"] = len(self.answers["test"])
        return found


# -------------------- studies


def torch_device() -> Any:
    import torch

    return torch.device("cpu")


def mask_hidden_from(kind: str | None) -> AbstractContextManager[Any]:
    """Start `mask_hidden` from zeros or from unit noise (as Speculators does), not from the states' statistics."""
    import torch

    if kind is None:
        return nullcontext()
    size = 3 * SIZES["hidden"]
    start = torch.zeros(size) if kind == "zeros" else torch.randn(size, generator=torch.Generator().manual_seed(0))
    return mock.patch("peagle.train.start.mask_hidden", return_value=start)


def mean_of(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(run[key] for run in runs)


def compare(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """The control at its default and tuned, ours within a third and within 0.7 of its compute."""
    seeds = SEEDS if options.study else SEEDS[:1]
    lrs = TRIED_LRS if options.study else (BEST_LR,)
    wanted = [(seed, DEFAULT_LR) for seed in seeds[:1]] + [(SEEDS[0], lr) for lr in lrs]
    first = dict(zip(wanted, bench.controls(wanted, options.epochs)))
    tried = {lr: first[SEEDS[0], lr] for lr in lrs}
    best = max(tried, key=lambda lr: tried[lr]["tune"])
    result: dict[str, Any] = {"control": {}, "ours": {}}
    result["control"]["tried"] = {f"{lr:g}": {"tune": run["tune"], "test": run["test"]} for lr, run in tried.items()}
    for name, lr, share in (("default", DEFAULT_LR, SHARE_OF_DEFAULT), ("tuned", best, SHARE_OF_TUNED)):
        theirs = bench.controls([(seed, lr) for seed in seeds], options.epochs)
        ours = [bench.ours_within(seed, share * one["multiply_adds"], {}) for seed, one in zip(seeds, theirs)]
        aim, reached = mean_of(theirs, "test"), mean_of(ours, "test")
        result["control"][name] = {"lr": lr, "acceptance_length": round(aim, 4), "runs": theirs}
        result["ours"][name] = {"acceptance_length": round(reached, 4), "runs": ours}
        result[f"compute_ratio_{name}"] = round(mean_of(ours, "multiply_adds") / mean_of(theirs, "multiply_adds"), 4)
        result[f"margin_{name}"] = round(reached - aim, 4)
    result["met"] = result["margin_default"] >= 0 and result["margin_tuned"] >= 0
    result["setting"] = {"epochs": options.epochs, "tokens": options.tokens, "rows": len(bench.lengths), "seeds": seeds}
    return result


def tune(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Other settings of ours, one seed each, within a third of the default control's compute."""
    budget = SHARE_OF_DEFAULT * bench.controls([(SEEDS[0], DEFAULT_LR)], options.epochs)[0]["multiply_adds"]
    found = {}
    for changes in TRIED:
        name = ", ".join(f"{key} {value}" for key, value in changes.items()) or "defaults"
        found[name] = bench.ours_within(SEEDS[0], budget, changes)
        one = found[name]
        rates = " ".join(f"{rate:.3f}" for rate in one["tune_per_position"])
        print(f"{name:45} {one['steps']:4} steps  held back {one['tune']:.3f}  ({rates})", file=sys.stderr, flush=True)
    return {"budget": budget, "tried": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", action="store_true", help="three seeds, and three learning rates of the control")
    parser.add_argument("--tune", action="store_true", help="try other settings of ours instead")
    parser.add_argument("--epochs", type=int, default=2, help="of the control")
    parser.add_argument("--questions", type=int, default=700, help="training questions that the verifier answers")
    parser.add_argument("--tokens", type=int, default=512, help="of a pack, both sides")
    parser.add_argument("--jobs", type=int, default=2, help="controls that train at once, each on one thread")
    parser.add_argument("--output", type=Path, help="keep data and runs here, and use what is there")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        peer_worker(options.worker)
        return 0
    from peagle import log

    log.set_up(quiet=True, verbose=False)
    ensure_peer()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output or Path(scratch)
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, options)
        result = tune(bench, options) if options.tune else compare(bench, options)
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    return int(not result.get("met", True))


if __name__ == "__main__":
    sys.exit(main())
