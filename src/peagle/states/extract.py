"""`peagle extract`: prepared rows and a verifier to a store of hidden states.

What runs the verifier is a `verifier.source.StateSource`: `TransformersSource` by default, `EndpointSource` with
`--endpoint`, `InProcessSource` with `--backend vllm`. A source is handed the whole job and the ids that are still
wanted, and yields a row's states, or its refusal, whenever it has them. Here each answer is checked, and stored or
counted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import torch

from peagle import log
from peagle.data.prepared import Prepared, load_prepared
from peagle.data.rows import TokenRow
from peagle.errors import DataError, StoreError, VerifierError
from peagle.states.checks import choice_fault, fault, to_stored
from peagle.states.config import ExtractConfig
from peagle.states.disk import check_disk
from peagle.states.shards import RowEntry
from peagle.states.source import open_source
from peagle.states.store import StoreSpec, StoreWriter
from peagle.verifier.facts import VerifierFacts, load_facts
from peagle.verifier.layers import resolve_aux_layer_ids
from peagle.verifier.source import RowRefused
from peagle.verifier.tokenizer import load_tokenizer, tokenizer_sha256
from peagle.verifier.weights import VerifierHead, fingerprint, load_head

logger = logging.getLogger(__name__)
_NAMED = 5  # rows named in the log per reason; all are in the manifest


class PreparedRows(Sequence[TokenRow]):
    """The first rows of a prepared folder, read one at a time."""

    def __init__(self, prepared: Prepared, count: int) -> None:
        self._prepared, self._count = prepared, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenRow]: ...
    def __getitem__(self, index: int | slice) -> TokenRow | Sequence[TokenRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._prepared.row(index)


@dataclass
class Outcome:
    """What became of the rows of a run."""

    stored: int = 0
    tokens: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    """Row id -> reason."""
    reasons: Counter[str] = field(default_factory=Counter)

    def drop(self, row_id: str, reason: str, detail: str) -> None:
        """Count a row that is not stored, and name it (the first few of each reason)."""
        self.dropped[row_id] = f"{reason} ({detail})" if detail else reason
        self.reasons[reason] += 1
        if self.reasons[reason] <= _NAMED:
            logger.warning("row %s skipped: %s", row_id, self.dropped[row_id])


def extract(config: ExtractConfig) -> int:
    """Fill the store, or what is missing of it.

    Returns:
        0 when the job ran to its end and the store holds rows.

    Raises:
        PeagleError: the data, the verifier, the store or the disk cannot be used; or nothing could be stored.
    """
    started_s = time.monotonic()
    prepared = load_prepared(config.preprocessed_data)
    facts = load_facts(_model_name(config, prepared), config.trust_remote_code)
    facts = facts.with_tensor_names(config.verifier_tensors)
    spec = _spec(config, prepared, facts)
    count = min(len(prepared), config.max_samples or len(prepared))
    rows = PreparedRows(prepared, count)
    entries = _entries(rows, facts)
    with StoreWriter.open(config.output, spec, config.shard_mb * 10**6) as writer:
        missing = _missing(entries, writer)
        kept_before = len(entries) - len(missing)
        if kept_before:
            logger.info("%d of %d rows are in %s already", kept_before, len(entries), config.output)
        num_bytes = check_disk(spec, entries, missing, config.output, config.max_disk_gb)
        outcome = Outcome()
        if missing:
            _fill(config, spec, facts, rows, missing, writer, outcome)
        if not writer.entries:
            raise DataError(f"{config.output}: no row could be stored ({_reasons(outcome)})")
        writer.finish()
    seconds = round(time.monotonic() - started_s, 2)
    record = {
        "verifier": facts.name_or_path,
        "aux_layer_ids": list(spec.aux_layer_ids),
        "dtype": spec.dtype,
        "rows_read": len(entries),
        "rows_kept_from_before": kept_before,
        "rows_written": outcome.stored,
        "tokens_written": outcome.tokens,
        "estimated_bytes": num_bytes,
        "dropped": dict(outcome.reasons),
        "dropped_rows": outcome.dropped,
        "seconds": seconds,
    }
    log.write_run(config.output, "extract", config, record)
    logger.info(
        "read %d rows, wrote %d (%d tokens), %d were there, dropped %d%s, in %s",
        len(entries), outcome.stored, outcome.tokens, kept_before, len(outcome.dropped),
        f" ({_reasons(outcome)})" if outcome.dropped else "", log.duration(seconds),
    )  # fmt: skip
    return 0


def _fill(
    config: ExtractConfig,
    spec: StoreSpec,
    facts: VerifierFacts,
    rows: PreparedRows,
    missing: set[str],
    writer: StoreWriter,
    outcome: Outcome,
) -> None:
    head = _head(config, facts)
    source = open_source(config, spec, facts, head, rows[0])
    try:
        by_id: dict[str, int] = {}
        total = 0
        for index, row in enumerate(rows):
            if row.row_id not in missing:
                continue
            if len(row.input_ids) > source.max_tokens:
                missing.discard(row.row_id)
                reason = f"longer than the verifier takes ({source.max_tokens} tokens)"
                outcome.drop(row.row_id, reason, f"{len(row.input_ids)} tokens")
            else:
                by_id[row.row_id] = index
                total += len(row.input_ids)
        with log.progress("extract", total, "tokens") as meter:
            for found in source.states(rows, missing):
                if found.row_id not in by_id:
                    raise StoreError(f"row {found.row_id}: states came twice or were not asked for")
                row = rows[by_id.pop(found.row_id)]
                meter.advance(len(row.input_ids))
                if isinstance(found, RowRefused):
                    outcome.drop(row.row_id, found.reason, found.detail)
                    continue
                wrong = fault(found, row, spec)
                if wrong is None and head is not None:
                    wrong = choice_fault(found, head, spec.torch_dtype)
                if wrong is not None and not config.skip_bad_rows:
                    raise StoreError(
                        f"row {row.row_id}: {wrong}. It was not stored; --skip-bad-rows would count it and go on."
                    )
                if wrong is not None:
                    outcome.drop(row.row_id, wrong.split(",")[0].split(":")[0], wrong)
                    continue
                writer.add(to_stored(found, row, spec.torch_dtype))
                outcome.stored += 1
                outcome.tokens += len(row.input_ids)
        if by_id:
            raise StoreError(f"no states came for {len(by_id)} rows (first: {next(iter(by_id))}); run it again")
    finally:
        source.close()


def _head(config: ExtractConfig, facts: VerifierFacts) -> VerifierHead | None:
    """The verifier's head, to check outputs with; None where its files are only on the server."""
    try:
        return load_head(facts).to("cpu", torch.float32)
    except VerifierError:
        if not config.endpoint or config.validate_outputs:
            raise
        logger.warning("%s: its head cannot be read here, so outputs are not checked against it", facts.name_or_path)
        return None


