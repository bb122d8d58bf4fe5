"""What a run of a recipe would do, and what it would take: disk, memory and time, before anything runs.

A stage is done again only if the contents that it reads, its settings, or what it made have changed. Bytes are 10^9 to
the GB. Work is counted in multiply-adds. Time is work over the rate that this machine reaches in a matrix product
measured on the spot, times an efficiency; it says what to expect here, to a factor of two.
"""

import hashlib
import json
import math
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from peagle import log
from peagle.data.config import PrepareConfig
from peagle.drafter.model_config import NUM_AUX_LAYERS_OF_VLLM
from peagle.errors import PeagleError, VerifierError
from peagle.files import free_bytes, sha256_file, write_json
from peagle.hidden_states.config import ExtractConfig
from peagle.pipeline.recipe import STAGES, Recipe, Sizes, Stage, stages
from peagle.train.config import TrainConfig
from peagle.verifier.model_config import VerifierConfig, load_verifier_config

STATE = "run.json"
_FORMER_STATE = "road.json"  # what the file was called in the first releases
# Differ between runs that made the same thing: times, versions, logs, locks.
_NOT_CONTENT = {"manifest.json", "run.yaml", "metrics.jsonl", "README.md"}

# Without prepared rows at hand: conversations fill this share of the length limit, and this share of them is replies.
ASSUMED_FILL, ASSUMED_SUPERVISED = 0.3, 0.6
# Memory of the GPU that training is planned for; the scratch that its blocks take follows from it.
ASSUMED_GPU_BYTES = 80 * 10**9
_MFU = 0.4
# Decoding reads every weight for a few tokens: far from the matrix rate. 4 M parameters, 64 rows at once on two cores:
# 1,400 tokens/s where a matrix product does 60 G multiply-adds per second.
_DECODE_SHARE = 0.1
_WIDE = 116


@dataclass(frozen=True)
class Estimate:
    """What a stage takes; None where nothing can be said."""

    disk_bytes: float | None = None
    memory_bytes: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage, what is to be done about it, and what that takes."""

    stage: Stage
    key: str | None
    """Identity of its work; None while an earlier stage has yet to make what it reads."""
    action: str
    """"skip", "resume" or "run"."""
    why: str
    estimate: Estimate = Estimate()


class Fingerprints:
    """Hashes of files and folders; a file is read again only if its size or its time of change differ."""

    def __init__(self, output: Path) -> None:
        self._file = output / ".hashes.json"
        self._known = _read_object(self._file)  # a cache: without it every file is read once more

    def of(self, path: Path) -> str | None:
        """The hash of a file's content, or of everything that a folder holds; None if nothing is there.

        A hidden-state store is represented by its JSON files, which have the checksum of every shard.
        """
        if path.is_file():
            return self._file_hash(path)
        is_store = (path / "store.json").is_file()
        digest, is_empty = hashlib.sha256(), True
        for file in sorted(path.rglob("*")):
            relative = file.relative_to(path)
            hidden = any(part.startswith(".") or part == "training_state" for part in relative.parts)
            if hidden or not file.is_file() or file.name in _NOT_CONTENT or (is_store and file.suffix != ".json"):
                continue
            is_empty = False
            digest.update(f"{relative.as_posix()}\0{self._file_hash(file)}\n".encode())
        return None if is_empty else digest.hexdigest()

    def save(self) -> None:
        """Keep the cache for the next run."""
        write_json(self._file, self._known)

    def _file_hash(self, path: Path) -> str:
        stat = path.stat()
        key = str(path.resolve())
        known = self._known.get(key)
        if isinstance(known, list) and known[:2] == [stat.st_size, stat.st_mtime_ns]:
            return str(known[2])
        digest = sha256_file(path)
        self._known[key] = [stat.st_size, stat.st_mtime_ns, digest]
        return digest


def plan(recipe: Recipe, until: str | None) -> list[Step]:
    """What a run would do now, nothing changed."""
    todo = stages_until(recipe, until)
    prints, state = Fingerprints(recipe.output), read_state(recipe.output)
    steps: list[Step] = []
    for stage in todo:
        pending = [step.stage for step in steps if step.action != "skip"]
        steps.append(decide(stage, pending, state, prints))
    return steps


def stages_until(recipe: Recipe, until: str | None) -> list[Stage]:
    """A recipe's stages up to the one named, or all; a PeagleError if there is no such stage."""
    found = stages(recipe)
    names = [stage.name for stage in found]
    if until not in (None, *names):
        raise PeagleError(f"--until {until}: the recipe has no such stage; it has {', '.join(names)}")
    return found if until is None else found[: names.index(until) + 1]


