"""`peagle doctor`: the environment, a verifier, and the whole pipeline on a few rows, each finding in one line.

Nothing is left behind: the dry run works in a temporary folder and calls the same functions as the commands. What would
go wrong later goes wrong here.
"""

import json
import logging
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle.data.tokenizer import load_tokenizer
from peagle.drafter.model_config import ROPE_TYPES
from peagle.errors import PeagleError
from peagle.files import available_memory, free_bytes
from peagle.hidden_states.config import ExtractConfig
from peagle.pipeline.config import DoctorConfig
from peagle.pipeline.plan import (
    RowSizes,
    drafter_parameters,
    num_aux_layers,
    store_bytes,
    training_bytes,
    verifier_sizes,
)
from peagle.pipeline.recipe import Recipe, stages
from peagle.train.config import TrainConfig
from peagle.verifier.model_config import VerifierConfig, load_verifier_config, resolve_aux_layer_ids
from peagle.verifier.special_tokens import eos_ids, resolve_mask_token
from peagle.vllm.launch import MIN_VERSION, InstalledVllm, detour_arguments, engine_here, hands_out_states

State = Literal["ok", "warn", "fail"]
_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}
_NEEDED = {"torch": (2, 9), "transformers": (5, 4), "datasets": (4, 0), "safetensors": (0, 5)}
_LITTLE_DISK, _LITTLE_MEMORY = 5e9, 4e9
_FEW_SUPERVISED = 0.05
# Two replies in one conversation: a template that rewrites history shows it here.
PROBE = [
    {"role": "user", "content": "What is two plus three?"},
    {"role": "assistant", "content": "Two plus three is five."},
    {"role": "user", "content": "And doubled?"},
    {"role": "assistant", "content": "Doubled it is ten, since two times five is ten."},
]


@dataclass(frozen=True)
class Finding:
    """One line: what was examined, its state, what was found and what to do."""

    what: str
    state: State
    message: str


