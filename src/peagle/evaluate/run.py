"""`peagle evaluate`: read prompts or recorded answers, decode or replay, count, report."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle import log
from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.drafter.card import refresh_card
from peagle.drafter.checkpoint import read_config
from peagle.drafter.model_config import DrafterConfig
from peagle.engine import Sampling
from peagle.evaluate import results as table
from peagle.evaluate.config import EvaluateConfig
from peagle.evaluate.counts import DatasetCounts, pool
from peagle.evaluate.decode import count, decode
from peagle.evaluate.prompts import DEFAULT_LIMIT, Read, by_source, check_pair, read_items
from peagle.evaluate.replay import total
from peagle.evaluate.replay_check import open_store, replay_decoded, replay_recorded
from peagle.evaluate.results import Outcome, Served
from peagle.files import whole_file, write_json
from peagle.verifier.local import TransformersVerifier, resolve_device, resolve_dtype
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.special_tokens import eos_ids, load_tokenizer

logger = logging.getLogger(__name__)


def evaluate(config: EvaluateConfig) -> int:
    """Measure a drafter and write evaluation.json, evaluation.md, run.yaml and manifest.json.

    Returns:
        0; or 1 if nothing was drafted, an answer was not the verifier's own, or replay counted otherwise than decoding.

    Raises:
        PeagleError: checkpoint, verifier, data or store cannot be used.
    """
    began_s = time.monotonic()
    folder = drafter_checkpoint.find(config.checkpoint)
    shape = DrafterConfig.from_json(read_config(folder), str(folder / "config.json"))
    verifier_config = load_verifier_config(config.verifier_name_or_path or shape.verifier, config.trust_remote_code)
    verifier_config = verifier_config.with_tensor_names(config.verifier_tensors)
    tokenizer = load_tokenizer(verifier_config.name_or_path, config.trust_remote_code)
    notes = [note for note in (check_pair(shape, verifier_config, tokenizer),) if note]
    depth = config.num_speculative_tokens or shape.num_speculative_tokens
    if depth != shape.num_speculative_tokens and not config.endpoint:
        notes.append(
            f"drafting {depth} tokens per pass, the drafter was made for {shape.num_speculative_tokens}"
            + ("; positions above that were never trained" if depth > shape.num_speculative_tokens else "")
        )
    read = read_items(config, tokenizer, verifier_config.max_position_embeddings)
    if config.endpoint:
        outcome = _serve(config, verifier_config, tokenizer, read, depth, notes)
    else:
        outcome = _measure(config, folder, verifier_config, tokenizer, read, depth, notes)
    return _report(config, folder, verifier_config, shape, read, outcome, time.monotonic() - began_s)


def _measure(
    config: EvaluateConfig,
    folder: Path,
    verifier_config: VerifierConfig,
    tokenizer: Any,
    read: Read,
    depth: int,
    notes: list[str],
) -> Outcome:
    sampling = Sampling(temperature=config.temperature, top_p=config.top_p, seed=config.seed)
    if not read.items:
        return Outcome(depth, {}, None, None, None, notes)
    dtype, device = resolve_dtype(verifier_config, config.dtype), resolve_device(config.device)
    drafter = drafter_checkpoint.load(str(folder), dtype, device)
    if config.mode == "replay":
        replayed, more = replay_recorded(config, verifier_config, drafter, read.items, depth, sampling)
        return Outcome(depth, total(replayed, depth), None, None, None, [*notes, *more])
    store = None if config.hidden_states_path is None else open_store(config.hidden_states_path, drafter.config)
    verifier = TransformersVerifier(verifier_config, dtype, device)
    ends = eos_ids(verifier_config, tokenizer)
    decoded = decode(
        verifier,
        drafter,
        read.items,
        depth,
        ends,
        sampling,
        config.batch_size,
        config.compare_samples,
        config.check_samples,
    )
    agreement = None
    if config.mode == "both" and sampling.is_greedy:
        agreement = replay_decoded(verifier, drafter, store, read.items, decoded.answers, depth, sampling)
    return Outcome(depth, count(read.items, decoded.answers, depth), decoded, agreement, None, notes)


def _serve(
    config: EvaluateConfig, verifier_config: VerifierConfig, tokenizer: Any, read: Read, depth: int, notes: list[str]
) -> Outcome:
    from peagle.evaluate.served import ServedDrafter
    from peagle.regenerate.answers import Prompt
    from peagle.regenerate.generation import GenerationSettings
    from peagle.vllm.answers import AnswerEndpoints
    from peagle.vllm.client import RetryPolicy

    if config.num_speculative_tokens is not None:
        notes.append("--num-speculative-tokens is the server's to choose; the table shows what it drafted")
    policy = RetryPolicy(config.request_timeout_s, config.max_retries, config.restart_wait_s)
    endpoints = AnswerEndpoints(config.endpoint, config.api_key, config.served_model_name, config.concurrency, policy)
    limit = config.max_new_tokens or DEFAULT_LIMIT
    settings = GenerationSettings(limit, eos_ids(verifier_config, tokenizer), config.temperature, config.top_p, 0)
    served = ServedDrafter(verifier_config, settings, endpoints)
    datasets, seconds, generated = {}, 0.0, 0
    try:
        for source, places in by_source(read.items).items():
            items = [read.items[place] for place in places if read.items[place].start < served.max_tokens]
            prompts = [Prompt(f"{place}", item.prompt_ids, config.seed + place) for place, item in enumerate(items)]
            if not prompts:
                continue
            run = served.run(prompts)
            datasets[source] = DatasetCounts(run.counts, {})
            seconds += run.seconds
            generated += run.counts.num_generated_tokens
            for row_id, words in run.refused.items():
                read.drop(items[int(row_id)].row_id, f"refused by the server: {words}")
    finally:
        served.close()
    depth = max((one.total.num_speculative_tokens for one in datasets.values()), default=depth)
    datasets = {name: one for name, one in datasets.items() if one.total.num_speculative_tokens == depth}
    loads = (
        _load(config, read, limit, eos_ids(verifier_config, tokenizer), served.max_tokens)
        if config.concurrencies
        else []
    )
    return Outcome(depth, datasets, None, None, Served(generated / seconds if seconds else None, loads), notes)


def _load(
    config: EvaluateConfig, read: Read, limit: int, ends: tuple[int, ...], max_tokens: int
) -> list[dict[str, Any]]:
    """Tokens/s and latencies at each asked concurrency, beside a server without a drafter if there is one."""
    from peagle.evaluate.served import LoadedServer, under_load

    prompts = [item.prompt_ids for item in read.items if len(item.prompt_ids) + limit <= max_tokens]
    if not prompts:
        return []
    settings = {
        "max_tokens": limit,
        "temperature": config.temperature,
        "top_p": config.top_p if config.temperature > 0 else 1.0,
        "ignore_eos": True,
        "stop_token_ids": list(ends),
        "return_token_ids": True,
    }
    most = max(config.concurrencies)
    servers: list[LoadedServer] = []
    try:
        for url in (config.endpoint[0], *((config.plain_endpoint,) if config.plain_endpoint else ())):
            name = config.served_model_name if not servers else None
            servers.append(LoadedServer(url, config.api_key, name, config.request_timeout_s, most))
        plain = servers[1] if len(servers) > 1 else None
        return under_load(servers[0], plain, prompts, settings, config.concurrencies)
    finally:
        for server in servers:
            server.close()


def _report(
    config: EvaluateConfig,
    folder: Path,
    verifier_config: VerifierConfig,
    shape: DrafterConfig,
    read: Read,
    outcome: Outcome,
    seconds: float,
) -> int:
    path = config.json_path
    pooled = pool((dataset.total for dataset in outcome.datasets.values()), outcome.depth)
    more = (outcome.rounding_note(), table.verdict(pooled, rows_trained(folder)))
    outcome = dataclasses.replace(outcome, notes=[*outcome.notes, *(note for note in more if note)])
    record = {
        "checkpoint": config.checkpoint,
        "verifier": verifier_config.name_or_path,
        "mode": "endpoint" if config.endpoint else config.mode,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "batch_size": config.concurrency if config.endpoint else config.batch_size,
        "prompts": len(read.items),
        "trained_num_speculative_tokens": shape.num_speculative_tokens,
    }
    write_json(path, {**record, **outcome.figures()})
    if Path(config.checkpoint).is_dir():  # a download in the hub's cache keeps the card that it came with
        refresh_card(folder, shape, {**record, **outcome.figures()})
    with whole_file(path.with_suffix(".md")) as temporary:
        temporary.write_text(outcome.markdown(), encoding="utf-8")
    counts = {
        "read": read.read,
        "measured": len(read.items),
        "dropped": dict(read.dropped),
        "seconds": round(seconds, 2),
    }
    log.write_run(path.parent, "evaluate", config, {"seed": config.seed, **counts})
    outcome.show(f"Acceptance, {outcome.depth} drafted tokens per pass", Console())
    logger.info(
        "read %d rows, measured %d prompts, wrote %s (and .md), dropped %s, in %s",
        read.read, len(read.items), path, read.dropped_text, log.duration(seconds),
    )  # fmt: skip
    return 0 if outcome.is_sound else 1


def rows_trained(checkpoint: Path) -> int | None:
    """How many rows a drafter was trained on, from the manifest of its run; None if that is not beside it."""
    for folder in (checkpoint, checkpoint.resolve().parent):
        try:
            manifest: Mapping[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        found = manifest.get("rows_trained")
        if isinstance(found, int):
            return found
    return None