def _model_name(config: ExtractConfig, prepared: Prepared) -> str:
    made_for = str(prepared.summary["model"])
    asked = config.model or config.verifier_name_or_path or made_for
    if asked != made_for:
        found = tokenizer_sha256(load_tokenizer(asked, config.trust_remote_code))
        if found != prepared.summary["tokenizer_sha256"]:
            raise DataError(
                f"{config.preprocessed_data}: prepared with the tokenizer of {made_for}, which differs from that of "
                f"{asked}; prepare the data again for this verifier"
            )
    return asked


def _spec(config: ExtractConfig, prepared: Prepared, facts: VerifierFacts) -> StoreSpec:
    try:
        weights = fingerprint(facts)
    except VerifierError:
        if not config.endpoint:
            raise
        weights = ""  # only the server has them
    return StoreSpec(
        verifier=facts.name_or_path,
        verifier_fingerprint=weights,
        model_type=facts.model_type,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        aux_layer_ids=resolve_aux_layer_ids(facts.num_layers, config.target_layer_ids),
        dtype=facts.dtype if config.dtype == "auto" else config.dtype,
        tokenizer_sha256=str(prepared.summary["tokenizer_sha256"]),
    )


def _entries(rows: PreparedRows, facts: VerifierFacts) -> list[RowEntry]:
    """The rows' index entries.

    Raises:
        DataError: an id given twice, or a token id that the verifier does not have.
    """
    entries: list[RowEntry] = []
    seen: set[str] = set()
    with log.progress("check", len(rows), "rows") as meter:
        for row in rows:
            if row.row_id in seen:
                raise DataError(f"row id {row.row_id} occurs twice in the prepared data; prepare it again")
            seen.add(row.row_id)
            highest = max(row.input_ids)
            if highest >= facts.vocab_size or min(row.input_ids) < 0:
                raise DataError(
                    f"row {row.row_id}: token id {highest} is beyond the vocabulary of {facts.name_or_path} "
                    f"({facts.vocab_size} rows); prepare the data with this verifier's tokenizer"
                )
            entries.append(RowEntry.of(row))
            meter.advance(1)
    return entries


def _missing(entries: Sequence[RowEntry], writer: StoreWriter) -> set[str]:
    """Ids that the store lacks.

    Raises:
        StoreError: a row is there with other tokens or another mask.
    """
    missing = set()
    for entry in entries:
        there = writer.entries.get(entry.row_id)
        if there is None:
            missing.add(entry.row_id)
        elif there != entry:
            raise StoreError(
                f"{writer.folder}: row {entry.row_id} is in the store with other tokens or another loss mask: the data "
                "was prepared again. Choose another --output, or remove the store."
            )
    return missing


def _reasons(outcome: Outcome) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in outcome.reasons.most_common()) or "nothing came"
