"""`peagle extract`: prepared rows and a verifier to a store of hidden states.

What runs the verifier is a `verifier.source.StateSource`: `TransformersSource` by default, `EndpointSource` with
`--endpoint`, `InProcessSource` with `--backend vllm`. A source is handed the whole job and the ids that are still
wanted, and yields a row's states, or its refusal, whenever it has them. Here each answer is checked, and stored or
counted.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle import log
from peagle.data.prepared import Prepared, load_prepared
from peagle.data.records import TokenRow
from peagle.data.tokenizer import load_tokenizer, tokenizer_sha256
from peagle.errors import DataError, DiskError, StoreError, VerifierError
from peagle.files import available_memory, free_bytes
from peagle.hidden_states.batch import StoredRow
from peagle.hidden_states.config import ExtractConfig
from peagle.hidden_states.proof import Recompute, StateProof
from peagle.hidden_states.store import RowEntry, StoreSpec
from peagle.hidden_states.writer import StoreWriter
from peagle.verifier.local import NotCausalError, TransformersSource, TransformersVerifier
from peagle.verifier.model_config import VerifierConfig, load_verifier_config
from peagle.verifier.source import RowRefused, RowStates, StateSource
from peagle.verifier.weights import TensorFiles, VerifierHead, load_head, weights_are_here

logger = logging.getLogger(__name__)
_NAMED = 5  # rows named in the log per reason; all are in the manifest
_CHECKED_TOKENS = 64  # of one row, on which the head is proved
_SPARE_BYTES = 64 << 20  # left free on the disk


class PreparedRows(Sequence[TokenRow]):
    """The first rows of a prepared folder, read one at a time."""

    def __init__(self, prepared: Prepared, count: int) -> None:
        self._prepared, self._count = prepared, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:  # of one row: nobody slices
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._prepared.row(index)


@dataclass
class ExtractOutcome:
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

    Returns 0; a PeagleError says that data, verifier, store or disk cannot be used, or that nothing could be stored.
    """
    started_s = time.monotonic()
    prepared = load_prepared(config.preprocessed_data)
    verifier = load_verifier_config(_model_name(config, prepared), config.trust_remote_code, config.verifier_tensors)
    spec = StoreSpec.of(
        verifier,
        aux_layer_ids=config.target_layer_ids,
        dtype=config.dtype,
        tokenizer_sha256=str(prepared.summary["tokenizer_sha256"]),
        is_served=bool(config.endpoint),
    )
    rows = PreparedRows(prepared, min(len(prepared), config.max_samples or len(prepared)))
    entries = _entries(rows, verifier)
    with StoreWriter.open(config.output, spec, config.shard_mb * 10**6) as writer:
        missing = _missing(entries, writer)
        kept_before = len(entries) - len(missing)
        if kept_before:
            logger.info("%d of %d rows are in %s already", kept_before, len(entries), config.output)
        num_bytes = _check_disk(spec, entries, missing, config.output, config.max_disk_gb)
        outcome = _fill(config, verifier, rows, missing, writer) if missing else ExtractOutcome()
        if not writer.entries:
            raise DataError(f"{config.output}: no row could be stored ({_reasons(outcome)})")
        writer.finish()
    seconds = round(time.monotonic() - started_s, 2)
    record = {
        "verifier": verifier.name_or_path,
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
    config: ExtractConfig, verifier: VerifierConfig, rows: PreparedRows, missing: set[str], writer: StoreWriter
) -> ExtractOutcome:
    """Have the missing rows' states made, and store them."""
    outcome, spec = ExtractOutcome(), writer.spec
    # 1. the rows that are not too long
    head = proving_head(verifier, bool(config.endpoint) and not config.validate_outputs)
    if head is None:
        logger.warning("%s: its head cannot be read here, so outputs are not checked against it", verifier.name_or_path)
    source = open_source(config=config, spec=spec, verifier=verifier, head=head, sample=rows[0], rank=0)
    try:
        proof = open_proof(config, spec, verifier, head, source)
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
        # 2. each answer is checked, and stored or counted
        with log.progress("extract", total, "tokens") as meter:
            for answer in source.states(rows, missing):
                if answer.row_id not in by_id:
                    raise StoreError(f"row {answer.row_id}: states came twice or were not asked for")
                row = rows[by_id.pop(answer.row_id)]
                meter.advance(len(row.input_ids))
                if isinstance(answer, RowRefused):
                    outcome.drop(row.row_id, answer.reason, answer.detail)
                    continue
                wrong = proof.fault(answer, row)
                if wrong is None:
                    writer.add(to_stored(answer, row, spec.torch_dtype))
                    outcome.stored += 1
                    outcome.tokens += len(row.input_ids)
                elif config.skip_bad_rows:
                    outcome.drop(row.row_id, wrong.split(",")[0].split(":")[0], wrong)
                else:
                    raise StoreError(
                        f"row {row.row_id}: {wrong}. It was not stored; --skip-bad-rows would count it and go on."
                    )
        if by_id:
            raise StoreError(f"no states came for {len(by_id)} rows (first: {next(iter(by_id))}); run it again")
        logger.info("%s", proof.summary())
    finally:
        source.close()
    return outcome


