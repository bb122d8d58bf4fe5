"""What is decided from files before any weight is loaded: which rows, which drafter, and every early refusal.

Rank 0 decides for all, so that no two ranks can differ, and a file that only one of them can read is no trouble. In:
the config. Out: a `Decision` of JSON values.
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from peagle import log
from peagle.data.draft_vocab import choose_vocab, vocab_of_ids
from peagle.data.prepared import Prepared, load_prepared
from peagle.data.records import TokenRow
from peagle.data.tokenizer import load_tokenizer
from peagle.drafter.checkpoint import find, read_weights
from peagle.drafter.model_config import DrafterConfig, config_for
from peagle.drafter.warm_start import check_layers, check_source
from peagle.errors import CheckpointError, DataError, StoreError, TrainingError
from peagle.hidden_states.store import RowEntry, StoreReader, StoreSpec
from peagle.layout.supervision import Extent, extent
from peagle.train.batches import first_by_hash, packs, split
from peagle.train.checkpoints import WEIGHTS_OF
from peagle.train.config import TrainConfig
from peagle.train.plan import pretrained_config
from peagle.train.sources import plan_states
from peagle.verifier.model_config import VerifierConfig, load_verifier_config, resolve_aux_layer_ids
from peagle.verifier.special_tokens import resolve_mask_token
from peagle.verifier.weights import fingerprint, same_weights

logger = logging.getLogger(__name__)

# Below this a drafter learns next to nothing that it could show; the published recipe has some millions.
_FEW_TOKENS = 10_000


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What rank 0 decided; JSON values only."""

    drafter: dict[str, Any]
    """Fields of the `DrafterConfig`."""
    draft_ids: list[int] | None
    """Verifier ids of the pruned vocabulary."""
    train: dict[str, list[int]]
    """Extent of each training row: tokens, supervised pair slots."""
    held_out: dict[str, list[int]]
    """The same of the validation rows."""
    dropped: dict[str, int]
    """Prepared rows that are not used, by reason."""
    num_prepared: int
    save_dtype: str
    mask_token_how: str
    warnings: list[str]
    data: dict[str, str]
    """Hashes of what was read, for the manifest."""
    spec: dict[str, Any]
    """Fields of the `StoreSpec`: what the states are like."""

    def store_spec(self) -> StoreSpec:
        """What the states are like."""
        return StoreSpec(**{**self.spec, "aux_layer_ids": tuple(self.spec["aux_layer_ids"])})

    def extents(self, which: dict[str, list[int]]) -> dict[str, Extent]:
        """`train` or `held_out` as records."""
        return {row_id: Extent(*values) for row_id, values in which.items()}

    def drafter_config(self) -> DrafterConfig:
        """The drafter's shape."""
        return DrafterConfig.build(self.drafter)

    def fingerprint(self, config: TrainConfig) -> dict[str, Any]:
        """What must be the same for a run to go on from a checkpoint."""
        shape = {key: value for key, value in self.drafter.items() if key not in ("verifier", "verifier_architectures")}
        settings = ("seed", "total_seq_len", "optimizer", "train_embeddings", "train_lm_head")
        return {
            **shape,
            "draft_vocabulary": None if self.draft_ids is None else _digest(self.draft_ids),
            "rows": _digest([self.train, self.held_out]),
            **{name: getattr(config, name) for name in settings},
            WEIGHTS_OF: self.data["verifier_fingerprint"],
        }


