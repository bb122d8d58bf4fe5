"""The model card beside a checkpoint: the hub's metadata, how to serve it, how good it is, how it was trained.

In: the drafter's config, the run's manifest, the acceptance table if there is one. Out: Markdown. Paths of the machine
that trained it never enter the card.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from peagle.drafter.model_config import DrafterConfig
from peagle.embedded import NAMES, name_of
from peagle.files import whole_file

logger = logging.getLogger(__name__)

CARD = "README.md"
NOT_MEASURED = "Not measured yet: `peagle evaluate` does it, and adds the table here."
KINDS = {"peagle": "P-EAGLE", "eagle3": "EAGLE-3"}
# Settings of a run that a reader of the card wants, in this order; those that are not there are left out.
_SHOWN = (
    *("num_layers", "num_depths", "down_sample_ratio", "down_sample_ratio_min", "loss_fn", "depth_loss_decay"),
    *("optimizer", "lr", "muon_lr", "embedding_lr", "scheduler_type", "epochs", "max_steps", "total_seq_len"),
    *("batch_size", "gradient_accumulation_steps", "train_embeddings", "draft_vocab_size", "norm_before_residual"),
    *("norm_before_fc", "ttt_steps", "ttt_step_loss_decay", "seed"),
)

_ONLY_EAGLE3 = ("ttt_steps", "ttt_step_loss_decay")
_ONLY_PEAGLE = ("num_depths", "depth_loss_decay", "down_sample_ratio", "down_sample_ratio_min")


def write_card(
    folder: Path, config: DrafterConfig, run: Mapping[str, Any], measured: str | None, license_name: str | None
) -> None:
    """Write README.md into a checkpoint folder; see `card`."""
    with whole_file(folder / CARD) as temporary:
        temporary.write_text(card(config, run, measured, license_name), encoding="utf-8")


def refresh_card(folder: Path, config: DrafterConfig, measured: str | None) -> None:
    """Write the card of a checkpoint anew with all that is known now; a folder that cannot be written is left as it is.

    `measured` is the table of what was just measured, see `card`; None keeps the table that the card has.
    """
    path = folder / CARD
    try:
        if measured is None and path.is_file() and NOT_MEASURED not in path.read_text(encoding="utf-8"):
            return
        write_card(folder, config, run_facts(folder), measured, None)
    except OSError as error:
        logger.debug("%s: the card was not written (%s)", path, error)


def run_facts(checkpoint: Path) -> dict[str, Any]:
    """What is known about a checkpoint's training: `settings` (run.yaml), `versions` and counts (manifest.json).

    Read from the checkpoint's folder or the run's folder above it; empty where it came from elsewhere.
    """
    real = checkpoint.resolve()
    for folder in (real, real.parent):
        run, manifest = folder / "run.yaml", folder / "manifest.json"
        if run.is_file():
            settings = yaml.safe_load(run.read_text(encoding="utf-8")) or {}
            more = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
            return {"settings": next(iter(settings.values()), {}), **more}
    return {}


def card(config: DrafterConfig, run: Mapping[str, Any], measured: str | None, license_name: str | None) -> str:
    """The text of the card.

    Args:
        config: the drafter's.
        run: `run_facts`, or {"settings": ...} at the time of training; empty if not known.
        measured: the acceptance table in Markdown, `evaluate.counts.card_section`; None if not measured.
        license_name: for the hub's metadata; None leaves it out.
    """
    kind = KINDS[config.speculators_model_type]
    verifier = public_name(config.verifier)
    layers = ", ".join(map(str, config.aux_layer_ids))
    how = "all in one pass of its own" if kind == "P-EAGLE" else "one by one"
    pruned = f"Its draft vocabulary has {config.draft_vocab_size:,} of {config.vocab_size:,} tokens. "
    parts = [
        _metadata(config, license_name),
        f"# {kind} drafter for {verifier}",
        "",
        f"A drafter for speculative decoding with `{verifier}`: {config.num_layers} {config.layer_type} layers of "
        f"width {config.hidden_size} that read the verifier's layers {layers}. It drafts "
        f"{config.num_speculative_tokens} tokens per verifier pass, {how}. {pruned if config.is_pruned else ''}"
        "The text stays the verifier's own: every draft is verified.",
        "",
        "## Serve it",
        "",
        "```bash",
        f"vllm serve OWNER/{verifier.replace(':', '-').split('/')[-1]}-{kind}",
        "```",
        "",
        "The folder (or hub id) of this drafter is all that vLLM (0.28 or newer) needs: it names its verifier. "
        "`peagle serve` checks it first and sets what vLLM needs.",
        "",
        "## Acceptance",
        "",
        measured or NOT_MEASURED,
        "",
        *_training(run),
    ]
    return "\n".join(parts).rstrip() + "\n"


def public_name(verifier: str) -> str:
    """A hub id as it is; the embedded verifier by the name that commands take; of another folder only its name."""
    if name_of(verifier) in NAMES:
        return name_of(verifier)
    return verifier if is_hub_id(verifier) else PurePath(verifier).name


def is_hub_id(name: str) -> bool:
    """Whether a name looks like `owner/model` and is no folder here."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _metadata(config: DrafterConfig, license_name: str | None) -> str:
    values: dict[str, Any] = {"library_name": "vllm", "pipeline_tag": "text-generation"}
    if is_hub_id(config.verifier):
        values["base_model"] = config.verifier
    if license_name:
        values["license"] = license_name
    values["tags"] = ["speculative-decoding", "peagle", KINDS[config.speculators_model_type].lower()]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def _training(run: Mapping[str, Any]) -> list[str]:
    settings = run.get("settings") or {}
    versions = run.get("versions") or {}
    other = _ONLY_PEAGLE if settings.get("speculator_type") == "eagle3" else _ONLY_EAGLE3
    rows = [(name, settings[name]) for name in _SHOWN if settings.get(name) is not None and name not in other]
    counts = {key: value for key, value in run.items() if key.startswith("num_") and isinstance(value, (int, float))}
    rows += counts.items()
    rows += [(name, versions[name]) for name in ("peagle", "commit", "torch", "transformers") if name in versions]
    if not rows:
        return []
    heading = "Trained with `peagle` on answers of the verifier; what was set and what ran:"
    lines = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows]
    return ["## Training", "", heading, "", "| | |", "|---|---|", *lines, ""]
