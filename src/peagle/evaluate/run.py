"""`peagle evaluate`: read prompts or recorded answers, decode or replay, count, report."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle import log
from peagle.data.tokenizer import load_tokenizer
from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.drafter.card import refresh_card, run_facts
from peagle.drafter.checkpoint import read_config
from peagle.drafter.model_config import DrafterConfig
from peagle.evaluate import results
from peagle.evaluate.config import EvaluateConfig
from peagle.evaluate.counts import card_section, count_by_context, count_datasets, implausible
from peagle.evaluate.decode import decode
from peagle.evaluate.prompts import Read, check_pair, read_items
from peagle.evaluate.replay_check import open_store, replay_decoded, replay_recorded
from peagle.evaluate.results import Measurement
from peagle.files import whole_file, write_json
from peagle.verifier.local import TransformersVerifier, resolve_device, resolve_dtype
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.special_tokens import eos_ids

logger = logging.getLogger(__name__)


def evaluate(config: EvaluateConfig) -> int:
    """Measure a drafter and write evaluation.json, evaluation.md, run.yaml and manifest.json.

    Returns:
        0; or 1 if nothing was drafted, an answer was not the verifier's own, or replay counted otherwise than decoding.

    Raises:
        PeagleError: checkpoint, verifier, data or store cannot be used.
    """
    began_s = time.monotonic()
    # 1. the drafter and its verifier
    folder = drafter_checkpoint.find(config.checkpoint)
    shape = DrafterConfig.from_json(read_config(folder), str(folder / "config.json"))
    name = config.verifier_name_or_path or shape.verifier
    verifier = load_verifier_config(name, config.trust_remote_code, config.verifier_tensors)
    tokenizer = load_tokenizer(verifier.name_or_path, config.trust_remote_code)
    notes = [note for note in (check_pair(shape, verifier, tokenizer),) if note]
    depth = config.num_speculative_tokens or shape.num_speculative_tokens
    if depth != shape.num_speculative_tokens and not config.endpoint:
        notes.append(
            f"drafting {depth} tokens per pass, the drafter was made for {shape.num_speculative_tokens}"
            + ("; positions above that were never trained" if depth > shape.num_speculative_tokens else "")
        )
    # 2. measure
    read = read_items(config, tokenizer, verifier.max_position_embeddings)
    if config.endpoint:
        from peagle.evaluate.served import measure_served

        outcome = measure_served(config, verifier, eos_ids(verifier, tokenizer), read, depth)
    else:
        outcome = _measure(
            config=config, folder=folder, verifier_config=verifier, tokenizer=tokenizer, read=read, depth=depth
        )
    pooled = outcome.pooled
    said = results.verdict(pooled, run_facts(folder).get("rows_trained"))
    more = (outcome.rounding_note(), said, implausible(pooled))
    outcome = replace(outcome, notes=[*notes, *outcome.notes, *(note for note in more if note)])
    # 3. report
    evaluation = {
        "checkpoint": config.checkpoint,
        "verifier": verifier.name_or_path,
        "mode": "endpoint" if config.endpoint else config.mode,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "batch_size": config.concurrency if config.endpoint else config.batch_size,
        "prompts": len(read.items),
        "trained_num_speculative_tokens": shape.num_speculative_tokens,
        **outcome.figures(),
    }
    path = config.json_path
    write_json(path, evaluation)
    with whole_file(path.with_suffix(".md")) as temporary:
        temporary.write_text(results.markdown(evaluation), encoding="utf-8")
    if Path(config.checkpoint).is_dir():  # a download in the hub's cache keeps the card that it came with
        refresh_card(folder, shape, card_section(evaluation))
    seconds = time.monotonic() - began_s
    counts = {"read": read.read, "measured": len(read.items), "dropped": dict(read.dropped)}
    log.write_run(path.parent, "evaluate", config, {"seed": config.seed, **counts, "seconds": round(seconds, 2)})
    results.show(evaluation, f"Acceptance, {outcome.depth} drafted tokens per pass", Console())
    logger.info(
        "read %d rows, measured %d prompts, wrote %s (and .md), dropped %s, in %s",
        read.read, len(read.items), path, read.dropped_text, log.duration(seconds),
    )  # fmt: skip
    return 0 if outcome.is_sound else 1


def _measure(
    config: EvaluateConfig, folder: Path, verifier_config: VerifierConfig, tokenizer: Any, read: Read, depth: int
) -> Measurement:
    """Decode, replay or both, in this process."""
    if not read.items:
        return Measurement(depth=depth, datasets={}, notes=[])
    dtype, device = resolve_dtype(verifier_config, config.dtype), resolve_device(config.device)
    drafter = drafter_checkpoint.load(str(folder), dtype, device)
    if config.mode == "replay":
        replayed, notes = replay_recorded(config, verifier_config, drafter, read.items, depth)
        counted = [(recorded.source, recorded.end - recorded.start, one.by_context) for recorded, one in replayed]
        return Measurement(depth=depth, datasets=count_datasets(counted, depth), notes=notes)
    store = None if config.hidden_states_path is None else open_store(config.hidden_states_path, drafter.config)
    verifier = TransformersVerifier(verifier_config, dtype, device)
    decoded = decode(
        verifier=verifier,
        drafter=drafter,
        items=read.items,
        depth=depth,
        eos_token_ids=eos_ids(verifier_config, tokenizer),
        config=config,
    )
    agreement = None
    if config.mode == "both" and config.is_greedy:
        agreement = replay_decoded(
            verifier=verifier, drafter=drafter, store=store, items=read.items, answers=decoded.answers, depth=depth
        )
    counted = []
    for item, answer in zip(read.items, decoded.answers):
        passes = [(one.num_known, one.num_accepted) for one in answer.passes]
        counted.append((item.source, len(answer.ids), count_by_context(passes, depth)))
    datasets = count_datasets(counted, depth)
    return Measurement(depth=depth, datasets=datasets, notes=[], decoded=decoded, agreement=agreement)