def decide(stage: Stage, pending: Sequence[Stage], state: dict[str, Any], prints: Fingerprints) -> Step:
    """Decide about one stage, given the earlier stages yet to run and what earlier runs did (`read_state`)."""
    awaited = [earlier.name for earlier in pending if _reads(stage, earlier)]
    if awaited:
        why = "after " + ("all of them" if stage.name == "report" else " and ".join(awaited))
        return Step(stage=stage, key=None, action="run", why=why)
    key = key_of(stage, {name: prints.of(Path(name)) or "by name" for name in stage.inputs})
    known = state.get(stage.name, {})
    action, why = "run", "its settings or what it reads have changed"
    if not known:
        why = "not done yet"
    elif known.get("key") == key and known.get("status") != "done":
        action, why = "resume", "goes on where it stopped"
    elif known.get("key") == key:
        made = prints.of(stage.output)
        if made == known.get("made") and made is not None:
            action, why = "skip", "up to date"
        else:
            why = f"{stage.output} " + ("is gone" if made is None else "was changed since")
    return Step(stage=stage, key=key, action=action, why=why)


def key_of(stage: Stage, inputs: dict[str, str]) -> str:
    """The identity of a stage's work: its settings and the hashes of what it reads.

    The run's own folder is left out of it, so that a run that was moved is still up to date.
    """
    text = json.dumps([stage.name, stage.settings, inputs], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.replace(str(stage.root), "{output}").encode()).hexdigest()


def read_state(output: Path) -> dict[str, Any]:
    """What earlier runs did, by stage; empty if there was none."""
    return _read_object(output / STATE) or _read_object(output / _FORMER_STATE)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _reads(stage: Stage, earlier: Stage) -> bool:
    """Whether a stage reads what an earlier one makes (a report reads everything)."""
    made = earlier.output.resolve()
    return stage.name == "report" or any(made in (Path(i).resolve(), *Path(i).resolve().parents) for i in stage.inputs)


@dataclass(frozen=True)
class RowSizes:
    """The rows that will be trained on: counted if they are prepared, else assumed."""

    num_rows: int
    num_tokens: int
    num_supervised: int
    is_counted: bool


def num_aux_layers(config: ExtractConfig | TrainConfig) -> int:
    """Verifier layers whose states the drafter reads; where the config leaves them open, as many as are usual."""
    return len(config.target_layer_ids or ()) or NUM_AUX_LAYERS_OF_VLLM


def drafter_parameters(
    sizes: Sizes, num_layers: int, draft_vocab_size: int, num_aux_layers: int
) -> tuple[int, int, int]:
    """Parameters of a drafter: (its layers' matrices, embedding and `fc`, the frozen head).

    Example:
        Qwen3-8B (hidden 4096, MLP 12288, 32 query and 8 key heads of 128, vocabulary 151,936), 4 layers: 796,917,760
        in the layers, 672,661,504 in embedding and fc, 622,329,856 in the head.
    """
    hidden, kv = sizes.hidden_size, sizes.num_key_value_heads * sizes.head_dim
    query = sizes.num_attention_heads * sizes.head_dim
    attention = hidden * (query + 2 * kv) + query * hidden
    layers = num_layers * (attention + 3 * hidden * sizes.intermediate_size) + hidden * (query + 2 * kv)
    return layers, sizes.vocab_size * hidden + num_aux_layers * hidden * hidden, draft_vocab_size * hidden


def training_bytes(sizes: Sizes, config: TrainConfig, num_shards: int) -> float:
    """Memory of one training process on a GPU: weights, masters, gradients, optimizer, and the base pass of one pack.

    bfloat16 weights (2 bytes), float32 masters and gradients (4 each), the optimizer's state, one more head for the
    verifier where the drafter's is not the same. The base pass keeps, by count of what autograd saves, 7 hidden states,
    3 key states and 2 MLP states per layer and token (with activation checkpointing: one hidden state, keys and values)
    and 6 hidden states per token at its entry, 2 bytes each, and the collected gradients of keys and values, 4 each.
    On top comes the scratch that blocks take: `--memory-budget`, or the usual share of a GPU of 80 GB.
    `num_shards` processes share masters, gradients and optimizer (FSDP2).
    """
    layers, others, head = _parameters(sizes, config)
    embedding = sizes.vocab_size * sizes.hidden_size
    weights = 2 * (layers + others + head) + (2 * embedding if head != embedding else 0)
    if config.train_embeddings != "all":
        others -= embedding
    state = _moment_bytes(config) * layers + 8 * others
    kv = sizes.num_key_value_heads * sizes.head_dim
    per_layer = 7 * sizes.hidden_size + 7 * kv + 2 * sizes.intermediate_size
    if config.activation_checkpointing:
        per_layer = sizes.hidden_size + 6 * kv
    per_token = config.num_layers * per_layer + 6 * sizes.hidden_size
    scratch = config.scratch_bytes(None if config.device == "cpu" else ASSUMED_GPU_BYTES)
    return weights + (8 * (layers + others) + state) / num_shards + 2 * per_token * config.total_seq_len + scratch