def proving_head(verifier: VerifierConfig, is_served: bool) -> VerifierHead | None:
    """The verifier's head in float32 on the CPU, to prove states with; None where only the server has it."""
    try:
        return load_head(verifier).to("cpu", torch.float32)
    except VerifierError:
        if not is_served:
            raise
        return None


def _model_name(config: ExtractConfig, prepared: Prepared) -> str:
    made_for = str(prepared.summary["model"])
    name = config.model or config.verifier_name_or_path or made_for
    sha256 = prepared.summary["tokenizer_sha256"]
    if name != made_for and tokenizer_sha256(load_tokenizer(name, config.trust_remote_code)) != sha256:
        raise DataError(
            f"{config.preprocessed_data}: prepared with the tokenizer of {made_for}, which differs from that of "
            f"{name}; prepare the data again for this verifier"
        )
    return name


def _entries(rows: PreparedRows, verifier: VerifierConfig) -> list[RowEntry]:
    """The rows' index entries; refuses an id given twice, and a token id that the verifier does not have."""
    entries: dict[str, RowEntry] = {}
    with log.progress("check", len(rows), "rows") as meter:
        for row in rows:
            if row.row_id in entries:
                raise DataError(f"row id {row.row_id} occurs twice in the prepared data; prepare it again")
            highest = max(row.input_ids)
            if highest >= verifier.vocab_size or min(row.input_ids) < 0:
                raise DataError(
                    f"row {row.row_id}: token id {highest} is beyond the vocabulary of {verifier.name_or_path} "
                    f"({verifier.vocab_size} rows); prepare the data with this verifier's tokenizer"
                )
            entries[row.row_id] = RowEntry.of(row)
            meter.advance(1)
    return list(entries.values())


def _missing(entries: Sequence[RowEntry], writer: StoreWriter) -> set[str]:
    """Ids that the store lacks; refuses a row that is there with other tokens or another mask."""
    for entry in entries:
        if writer.entries.get(entry.row_id, entry) != entry:
            raise StoreError(
                f"{writer.folder}: row {entry.row_id} is in the store with other tokens or another loss mask: the data "
                "was prepared again. Choose another --output, or remove the store."
            )
    return {entry.row_id for entry in entries} - writer.entries.keys()


def _reasons(outcome: ExtractOutcome) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in outcome.reasons.most_common()) or "nothing came"


def to_stored(answer: RowStates, row: TokenRow, dtype: torch.dtype) -> StoredRow:
    """Keep what training reads: all auxiliary states, and last states where a label needs them, in `dtype`."""
    label_pos = torch.tensor(row.label_positions(), dtype=torch.int64)
    aux_states = answer.aux_states.to("cpu", dtype).contiguous()
    return StoredRow(row, aux_states, label_pos, answer.last_states[label_pos].to("cpu", dtype).contiguous())