def doctor(config: DoctorConfig) -> int:
    """Examine everything that was named and print it; 0 if nothing failed (warnings are fine), else 1."""
    findings = []
    out = Console()
    for finding in examine(config):
        findings.append(finding)
        if config.json_output:
            continue
        if out.is_terminal:  # the message is wrapped beside its name
            line = Table.grid(padding=(0, 1))
            line.add_column(width=4)
            line.add_column(width=13)
            line.add_column(overflow="fold")
            line.add_row(_MARKS[finding.state], finding.what, escape(finding.message))
            out.print(line)
        else:  # whole lines, for grep
            print(f"{finding.state if finding.state != 'fail' else 'FAIL':<4} {finding.what:<13} {finding.message}")
    if config.json_output:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return int(any(finding.state == "fail" for finding in findings))


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Everything, in the order of the pipeline; what depends on something that failed is left out."""
    yield from environment(config.output)
    if config.model is None:
        return
    try:
        verifier = load_verifier_config(config.model, config.trust_remote_code)
    except PeagleError as error:
        yield Finding("verifier", "fail", " ".join(str(error).split()))
        return
    findings = {finding.what: finding for finding in model(config, verifier)}
    yield from findings.values()
    if findings["tokenizer"].state == "ok":
        yield from dry_run(config, verifier, findings["layer ids"].state == "ok")


def _tried(what: str, examine_it: Callable[[], tuple[State, str]]) -> Finding:
    """What an examination finds, its own messages kept to errors: the findings say it all."""
    logger = logging.getLogger("peagle")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return Finding(what, *examine_it())
    except PeagleError as error:
        return Finding(what, "fail", " ".join(str(error).split()))
    finally:
        logger.setLevel(level)


def environment(output: Path) -> Iterator[Finding]:
    """Python, packages, devices, memory, disk."""
    python = platform.python_version()
    yield Finding("python", "ok" if sys.version_info >= (3, 10) else "fail", f"{python} on {platform.platform()}")
    for name, least in _NEEDED.items():
        yield _package(name, least)
    yield _vllm()
    yield Finding("device", "ok", _device())
    free = available_memory()
    text = "unknown" if free is None else f"{free / 1e9:.1f} GB available"
    yield Finding("memory", "warn" if free is not None and free < _LITTLE_MEMORY else "ok", text)
    free = free_bytes(output)
    yield Finding("disk", "warn" if free < _LITTLE_DISK else "ok", f"{free / 1e9:.1f} GB free at {output}/")


def _package(name: str, least: tuple[int, int]) -> Finding:
    wanted = ".".join(map(str, least))
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "fail", f"not installed; `pip install '{name}>={wanted}'`")
    if tuple(map(int, version.split(".")[:2])) < least:
        return Finding(name, "fail", f"{version} is older than {wanted}; `pip install -U {name}`")
    return Finding(name, "ok", version)


def _vllm() -> Finding:
    engine = engine_here()
    if engine is None:
        return Finding("vllm", "warn", 'not installed beside peagle (needed to serve): `pip install "peagle[vllm]"`')
    if engine.release < MIN_VERSION:
        least = ".".join(map(str, MIN_VERSION))
        return Finding("vllm", "fail", f"{engine.version} cannot serve P-EAGLE drafters; {least} is the first that can")
    return Finding("vllm", "ok", engine.version)


def _device() -> str:
    import torch

    from peagle.kernels import cpu as kernels

    if torch.cuda.is_available():
        names = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            names.append(f"{torch.cuda.get_device_name(index)} ({free / 1e9:.0f} of {total / 1e9:.0f} GB free)")
        return ", ".join(names)
    threads = torch.get_num_threads()
    about = "1 thread" if threads == 1 else f"{threads} threads"
    problem = kernels.native_attention_problem(torch.device("cpu"), torch.float32, 64)
    if problem is not None:
        about += f", PyTorch's attention ({problem})"
    else:
        alone = " on one thread (no OpenMP in this PyTorch)" if kernels.num_native_threads() < threads else ""
        about += f", native attention{alone}"
    return f"CPU, {about}; fine for small verifiers, an 8B one wants a GPU"


def model(config: DoctorConfig, verifier: VerifierConfig) -> Iterator[Finding]:
    """What a verifier's configuration and tokenizer say, before a weight is read."""
    # 1. The configuration.
    names = ", ".join(verifier.architectures)
    part = " (its text model is used)" if verifier.has_text_config else ""
    shape = f"{verifier.num_layers} layers, hidden {verifier.hidden_size}, vocabulary {verifier.vocab_size:,}"
    yield Finding("verifier", "ok", f"{names}{part}: {shape}, {verifier.dtype}")
    text = f"not quantised; head {'tied to' if verifier.tied else 'apart from'} the embedding"
    if verifier.quantization is not None:
        how = "states come from this very model, norm and head are read dequantised"
        text = f"quantised ({verifier.quantization}): {how}"
    yield Finding("weights", "ok", text)
    kind, base = (verifier.rope_parameters.get(f"rope_{key}") for key in ("type", "theta"))
    if kind in ROPE_TYPES:
        yield Finding("rotary", "ok", f"{kind}, base {base:g}" if base else str(kind))
    else:
        text = f"rope_type {kind!r} cannot be trained with; known ones are {', '.join(ROPE_TYPES)}"
        yield Finding("rotary", "fail", text)

    def layer_ids() -> tuple[State, str]:
        ids = resolve_aux_layer_ids(verifier.num_layers, config.target_layer_ids)
        return "ok", f"{', '.join(map(str, ids))} of {verifier.num_layers}"

    yield _tried("layer ids", layer_ids)

    # 2. The tokenizer.
    def mask_token() -> tuple[State, str]:
        tokenizer = load_tokenizer(verifier.name_or_path, config.trust_remote_code)
        mask = resolve_mask_token(tokenizer, verifier.vocab_size, config.mask_token_id, ())
        return ("warn", mask.warning) if mask.warning else ("ok", f"{mask.id} ({mask.how})")

    finding = _tried("tokenizer", lambda: _tokenizer(config, verifier))
    yield finding
    if finding.state == "ok":
        yield _tried("mask token", mask_token)
    # 3. The engine.
    yield serving(verifier, engine_here())