def _parameters(sizes: Sizes, config: TrainConfig) -> tuple[int, int, int]:
    vocab_size = config.draft_rows(sizes.vocab_size)
    return drafter_parameters(sizes, config.num_layers, vocab_size, num_aux_layers(config))


def _moment_bytes(config: TrainConfig) -> int:
    """Optimizer state of a layer's parameter: AdamW's two moments, or Muon's momentum."""
    return 4 if config.optimizer == "muon" else 8


def store_bytes(rows: RowSizes, hidden_size: int, bytes_per_value: int, num_aux_layers: int) -> float:
    """Disk of the hidden states: auxiliary states of every token, the last state of every supervised one."""
    return bytes_per_value * hidden_size * (num_aux_layers * rows.num_tokens + rows.num_supervised)


def training_work(rows: RowSizes, sizes: Sizes, config: TrainConfig) -> float:
    """Multiply-adds of an epoch: three passes' worth of the network per slot, two of the head, one of the verifier."""
    layers, _, head = _parameters(sizes, config)
    ratio, floor = config.down_sample_ratio, config.down_sample_ratio_min
    slots = rows.num_supervised * sum(max(ratio**depth, floor) for depth in range(config.num_depths))
    network_slots = rows.num_tokens + slots - rows.num_supervised
    verifier_head = sizes.vocab_size * sizes.hidden_size * rows.num_supervised
    return 3.0 * layers * network_slots + 2.0 * head * slots + verifier_head


def training_epochs(rows: RowSizes, config: TrainConfig, num_ranks: int) -> float:
    """Passes over the rows: as many as `epochs` says, or as `max_steps` steps of full packs come to."""
    if config.max_steps is None:
        return config.epochs
    tokens = config.max_steps * config.packs_per_step(num_ranks) * config.total_seq_len
    return min(config.epochs, tokens / max(rows.num_tokens, 1))


def count_rows(recipe: Recipe) -> RowSizes | None:
    """The rows of a recipe: counted if they are prepared, else assumed from its limits; None if it has none."""
    summary = _read_object(recipe.output / "prepared" / "summary.json")
    if summary:
        return RowSizes(int(summary["rows"]), int(summary["tokens"]), int(summary["supervised_tokens"]), True)
    settings = recipe.prepare or {}
    limits = [(section or {}).get("max_samples") for section in (recipe.regenerate, settings, recipe.extract)]
    num_rows = min((int(limit) for limit in limits if limit), default=0)
    if not num_rows:
        return None
    length = settings.get("seq_length", PrepareConfig.model_fields["seq_length"].default)
    tokens = int(num_rows * float(length) * ASSUMED_FILL)
    return RowSizes(num_rows, tokens, int(tokens * ASSUMED_SUPERVISED), False)


def estimate(stage: Stage, recipe: Recipe, sizes: Sizes | None, rows: RowSizes | None, rate: float | None) -> Estimate:
    """Estimate one stage of a recipe, as far as the verifier's sizes and the rows to train on are known.

    Time needs `rate`, this machine's multiply-adds per second.
    """
    if sizes is None or rows is None:
        return Estimate()
    config = stage.config
    verifier_work = sizes.parameters_billion * 1e9
    verifier_bytes = 2 * verifier_work + 2e9

    def seconds(work: float, efficiency: float) -> float | None:
        return None if rate is None else work / (rate * efficiency)

    if stage.name == "regenerate":
        written_s = seconds(verifier_work * rows.num_supervised, _DECODE_SHARE)
        return Estimate(12.0 * rows.num_tokens, verifier_bytes, written_s)
    if stage.name == "prepare":
        return Estimate(5.0 * rows.num_tokens, 1e9, rows.num_rows / 150)
    if isinstance(config, ExtractConfig):
        disk = store_bytes(rows, sizes.hidden_size, 4 if config.dtype == "float32" else 2, num_aux_layers(config))
        return Estimate(disk, verifier_bytes, seconds(verifier_work * rows.num_tokens, _MFU))
    if isinstance(config, TrainConfig):
        config = config.model_copy(update=config.of_kind())  # of an EAGLE-3 drafter: its steps as depths
        layers, others, head = _parameters(sizes, config)
        epochs = training_epochs(rows, config, recipe.processes)
        num_made = math.ceil(epochs / config.checkpoint_freq)
        num_kept = min(num_made, config.keep_last or num_made) + 1
        state = (4 + _moment_bytes(config)) * layers + 12 * others
        disk = num_kept * (2.0 * (layers + others + head) + state)
        memory = training_bytes(sizes, config, recipe.processes if config.fsdp_shard else 1)
        work = epochs * training_work(rows, sizes, config) / recipe.processes
        return Estimate(disk, memory, seconds(work, _MFU))
    return Estimate(1e6, verifier_bytes if stage.name == "evaluate" else 1e9, None)