def decide(config: TrainConfig) -> Decision:
    """Look at everything that is cheap to look at, and refuse what cannot work.

    Raises:
        PeagleError: one line for whatever does not fit: data, store, verifier, flags.
    """
    # 1. The verifier, a drafter to start from, the states, and whether they fit one another.
    prepared = load_prepared(config.data_path)
    verifier = load_verifier_config(config.verifier_name_or_path, config.trust_remote_code, config.verifier_tensors)
    origin = str(config.from_pretrained)
    source = None if config.from_pretrained is None else pretrained_config(origin)
    if source is not None:
        check_source(source, origin, verifier.name_or_path, verifier.hidden_size, verifier.vocab_size)
    spec, reader = plan_states(config, verifier, prepared, None if source is None else source.aux_layer_ids)
    _same_verifier(config, verifier, prepared, spec)
    if source is not None:
        check_layers(source, origin, spec.aux_layer_ids)
    # 2. The rows, shared out; none may be longer than a pack.
    extents, dropped, seen_ids = _usable_rows(config, verifier, prepared, reader)
    named = prepared.table["conversation"] if prepared.has_conversations else ()
    conversation_of = dict(zip(prepared.table["row_id"], named))
    ids = first_by_hash(list(extents), config.max_samples)
    train_ids, held_out_ids = split(ids, config.train_data_ratio, conversation_of)
    for ids in (train_ids, held_out_ids):
        packs({row_id: extents[row_id].num_tokens for row_id in ids}, config.total_seq_len, config.seed, None)
    # 3. The drafter: its mask token, its vocabulary, its shape.
    warnings = []
    tokenizer = load_tokenizer(config.verifier_name_or_path, config.trust_remote_code)
    mask_token_id, mask_token_how = None, "none: EAGLE-3"
    if config.speculator_type == "peagle":
        mask = resolve_mask_token(tokenizer, verifier.vocab_size, config.mask_token_id, seen_ids)
        mask_token_id, mask_token_how = mask.id, mask.how
        if mask.warning:
            warnings.append(mask.warning)
    if source is not None and config.draft_vocab_size is not None:
        vocab = vocab_of_ids(pretrained_draft_ids(origin), verifier.vocab_size)
    else:
        vocab = choose_vocab(prepared, tokenizer, verifier.eos_token_ids, config.draft_vocab_size)
    drafter = _shape(config, verifier, spec, source, None if vocab.is_full else vocab.size, mask_token_id)
    if not vocab.is_full:
        left_out = vocab.mass_left_out(prepared.frequencies)
        logger.info("draft vocabulary: %d of %d tokens, %.2f %% of the supervised ones left out",
                    vocab.size, verifier.vocab_size, 100 * left_out)  # fmt: skip
    # 4. What is allowed but hardly meant.
    if held_out_ids and not prepared.has_conversations:
        warnings.append(
            f"{config.data_path}: prepared by an earlier version, its rows do not say which conversation they are of: "
            "replies of one may be trained on and validated with; prepare again"
        )
    if config.endpoint and not config.asks_verifier:
        warnings.append(
            f"--endpoint {config.endpoint[0]} is not asked: --hidden-states {config.hidden_states} reads the store; "
            "online and hybrid ask a server"
        )
    num_supervised = sum(extents[row_id].num_supervised for row_id in train_ids)
    if num_supervised < _FEW_TOKENS:
        warnings.append(
            f"only {len(train_ids)} rows with {num_supervised} supervised tokens to train on: expect few accepted "
            "tokens. The published recipe has 5,000 conversations, some millions of tokens"
        )
    return Decision(
        drafter=drafter.model_dump(mode="json"),
        draft_ids=None if vocab.is_full else vocab.ids.tolist(),
        train={row_id: list(astuple(extents[row_id])) for row_id in train_ids},
        held_out={row_id: list(astuple(extents[row_id])) for row_id in held_out_ids},
        dropped=dropped,
        num_prepared=len(prepared),
        save_dtype=verifier.dtype if config.save_dtype == "auto" else config.save_dtype,
        mask_token_how=mask_token_how,
        warnings=warnings,
        data={
            "rows_sha256": str(prepared.summary.get("rows_sha256", "")),
            "tokenizer_sha256": str(prepared.summary.get("tokenizer_sha256", "")),
            "verifier_fingerprint": spec.verifier_fingerprint,
        },
        spec=asdict(spec),
    )


def _shape(
    config: TrainConfig,
    verifier: VerifierConfig,
    spec: StoreSpec,
    source: DrafterConfig | None,
    draft_vocab_size: int | None,
    mask_token_id: int | None,
) -> DrafterConfig:
    """The drafter's config: made for the verifier, or taken over from the checkpoint that training starts from."""
    if source is not None:
        return DrafterConfig.build(
            {
                **source.model_dump(),
                "speculators_model_type": config.speculator_type,
                "num_layers": config.num_layers,
                "num_speculative_tokens": config.num_depths,
                "mask_token_id": mask_token_id,
                "norm_output": config.norm_output,
                "verifier": verifier.name_or_path,
                "verifier_architectures": tuple(verifier.architectures),
            }
        )
    if config.intermediate_size is None:  # of a mixture of experts that is a rule, not a field
        logger.info(
            "the drafter's MLP is %d wide, as what a token passes through in the verifier", verifier.intermediate_size
        )
    return config_for(
        verifier,
        speculators_model_type=config.speculator_type,
        layer_type=config.draft_arch,
        num_layers=config.num_layers,
        intermediate_size=config.intermediate_size,
        num_speculative_tokens=config.num_depths,
        aux_layer_ids=spec.aux_layer_ids,
        draft_vocab_size=draft_vocab_size,
        mask_token_id=mask_token_id,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        norm_output=config.norm_output,
    )