def _tokenizer(config: DoctorConfig, verifier: VerifierConfig) -> tuple[State, str]:
    tokenizer = load_tokenizer(verifier.name_or_path, config.trust_remote_code)
    if len(tokenizer) > verifier.vocab_size:
        text = f"{len(tokenizer):,} tokens, but the model's embedding has {verifier.vocab_size:,} rows"
        return "fail", f"{text}: ids beyond it would crash the verifier; use the tokenizer that belongs to it"
    if not getattr(tokenizer, "chat_template", None):
        return "fail", "no chat template: give one to `prepare`, `regenerate` and the server (their --chat-template)"
    ends = ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in eos_ids(verifier, tokenizer))
    if not ends:
        return "fail", "no end-of-sequence token in the model's configuration or its tokenizer"
    spare = verifier.vocab_size - len(tokenizer)
    return "ok", f"{len(tokenizer):,} tokens, {spare:,} unused rows, answers end with {ends}"


def serving(verifier: VerifierConfig, engine: InstalledVllm | None) -> Finding:
    """What the installed vLLM lacks for this family of verifiers."""
    if engine is None:
        return Finding("serving", "warn", "vLLM is not installed here, so it is not known whether it takes this family")
    name = f"vLLM {engine.version}"

    def support() -> tuple[State, str]:
        unknown = [one for one in verifier.architectures if hands_out_states(engine, one) is None]
        if detour := detour_arguments(engine, verifier.architectures):
            how = " ".join(detour)
            return "warn", f"{name} has no EAGLE-3 support of its own for this family; it is served with {how}"
        if unknown:
            return "warn", f"{name} does not list {', '.join(unknown)}; it will try its Transformers backend"
        return "ok", f"{name} hands out this family's states and serves drafters for it"

    return _tried("serving", support)


def dry_run(config: DoctorConfig, verifier: VerifierConfig, has_layer_ids: bool) -> Iterator[Finding]:
    """Prepare, extract, train one step and check, on `config.rows` conversations in a temporary folder."""
    from peagle.data.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="peagle-doctor-") as name:
        # 1. A recipe for the few rows.
        folder, data = Path(name), config.data
        if not data:
            (folder / "probe.jsonl").write_text(json.dumps({"messages": PROBE}) + "\n", encoding="utf-8")
            data = (str(folder / "probe.jsonl"),)
        trust = {"trust_remote_code": config.trust_remote_code}
        flags = ("num_layers", "target_layer_ids", "mask_token_id", "draft_vocab_size")
        planned = {key: getattr(config, key) for key in flags if getattr(config, key) is not None}
        limits = {"total_seq_len": max(config.seq_length, 8), "max_steps": 1, "epochs": 1, "train_data_ratio": 1.0}
        recipe = Recipe.build(
            {
                "name": "doctor",
                "verifier": verifier.name_or_path,
                "output": folder,
                "prepare": {
                    "data": data,
                    "seq_length": config.seq_length,
                    "max_samples": config.rows,
                    "num_preprocessing_workers": 1,
                    **trust,
                },
                "extract": {
                    "target_layer_ids": config.target_layer_ids,
                    "validate_outputs": True,
                    "batch_size": 4,
                    **trust,
                },
                "train": {**planned, **limits, **trust},
            }
        )
        configs: dict[str, Any] = {stage.name: stage.config for stage in stages(recipe)}
        # 2. Template and data, and what the training that is planned takes.
        prepared = _tried("data", lambda: ("ok", str(prepare(configs["prepare"]))))
        if prepared.state == "fail":
            yield prepared
            return
        summary = json.loads((configs["prepare"].output / "summary.json").read_text(encoding="utf-8"))
        yield from _data(config, summary)
        yield from sizes(config, verifier, configs["train"], summary)
        if not has_layer_ids:
            return
        # 3. The weights.
        reason = _why_not_run(config, verifier)
        if reason:
            yield Finding("dry run", "warn", reason)
        else:
            yield from _run(configs["extract"], configs["train"], summary["rows"])


def _data(config: DoctorConfig, summary: dict[str, Any]) -> Iterator[Finding]:
    """Whether every reply was found, how much is supervised, what was dropped or cut."""
    how = ", ".join(summary.get("mask_from", {}))
    yield Finding("template", "ok", "every reply of the rows was found" + (f" ({how})" if how else ""))
    dropped = ", ".join(f"{count} {reason}" for reason, count in summary["dropped"].items())
    share = summary["supervised_tokens"] / max(summary["tokens"], 1)
    text = f"{summary['kept']} of {summary['read']} conversations kept, {100 * share:.0f} % of their tokens supervised"
    few = ": hardly anything to learn from; are the replies there?" if share < _FEW_SUPERVISED else ""
    problem = f"; dropped: {dropped}" if dropped else few
    yield Finding("data", "warn" if problem else "ok", text + problem)
    if summary.get("rows_cut"):
        cut = f"{summary['rows_cut']} of {summary['rows']} rows are cut at {config.seq_length} tokens"
        yield Finding("lengths", "warn", cut)


