"""The whole road on a few rows, in a temporary folder: what would go wrong later goes wrong here."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle.data.config import PrepareConfig
from peagle.errors import PeagleError
from peagle.files import free_bytes
from peagle.road.doctor import DoctorConfig, Finding, guarded
from peagle.road.doctor_environment import available_memory
from peagle.road.estimate import Rows, drafter_parameters, store_bytes, training_bytes
from peagle.road.recipe import Sizes
from peagle.states.config import ExtractConfig
from peagle.train.config import TrainConfig
from peagle.verifier.facts import VerifierFacts

# Two replies in one conversation: a template that rewrites history shows it here.
PROBE = [
    {"role": "user", "content": "What is two plus three?"},
    {"role": "assistant", "content": "Two plus three is five."},
    {"role": "user", "content": "And doubled?"},
    {"role": "assistant", "content": "Doubled it is ten, since two times five is ten."},
]
_FEW_SUPERVISED = 0.05


def walk(config: DoctorConfig, found: dict[str, Any]) -> Iterator[Finding]:
    """Prepare, extract, train one step and check, on `config.rows` conversations."""
    facts: VerifierFacts = found["facts"]
    with tempfile.TemporaryDirectory(prefix="peagle-doctor-") as name:
        folder = Path(name)
        data = config.data
        if not data:
            (folder / "probe.jsonl").write_text(json.dumps({"messages": PROBE}) + "\n", encoding="utf-8")
            data = (str(folder / "probe.jsonl"),)
        summary: dict[str, Any] = {}
        for finding in _prepare(config, facts, data, folder, summary):
            yield finding
            if finding.state == "fail":
                return
        yield from sizes(config, facts, summary)
        if "layer_ids" not in found:
            return
        reason = _why_not_run(config, facts)
        if reason:
            yield Finding("dry run", "warn", reason)
            return
        yield from _run(config, facts, folder, summary)


def _prepare(
    config: DoctorConfig, facts: VerifierFacts, data: tuple[str, ...], folder: Path, summary: dict[str, Any]
) -> Iterator[Finding]:
    """Template and data: is every reply found, how much is supervised, what is dropped or cut."""
    from peagle.data.prepare import prepare

    settings = PrepareConfig.build(
        {
            "model": facts.name_or_path,
            "data": data,
            "output": folder / "prepared",
            "seq_length": config.seq_length,
            "max_samples": config.rows,
            "num_preprocessing_workers": 1,
            "trust_remote_code": config.trust_remote_code,
        }
    )
    try:
        with quiet():
            prepare(settings)
    except PeagleError as error:
        yield guarded("data", error)
        return
    summary.update(json.loads((folder / "prepared" / "summary.json").read_text(encoding="utf-8")))
    how = ", ".join(summary.get("mask_from", {}))
    yield Finding("template", "ok", f"every reply of the rows was found ({how})" if how else "every reply was found")
    dropped = ", ".join(f"{count} {reason}" for reason, count in summary["dropped"].items())
    share = summary["supervised_tokens"] / max(summary["tokens"], 1)
    text = f"{summary['kept']} of {summary['read']} conversations kept, {100 * share:.0f} % of their tokens supervised"
    if dropped:
        yield Finding("data", "warn", f"{text}; dropped: {dropped}")
    elif share < _FEW_SUPERVISED:
        yield Finding("data", "warn", f"{text}: hardly anything to learn from; are the replies there?")
    else:
        yield Finding("data", "ok", text)
    if summary.get("rows_cut"):
        yield Finding(
            "lengths", "warn", f"{summary['rows_cut']} of {summary['rows']} rows are cut at {config.seq_length} tokens"
        )


def sizes(config: DoctorConfig, facts: VerifierFacts, summary: dict[str, Any]) -> Iterator[Finding]:
    """Disk and memory that the planned run takes."""
    known = {name: getattr(facts, name) for name in Sizes.model_fields if hasattr(facts, name)}
    shape = Sizes(**known, parameters_billion=1.0)
    vocab = config.draft_vocab_size or facts.vocab_size
    if vocab > facts.vocab_size:
        yield Finding("vocabulary", "fail", f"--draft-vocab-size {vocab} exceeds the verifier's {facts.vocab_size}")
        return
    layers, others, head = drafter_parameters(shape, config.num_layers, vocab)
    need = training_bytes(shape, config.num_layers, vocab, config.seq_length)
    total = f"{(layers + others + head) / 1e6:,.0f} M parameters"
    takes = f"training takes about {need / 1e9:.1f} GB for packs of {config.seq_length}"
    yield Finding("drafter", "ok", f"{config.num_layers} layers, {total}; {takes}")
    if config.max_samples is None:
        return
    scale = config.max_samples / max(summary["read"], 1)
    rows = Rows(config.max_samples, int(summary["tokens"] * scale), int(summary["supervised_tokens"] * scale), False)
    disk = store_bytes(rows, facts.hidden_size, 4 if facts.dtype == "float32" else 2)
    free = free_bytes(config.output)
    text = f"{config.max_samples:,} conversations like these: {rows.num_tokens:,} tokens, {disk / 1e9:.1f} GB of states"
    if disk > free:
        yield Finding(
            "store", "fail", f"{text}, but {config.output} has {free / 1e9:.1f} GB free; take fewer, or another disk"
        )
    else:
        yield Finding("store", "ok", f"{text}, {free / 1e9:.1f} GB free")


def _why_not_run(config: DoctorConfig, facts: VerifierFacts) -> str | None:
    """Why the weights are not run here; None if they can be."""
    if not config.weights:
        return "the weights were not run (--no-weights)"
    folder = Path(facts.name_or_path)
    if not folder.is_dir():
        return f"{facts.name_or_path} is not a folder here: its weights were not fetched for a dry run"
    needed = 2.5 * sum(file.stat().st_size for file in folder.glob("*.safetensors")) + 1e9
    free = available_memory()
    if free is not None and needed > free:
        return f"running the weights here needs about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free"
    return None


def _run(config: DoctorConfig, facts: VerifierFacts, folder: Path, summary: dict[str, Any]) -> Iterator[Finding]:
    """Extract with every check on, one training step, the saved checkpoint checked."""
    from peagle.states.extract import extract
    from peagle.train import train

    states = ExtractConfig.build(
        {
            "preprocessed_data": folder / "prepared",
            "output": folder / "states",
            "model": facts.name_or_path,
            "target_layer_ids": config.target_layer_ids,
            "validate_outputs": True,
            "batch_size": 4,
            "trust_remote_code": config.trust_remote_code,
        }
    )
    try:
        with quiet():
            extract(states)
    except PeagleError as error:
        yield guarded("states", error)
        return
    yield Finding("states", "ok", f"head(norm(last state)) is the verifier's own choice on all {summary['rows']} rows")
    training = TrainConfig.build(
        {
            "verifier_name_or_path": facts.name_or_path,
            "data_path": folder / "prepared",
            "hidden_states_path": folder / "states",
            "save_path": folder / "checkpoints",
            "num_layers": config.num_layers,
            "total_seq_len": max(config.seq_length, 8),
            "max_steps": 1,
            "epochs": 1,
            "train_data_ratio": 1.0,
            "mask_token_id": config.mask_token_id,
            "draft_vocab_size": config.draft_vocab_size,
            "trust_remote_code": config.trust_remote_code,
        }
    )
    try:
        with quiet():
            train(training)
    except PeagleError as error:
        yield guarded("training", error)
        return
    line = (folder / "checkpoints" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0]
    yield Finding("training", "ok", f"one step: loss {json.loads(line)['loss']:.2f}, a checkpoint was written")
    yield from _checked(folder / "checkpoints" / "checkpoint_last")


def _checked(checkpoint: Path) -> Iterator[Finding]:
    """What a serving engine would say; the installed vLLM has been looked at already."""
    from peagle.serve.check import check_checkpoint

    findings = check_checkpoint(checkpoint, None, True, None, None, False)
    errors = [str(finding) for finding in findings.of("error")]
    if errors:
        yield Finding("checkpoint", "fail", "; ".join(errors))
        return
    yield Finding("checkpoint", "ok", "a serving engine would load it")
    for finding in findings.of("warning"):
        yield Finding("checkpoint", "warn", str(finding))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the stages' own messages to errors: the findings say what there is to say."""
    loud = logging.getLogger("peagle")
    level = loud.level
    loud.setLevel(logging.ERROR)
    try:
        yield
    finally:
        loud.setLevel(level)