def _check_disk(
    spec: StoreSpec, entries: Sequence[RowEntry], missing: AbstractSet[str], folder: Path, max_disk_gb: float | None
) -> int:
    """Estimated bytes of the whole store; refuses what the disk or `max_disk_gb` does not hold before anything runs."""
    whole = sum(spec.row_bytes(entry) for entry in entries)
    needed = sum(spec.row_bytes(entry) for entry in entries if entry.row_id in missing)
    free = free_bytes(folder)
    advice = "Use --max-samples, a shorter --seq-length at prepare, or fewer --target-layer-ids"
    if max_disk_gb is not None and whole > max_disk_gb * 10**9:
        raise DiskError(
            f"{folder}: the store would take {log.size(whole)}, --max-disk-gb allows {max_disk_gb:g}. {advice}."
        )
    if missing and needed + _SPARE_BYTES > free:
        raise DiskError(
            f"{folder}: {len(missing)} rows need {log.size(needed)}, the disk has {log.size(free)} free. {advice}, or "
            "another --output."
        )
    if missing:
        logger.info("%d rows to extract: about %s, %s free on the disk", len(missing), log.size(needed), log.size(free))
    return whole


def open_source(
    *,
    config: ExtractConfig,
    spec: StoreSpec,
    verifier: VerifierConfig,
    head: VerifierHead | None,
    sample: TokenRow,
    rank: int,
) -> StateSource:
    """Open the source that a job's `endpoint` and `backend` ask for.

    The Transformers backend proves `head` on `sample`, any row, before the job starts. `rank` tells processes that make
    the same store apart (0 of one): their files must not be taken for one another's.

    Raises:
        PeagleError: the verifier cannot be loaded or reached, or its files do not give its own logits.
    """
    store = str(config.output.resolve()) + (f"#{rank}" if rank else "")
    folder = config.hidden_states_path or config.output
    if config.endpoint:
        from peagle.vllm.states import EndpointSource

        return EndpointSource(
            verifier=verifier,
            aux_layer_ids=spec.aux_layer_ids,
            dtype=spec.dtype,
            servers=config,
            hidden_states_path=folder,
            store=store,
            check_all_positions=config.validate_outputs,
        )
    if config.backend == "vllm":
        from peagle.vllm.inprocess import InProcessSource

        return InProcessSource(
            verifier=verifier,
            aux_layer_ids=spec.aux_layer_ids,
            dtype=spec.dtype,
            folder=folder,
            store=store,
            check_all_positions=config.validate_outputs,
            vllm_arguments=config.extra_args,
        )
    model = TransformersVerifier(verifier, spec.dtype, config.device)
    if head is not None:
        model.check_head(head, sample.input_ids[:_CHECKED_TOKENS])
    return TransformersSource(model, spec.aux_layer_ids, config.batch_size, head if config.validate_outputs else None)


def open_proof(
    config: ExtractConfig, spec: StoreSpec, verifier: VerifierConfig, head: VerifierHead | None, source: StateSource
) -> StateProof:
    """What judges the rows of a job's source: with states computed again by the model in this process, by the weights
    that are here, or by another of several servers."""
    from peagle.vllm.states import EndpointSource

    again: Recompute | None = None
    if isinstance(source, TransformersSource):
        again = source.states_again
    elif weights_are_here(verifier):
        again = _weights_here(spec, verifier, head)
    elif isinstance(source, EndpointSource) and len(config.endpoint) > 1:
        again = source.second_opinion
    if again is None:
        logger.warning(
            "%s: neither its weights here nor a second server: that states are of layers %s rests on the server's word",
            verifier.name_or_path, list(spec.aux_layer_ids),
        )  # fmt: skip
    return StateProof(
        spec=spec,
        head=head,
        again=again,
        is_quantised=verifier.quantization is not None,
        checks_all=config.validate_outputs,
    )


def _weights_here(spec: StoreSpec, verifier: VerifierConfig, head: VerifierHead | None) -> Recompute | None:
    """Load the verifier on this machine's CPU, to compute rows again; None, with a warning, if that cannot be."""
    started_s = time.monotonic()
    needed = sum(path.stat().st_size for path in TensorFiles.open(verifier.name_or_path).paths)
    free = available_memory()
    try:
        if free is not None and needed > free:
            raise VerifierError(f"its weights take {log.size(needed)}, {log.size(int(free))} of memory are free")
        own = TransformersVerifier(verifier, spec.dtype, "cpu")
    except NotCausalError:
        raise
    except VerifierError as error:
        logger.warning("states are not computed again here: %s", error)
        return None
    logger.info("loaded the verifier's weights here, to compare rows with, in %.1f s", time.monotonic() - started_s)

    def again(ids: list[int], origin: str) -> dict[int, Tensor]:
        if head is not None:
            own.check_head(head, ids[:_CHECKED_TOKENS])
        return own.layer_states(ids)

    return again