def sizes(
    config: DoctorConfig, verifier: VerifierConfig, training: TrainConfig, summary: dict[str, Any]
) -> Iterator[Finding]:
    """Disk and memory that the planned run takes."""
    vocab = training.draft_rows(verifier.vocab_size)
    if vocab > verifier.vocab_size:
        text = f"--draft-vocab-size {vocab} exceeds the verifier's {verifier.vocab_size}"
        yield Finding("vocabulary", "fail", text)
        return
    shape, num_aux = verifier_sizes(verifier), num_aux_layers(training)
    total = f"{sum(drafter_parameters(shape, training.num_layers, vocab, num_aux)) / 1e6:,.0f} M parameters"
    need = training_bytes(shape, training, 1)
    takes = f"training takes about {need / 1e9:.1f} GB for packs of {training.total_seq_len}"
    yield Finding("drafter", "ok", f"{training.num_layers} layers, {total}; {takes}")
    if config.max_samples is None:
        return
    scale = config.max_samples / max(summary["read"], 1)
    num_tokens, num_supervised = int(summary["tokens"] * scale), int(summary["supervised_tokens"] * scale)
    rows = RowSizes(config.max_samples, num_tokens, num_supervised, False)
    disk = store_bytes(rows, verifier.hidden_size, 4 if verifier.dtype == "float32" else 2, num_aux)
    free = free_bytes(config.output)
    text = f"{config.max_samples:,} conversations like these: {rows.num_tokens:,} tokens, {disk / 1e9:.1f} GB of states"
    lack = f", but {config.output} has {free / 1e9:.1f} GB free; take fewer, or another disk"
    is_full = disk > free
    yield Finding("store", "fail" if is_full else "ok", text + (lack if is_full else f", {free / 1e9:.1f} GB free"))


def _why_not_run(config: DoctorConfig, verifier: VerifierConfig) -> str | None:
    """Why the weights are not run here; None if they can be."""
    if not config.weights:
        return "the weights were not run (--no-weights)"
    folder = Path(verifier.name_or_path)
    if not folder.is_dir():
        return f"{verifier.name_or_path} is not a folder here: its weights were not fetched for a dry run"
    needed = 2.5 * sum(file.stat().st_size for file in folder.glob("*.safetensors")) + 1e9
    free = available_memory()
    if free is not None and needed > free:
        return f"running the weights here needs about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free"
    return None


def _run(extraction: ExtractConfig, training: TrainConfig, num_rows: int) -> Iterator[Finding]:
    """Extract with every check on, train one step, check the saved checkpoint as a serving engine would."""
    from peagle.hidden_states.extract import extract
    from peagle.serve.check import check_checkpoint
    from peagle.serve.config import CheckConfig
    from peagle.train.run import train

    def states() -> tuple[State, str]:
        extract(extraction)
        return "ok", f"head(norm(last state)) is the verifier's own choice on all {num_rows} rows"

    def step() -> tuple[State, str]:
        train(training)
        line = (training.save_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0]
        return "ok", f"one step: loss {json.loads(line)['loss']:.2f}, a checkpoint was written"

    for what, stage in (("states", states), ("training", step)):
        finding = _tried(what, stage)
        yield finding
        if finding.state == "fail":
            return
    # the installed vLLM has been examined already
    checkpoint = training.save_path / "checkpoint_last"
    settings = {"checkpoint": str(checkpoint), "trust_remote_code": training.trust_remote_code}
    findings = check_checkpoint(CheckConfig.build(settings), None)
    errors = "; ".join(map(str, findings.of("error")))
    yield Finding("checkpoint", "fail" if errors else "ok", errors or "a serving engine would load it")
    if not errors:
        yield from (Finding("checkpoint", "warn", str(warning)) for warning in findings.of("warning"))