def sizes_of(recipe: Recipe) -> Sizes | None:
    """The verifier's sizes: from its configuration if that is within reach, else from the recipe."""
    if recipe.sizes is not None and not Path(recipe.verifier).is_dir():
        return recipe.sizes
    try:
        trusted = any((getattr(recipe, stage) or {}).get("trust_remote_code") for stage in STAGES)
        return verifier_sizes(load_verifier_config(recipe.verifier, trusted))
    except VerifierError:
        return recipe.sizes


def verifier_sizes(verifier: VerifierConfig) -> Sizes:
    """A verifier's sizes, its parameters counted as those of a dense model."""
    known = {name: getattr(verifier, name) for name in Sizes.model_fields if name != "parameters_billion"}
    sizes = Sizes(**known, parameters_billion=1e-9)
    layers, _, head = drafter_parameters(sizes, verifier.num_layers, verifier.vocab_size, 0)
    num_parameters = layers + head * (1 if verifier.tied else 2)
    return sizes.model_copy(update={"parameters_billion": num_parameters / 1e9})


def measured_rate() -> float:
    """Multiply-adds per second of a matrix product here: on the GPU in bfloat16 if there is one, else in float32."""
    import torch

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    size = 4096 if on_gpu else 768
    a = torch.randn(size, size, device=device, dtype=dtype)
    return size**3 / min(timeit.repeat(lambda: (a @ a).sum().item(), repeat=5, number=1))


def estimated(recipe: Recipe, steps: Sequence[Step]) -> list[Step]:
    """The steps with their estimates; the machine's rate is measured if anything is to be run."""
    sizes, rows = sizes_of(recipe), count_rows(recipe)
    rate = measured_rate() if any(step.action != "skip" for step in steps) else None
    return [replace(step, estimate=estimate(step.stage, recipe, sizes, rows, rate)) for step in steps]


def table(recipe: Recipe, steps: Sequence[Step], width: int) -> Table:
    """The plan for a terminal of so many columns; what each stage makes is left out where it would be cut up."""
    title = f"{recipe.name}: {recipe.description or recipe.verifier}"
    shown = Table(title=title, caption=caption(recipe, steps), title_justify="left", caption_justify="left")
    is_wide = width >= _WIDE
    for name in ("stage", "plan"):
        shown.add_column(name, no_wrap=True)
    for name in ("why", "makes") if is_wide else ("why",):
        shown.add_column(name, overflow="fold")
    for name in ("disk", "memory", "time here"):
        shown.add_column(name, justify="right", no_wrap=True)
    for step in steps:
        is_idle, one = step.action == "skip", step.estimate
        sizes = log.size(one.disk_bytes), log.size(one.memory_bytes)
        figures = ("", "", "") if is_idle else (*sizes, spell(one.seconds))
        made = step.stage.output
        place = made.relative_to(recipe.output) if made.is_relative_to(recipe.output) else made
        makes = (str(place),) if is_wide else ()
        shown.add_row(step.stage.name, step.action, step.why, *makes, *figures, style="dim" if is_idle else "")
    return shown


def caption(recipe: Recipe, steps: Sequence[Step]) -> str:
    """What the figures rest on, and whether the disk is large enough."""
    parts, rows = [], count_rows(recipe)
    if rows is None:
        parts.append("Rows have no limit (max_samples), so nothing can be estimated before `prepare` has run.")
    elif rows.is_counted:
        counted = f"{rows.num_rows:,} prepared rows, {rows.num_tokens:,} tokens"
        parts.append(f"{counted}, {rows.num_supervised:,} supervised.")
    else:
        mean = rows.num_tokens // max(rows.num_rows, 1)
        parts.append(f"{rows.num_rows:,} rows of {mean:,} tokens on average are assumed until `prepare` counted them.")
    need = sum(step.estimate.disk_bytes or 0 for step in steps if step.action != "skip")
    free = free_bytes(recipe.output)
    verdict = "" if need <= free else "  THE DISK IS TOO SMALL."
    parts.append(f"Disk: {log.size(need)} needed, {log.size(free)} free at {recipe.output}.{verdict}")
    parts.append("Time is for this machine as busy as it is now, to a factor of two or three.")
    return " ".join(parts)


def as_json(recipe: Recipe, steps: Sequence[Step]) -> dict[str, Any]:
    """The plan as JSON."""
    rows = count_rows(recipe)
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
                **vars(step.estimate),
            }
            for step in steps
        ],
    }


def spell(seconds: float | None) -> str:
    """Seconds as people read them, days included."""
    if seconds is None:
        return ""
    return f"{seconds / 86400:.1f} days" if seconds > 2 * 86400 else log.duration(seconds)