def _same_verifier(config: TrainConfig, verifier: VerifierConfig, prepared: Prepared, spec: StoreSpec) -> None:
    """Refuse rows or states that were made for another verifier, or with other layers."""
    where = config.states_path
    if config.target_layer_ids is not None:
        wanted = resolve_aux_layer_ids(verifier.num_layers, config.target_layer_ids)
        if wanted != spec.aux_layer_ids:
            raise StoreError(
                f"{where}: the store has layers {_listed(spec.aux_layer_ids)}, --target-layer-ids asks for "
                f"{_listed(wanted)}. Extract again, or omit --target-layer-ids."
            )
    for name in ("hidden_size", "num_layers", "vocab_size"):
        if getattr(spec, name) != getattr(verifier, name):
            raise StoreError(
                f"{where}: the store was made by {spec.verifier} ({name} {getattr(spec, name)}), "
                f"{verifier.name_or_path} has {getattr(verifier, name)}; extract again with this verifier"
            )
    if not same_weights(spec.verifier_fingerprint, fingerprint(verifier, fetches=False)):
        raise StoreError(
            f"{where}: the store was made by other weights ({spec.verifier}) than those of {verifier.name_or_path}; "
            "extract again with this verifier"
        )
    if prepared.summary["vocab_size"] != verifier.vocab_size:
        raise DataError(
            f"{config.data_path}: prepared for {prepared.summary.get('model')} (vocabulary "
            f"{prepared.summary['vocab_size']}), {verifier.name_or_path} has {verifier.vocab_size}; prepare again"
        )


def _usable_rows(
    config: TrainConfig, verifier: VerifierConfig, prepared: Prepared, store: StoreReader | None
) -> tuple[dict[str, Extent], dict[str, int], set[int]]:
    """The rows that can be trained on: prepared, stored as prepared (or to be made), and supervised somewhere.

    Returns:
        Their extents, how many others are dropped by reason, and the token ids of all.
    """
    extents: dict[str, Extent] = {}
    missing: list[str] = []
    num_silent = 0
    seen = torch.zeros(verifier.vocab_size, dtype=torch.bool)
    with log.progress("check rows", len(prepared), "rows") as meter:
        for index in range(len(prepared)):
            row = prepared.row(index)
            meter.advance(1)
            ids = torch.tensor(row.input_ids)
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < verifier.vocab_size:
                raise DataError(
                    f"row {row.row_id}: token id {int(ids.max())} is beyond the verifier's {verifier.vocab_size} rows; "
                    "prepare again with this model"
                )
            seen[ids] = True
            used = extent(row.loss_mask, row.next_is_supervised)
            is_stored = store is not None and row.row_id in store
            if not used.num_supervised:
                num_silent += 1
            elif not is_stored and not config.asks_verifier:
                missing.append(row.row_id)
            else:
                extents[row.row_id] = used
                if store is not None and is_stored:
                    _same_row(row, store)
    if not extents and not missing:
        raise TrainingError(
            f"{config.data_path}: 0 of {len(prepared)} rows have a supervised token; look at them with `peagle inspect`"
        )
    if missing and (config.on_missing == "raise" or not extents):
        raise StoreError(
            f"{config.states_path}: no hidden states of {len(missing)} of {len(prepared)} prepared rows (the "
            f"first is {missing[0]}). Run `peagle extract` to its end, train on the others with --on-missing skip, or "
            "ask the verifier for them with --on-missing generate."
        )
    dropped = {"no hidden states in the store": len(missing), "nothing supervised": num_silent}
    return extents, {why: count for why, count in dropped.items() if count}, set(seen.nonzero()[:, 0].tolist())


def _same_row(row: TokenRow, store: StoreReader) -> None:
    """Refuse states of other tokens: a row that was prepared again with another length or template."""
    stored, wanted = store.entry(row.row_id), RowEntry.of(row)
    what = None
    if stored.ids_sha256 != wanted.ids_sha256:
        what = f"other tokens ({stored.num_tokens}, prepared {wanted.num_tokens})"
    elif stored.mask_sha256 != wanted.mask_sha256:
        what = "another loss mask"
    if what is not None:
        raise StoreError(
            f"{store.folder}: row {row.row_id} was stored with {what}; the data was prepared again since. "
            "Extract again."
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids))


def pretrained_draft_ids(checkpoint: str) -> Tensor:
    """Verifier ids of a checkpoint's pruned vocabulary, ascending, int64, [draft_vocab_size]."""
    folder = find(checkpoint)
    d2t = read_weights(folder).get("d2t")
    if d2t is None:
        raise CheckpointError(f"{folder}: no tensor d2t; the checkpoint cannot be used")
    return torch.arange(d2t.numel()) + d2t
