"""What a recipe will take: disk, memory and time, from sizes and arithmetic, before anything runs.

Bytes are 10^9 to the GB. Work is counted in multiply-adds. Time is work over the rate that this machine reaches in a
matrix product measured on the spot, times an efficiency; it says what to expect here, to a factor of two.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from peagle import log
from peagle.files import free_bytes
from peagle.pipeline.recipe import Recipe, Sizes, Stage, Step

# Without prepared rows at hand: conversations fill this share of the length limit, and this share of them is replies.
ASSUMED_FILL, ASSUMED_SUPERVISED = 0.3, 0.6
NUM_AUX_LAYERS = 3
SCRATCH_BYTES = 5e9
_MFU = 0.4
# Decoding reads every weight for a few tokens: far from the matrix rate. 4 M parameters, 64 rows at once on two cores:
# 1,400 tokens/s where a matrix product does 60 G multiply-adds per second.
_DECODE_SHARE = 0.1


@dataclass(frozen=True)
class Rows:
    """The rows that will be trained on."""

    num_rows: int
    num_tokens: int
    num_supervised: int
    is_counted: bool
    """Read from prepared rows; else assumed."""


@dataclass(frozen=True)
class Estimate:
    """One stage; None where nothing can be said."""

    disk_bytes: float | None
    memory_bytes: float | None
    seconds: float | None


def drafter_parameters(sizes: Sizes, num_layers: int, draft_vocab_size: int) -> tuple[int, int, int]:
    """Parameters of a drafter: (its layers' matrices, embedding and `fc`, the frozen head).

    Example:
        Qwen3-8B (hidden 4096, MLP 12288, 32 query and 8 key heads of 128, vocabulary 151,936), 4 layers: 796,917,760
        in the layers, 672,661,504 in embedding and fc, 622,329,856 in the head.
    """
    hidden, kv = sizes.hidden_size, sizes.num_key_value_heads * sizes.head_dim
    query = sizes.num_attention_heads * sizes.head_dim
    attention = hidden * (query + 2 * kv) + query * hidden
    layers = num_layers * (attention + 3 * hidden * sizes.intermediate_size) + hidden * (query + 2 * kv)
    return layers, sizes.vocab_size * hidden + NUM_AUX_LAYERS * hidden * hidden, draft_vocab_size * hidden


def training_bytes(
    sizes: Sizes,
    num_layers: int,
    draft_vocab_size: int,
    pack_tokens: int,
    *,
    optimizer: str = "adamw",
    activation_checkpointing: bool = False,
    train_embeddings: str = "all",
    num_shards: int = 1,
) -> float:
    """Memory of one training process on a GPU: weights, masters, gradients, optimizer, and the base pass of one pack.

    bfloat16 weights (2 bytes), float32 masters and gradients (4 each), AdamW's two moments (8; with "muon" a momentum
    of 4 for the layers' matrices), one more head for the verifier where the drafter's is not the same. The base pass
    keeps, by count of what autograd saves, 7 hidden states, 3 key states and 2 MLP states per layer and token, the
    collected gradients of keys and values, and 6 hidden states per token at its entry, 2 bytes each. A sixteenth of
    80 GB is the scratch that blocks take.

    Args:
        sizes: the verifier's.
        num_layers, draft_vocab_size: the drafter's.
        pack_tokens: tokens of a pack.
        optimizer: "adamw" or "muon".
        activation_checkpointing: the base pass keeps one hidden state per layer and token, keys, values and gradients.
        train_embeddings: as in `peagle train`; all but "all" leave the embedding out of masters, gradients and moments.
        num_shards: processes that share these (FSDP2).
    """
    layers, others, head = drafter_parameters(sizes, num_layers, draft_vocab_size)
    embedding = sizes.vocab_size * sizes.hidden_size
    weights = 2 * (layers + others + head) + (2 * embedding if head != embedding else 0)
    if train_embeddings != "all":
        others -= embedding
    state = (4 if optimizer == "muon" else 8) * layers + 8 * others
    kv = sizes.num_key_value_heads * sizes.head_dim
    per_layer = 7 * sizes.hidden_size + 5 * kv + 2 * sizes.intermediate_size
    if activation_checkpointing:
        per_layer = sizes.hidden_size + 4 * kv
    per_token = num_layers * per_layer + 6 * sizes.hidden_size
    return weights + (8 * (layers + others) + state) / num_shards + 2 * per_token * pack_tokens + SCRATCH_BYTES


def store_bytes(rows: Rows, hidden_size: int, bytes_per_value: int) -> float:
    """Disk of the hidden states: three layers for every token, the last state for every supervised one."""
    return bytes_per_value * hidden_size * (NUM_AUX_LAYERS * rows.num_tokens + rows.num_supervised)


def slots_per_supervised(num_depths: int, ratio: float, floor: float) -> float:
    """Slots that a supervised position is trained at, over all depths: 1 + sum over d of max(ratio^d, floor)."""
    return 1 + sum(max(ratio**depth, floor) for depth in range(1, num_depths))


def training_work(rows: Rows, sizes: Sizes, settings: dict[str, Any]) -> float:
    """Multiply-adds of an epoch: three passes' worth of the network per slot, two of the head, one of the verifier."""
    vocab = int(settings.get("draft_vocab_size") or sizes.vocab_size)
    layers, _, head = drafter_parameters(sizes, int(settings.get("num_layers", 4)), vocab)
    depths = int(settings.get("num_depths", 4))
    slots = rows.num_supervised * slots_per_supervised(
        depths, float(settings.get("down_sample_ratio", 0.7)), float(settings.get("down_sample_ratio_min", 0.2))
    )
    network_slots = rows.num_tokens + slots - rows.num_supervised
    return (
        3.0 * layers * network_slots + 2.0 * head * slots + sizes.vocab_size * sizes.hidden_size * rows.num_supervised
    )


def training_epochs(rows: Rows, settings: dict[str, Any], num_ranks: int) -> float:
    """Passes over the rows: as many as `epochs` says, or as `max_steps` steps of full packs come to."""
    epochs = float(settings.get("epochs", 5))
    if not settings.get("max_steps"):
        return epochs
    packs = int(settings.get("batch_size") or num_ranks) * int(settings.get("gradient_accumulation_steps", 1))
    tokens = int(settings["max_steps"]) * packs * int(settings.get("total_seq_len", 8192))
    return min(epochs, tokens / max(rows.num_tokens, 1))


def count_rows(recipe: Recipe) -> Rows | None:
    """The rows of a recipe: counted if they are prepared, else assumed from its limits; None if it has none."""
    prepared = recipe.output / "prepared" / "summary.json"
    if prepared.is_file():
        summary = json.loads(prepared.read_text(encoding="utf-8"))
        return Rows(int(summary["rows"]), int(summary["tokens"]), int(summary["supervised_tokens"]), True)
    settings = recipe.prepare or {}
    limits = [(section or {}).get("max_samples") for section in (recipe.regenerate, settings, recipe.extract)]
    num_rows = min((int(limit) for limit in limits if limit), default=0)
    if not num_rows:
        return None
    tokens = int(num_rows * float(settings.get("seq_length", 8192)) * ASSUMED_FILL)
    return Rows(int(num_rows), tokens, int(tokens * ASSUMED_SUPERVISED), False)


def estimate(stage: Stage, recipe: Recipe, sizes: Sizes | None, rows: Rows | None, rate: float | None) -> Estimate:
    """Estimate one stage.

    Args:
        stage: the stage.
        recipe: its recipe.
        sizes: the verifier's; None if they are not known.
        rows: what is trained on; None if not known.
        rate: multiply-adds per second of this machine; None to leave time out.
    """
    if sizes is None or rows is None:
        return Estimate(None, None, None)
    verifier_work = sizes.parameters_billion * 1e9
    verifier_bytes = 2 * verifier_work + 2e9

    def seconds(work: float, efficiency: float) -> float | None:
        return None if rate is None else work / (rate * efficiency)

    if stage.name == "regenerate":
        written_s = seconds(verifier_work * rows.num_supervised, _DECODE_SHARE)
        return Estimate(12.0 * rows.num_tokens, verifier_bytes, written_s)
    if stage.name == "prepare":
        return Estimate(5.0 * rows.num_tokens, 1e9, rows.num_rows / 150)
    if stage.name == "extract":
        disk = store_bytes(rows, sizes.hidden_size, 4 if stage.settings.get("dtype") == "float32" else 2)
        return Estimate(disk, verifier_bytes, seconds(verifier_work * rows.num_tokens, _MFU))
    if stage.name == "train":
        settings = stage.settings
        vocab = int(settings.get("draft_vocab_size") or sizes.vocab_size)
        layers, others, head = drafter_parameters(sizes, int(settings.get("num_layers", 4)), vocab)
        epochs = training_epochs(rows, settings, recipe.processes)
        made = math.ceil(epochs / float(settings.get("checkpoint_freq", 1.0)))
        kept = min(made, int(settings.get("keep_last") or made)) + 1
        optimizer = str(settings.get("optimizer", "adamw"))
        state = (4 + (4 if optimizer == "muon" else 8)) * layers + 12 * others
        disk = kept * (2.0 * (layers + others + head) + state)
        pack = int(settings.get("total_seq_len", 8192))
        memory = training_bytes(
            *(sizes, int(settings.get("num_layers", 4)), vocab, pack),
            optimizer=optimizer,
            activation_checkpointing=bool(settings.get("activation_checkpointing")),
            train_embeddings=str(settings.get("train_embeddings", "all")),
            num_shards=recipe.processes if settings.get("fsdp_shard") else 1,
        )
        work = epochs * training_work(rows, sizes, settings) / recipe.processes
        return Estimate(disk, memory, seconds(work, _MFU))
    return Estimate(1e6, verifier_bytes if stage.name == "evaluate" else 1e9, None)


def sizes_of(recipe: Recipe) -> Sizes | None:
    """The verifier's sizes: from its configuration if that can be had, else from the recipe."""
    from peagle.errors import VerifierError
    from peagle.verifier.model_config import load_verifier_config

    if recipe.sizes is not None and not Path(recipe.verifier).is_dir():
        return recipe.sizes
    try:
        verifier_config = load_verifier_config(recipe.verifier, False)
    except VerifierError:
        return recipe.sizes
    known = {name: getattr(verifier_config, name) for name in Sizes.model_fields if hasattr(verifier_config, name)}
    sizes = Sizes(**known, parameters_billion=1e-9)
    layers, _, _ = drafter_parameters(sizes, verifier_config.num_layers, verifier_config.vocab_size)
    head = verifier_config.vocab_size * verifier_config.hidden_size * (1 if verifier_config.tied else 2)
    return sizes.model_copy(update={"parameters_billion": (layers + head) / 1e9})


def measured_rate() -> float:
    """Multiply-adds per second of a matrix product here: on the GPU in bfloat16 if there is one, else in float32."""
    import torch

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    size = 4096 if on_gpu else 768
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = 0.0
    for _ in range(5):
        began_s = time.perf_counter()
        (a @ a).sum().item()
        best = max(best, size**3 / (time.perf_counter() - began_s))
    return best


# ---- The plan of a recipe as a table or as JSON: what would run and why, disk, memory, time.


_WIDE = 116


def estimates(recipe: Recipe, steps: Sequence[Step]) -> tuple[list[Estimate], Rows | None]:
    """Estimate every step; the machine's rate is measured if anything is to be run."""
    sizes, rows = sizes_of(recipe), count_rows(recipe)
    rate = measured_rate() if any(step.action != "skip" for step in steps) else None
    return [estimate(step.stage, recipe, sizes, rows, rate) for step in steps], rows


def table(recipe: Recipe, steps: Sequence[Step], found: Sequence[Estimate], rows: Rows | None, width: int) -> Table:
    """The plan for a terminal of so many columns; what each stage makes is left out where it would be cut up."""
    shown = Table(title=f"{recipe.name}: {recipe.description or recipe.verifier}", title_justify="left")
    is_wide = width >= _WIDE
    for name in ("stage", "plan"):
        shown.add_column(name, no_wrap=True)
    for name in ("why", "makes") if is_wide else ("why",):
        shown.add_column(name, overflow="fold")
    for name in ("disk", "memory", "time here"):
        shown.add_column(name, justify="right", no_wrap=True)
    for step, one in zip(steps, found):
        is_idle = step.action == "skip"
        costs = ("", "", "") if is_idle else (size(one.disk_bytes), size(one.memory_bytes), spell(one.seconds))
        style = "dim" if is_idle else ""
        makes = (_below(step.stage.output, recipe.output),) if is_wide else ()
        shown.add_row(step.stage.name, step.action, step.why, *makes, *costs, style=style)
    shown.caption = caption(recipe, steps, found, rows)
    shown.caption_justify = "left"
    return shown


def caption(recipe: Recipe, steps: Sequence[Step], found: Sequence[Estimate], rows: Rows | None) -> str:
    """What the figures rest on, and whether the disk has room."""
    parts = []
    if rows is None:
        parts.append(
            "No limit on the number of rows (max_samples), so nothing can be estimated before `prepare` has run."
        )
    elif rows.is_counted:
        parts.append(
            f"{rows.num_rows:,} prepared rows, {rows.num_tokens:,} tokens, {rows.num_supervised:,} supervised."
        )
    else:
        mean = rows.num_tokens // max(rows.num_rows, 1)
        parts.append(f"{rows.num_rows:,} rows of {mean:,} tokens on average are assumed until `prepare` counted them.")
    need = sum(one.disk_bytes or 0 for step, one in zip(steps, found) if step.action != "skip")
    free = free_bytes(recipe.output)
    verdict = "" if need <= free else "  THE DISK IS TOO SMALL."
    parts.append(f"Disk: {size(need)} needed, {size(free)} free at {recipe.output}.{verdict}")
    parts.append("Time is for this machine as busy as it is now, to a factor of two or three.")
    return " ".join(parts)


def as_json(recipe: Recipe, steps: Sequence[Step], found: Sequence[Estimate], rows: Rows | None) -> dict[str, Any]:
    """The plan as JSON."""
    return {
        "name": recipe.name,
        "verifier": recipe.verifier,
        "output": str(recipe.output),
        "rows": None if rows is None else vars(rows),
        "free_bytes": free_bytes(recipe.output),
        "stages": [
            {
                "stage": step.stage.name,
                "action": step.action,
                "why": step.why,
                "output": str(step.stage.output),
                "settings": step.stage.settings,
                **vars(one),
            }
            for step, one in zip(steps, found)
        ],
    }


def _below(path: Path, root: Path) -> str:
    """A path as seen from the run's folder, if it lies in it."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def size(value: float | None) -> str:
    """Bytes as people read them: 1.2 GB."""
    if value is None:
        return "?"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value / 1e3:.0f} kB"


def spell(seconds: float | None) -> str:
    """Seconds as people read them, days included."""
    if seconds is None:
        return ""
    return f"{seconds / 86400:.1f} days" if seconds > 2 * 86400 else log.duration(seconds)
