"""Everything that is decided before weights are loaded: which rows, which drafter, and every early refusal.

Rank 0 decides and the others are told, so that no two ranks can differ, and a file that only one of them can read is no
trouble. In: the config. Out: a `Decision` of JSON values.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from peagle import log
from peagle.data.draft_vocab import choose_vocab, vocab_of_ids
from peagle.data.prepared import Prepared, load_prepared
from peagle.data.records import TokenRow
from peagle.drafter.checkpoint import CONFIG, find, read_config, read_weights
from peagle.drafter.model_config import DrafterConfig, config_for
from peagle.drafter.warm_start import check_layers, check_source, config_from
from peagle.errors import CheckpointError, ConfigError, DataError, StoreError, TrainingError
from peagle.hidden_states.store import StoreReader, StoreSpec
from peagle.train.batches import first_by_hash, packs, split
from peagle.train.config import FitConfig, TrainConfig
from peagle.train.sources import Extent, extent, hidden_states_path, plan_states
from peagle.verifier.model_config import VerifierConfig, load_verifier_config, resolve_aux_layer_ids
from peagle.verifier.special_tokens import load_tokenizer, resolve_mask_token
from peagle.verifier.weights import fingerprint

logger = logging.getLogger(__name__)

# Below this a drafter learns next to nothing that it could show; the published recipe has some millions.
_FEW_TOKENS = 10_000


@dataclass(frozen=True)
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
        return json.loads(
            json.dumps(
                {
                    **shape,
                    "draft_vocabulary": None if self.draft_ids is None else _digest(self.draft_ids),
                    "rows": _digest([self.train, self.held_out]),
                    "seed": config.seed,
                    "total_seq_len": config.total_seq_len,
                    "optimizer": config.optimizer,
                    "train_embeddings": config.train_embeddings,
                    "train_lm_head": config.train_lm_head,
                }
            )
        )


def decide(config: TrainConfig) -> Decision:
    """Look at everything that is cheap to look at, and refuse what cannot work.

    Raises:
        PeagleError: one line for whatever does not fit: data, store, verifier, flags.
    """
    prepared = load_prepared(config.data_path)
    verifier_config = load_verifier_config(config.verifier_name_or_path, config.trust_remote_code)
    verifier_config = verifier_config.with_tensor_names(config.verifier_tensors)
    source = None if config.from_pretrained is None else pretrained_config(config.from_pretrained)
    if source is not None:
        check_source(
            source,
            str(config.from_pretrained),
            verifier_config.name_or_path,
            verifier_config.hidden_size,
            verifier_config.vocab_size,
        )
    planned = plan_states(config, verifier_config, prepared, None if source is None else source.aux_layer_ids)
    spec = planned.spec
    _same_verifier(config, verifier_config, prepared, spec)
    if source is not None:
        check_layers(source, str(config.from_pretrained), spec.aux_layer_ids)
    rows = _rows(config, verifier_config, prepared, planned.reader)
    tokenizer = load_tokenizer(config.verifier_name_or_path, config.trust_remote_code)
    mask = _mask_token(config, verifier_config, tokenizer, rows)
    if source is not None and config.draft_vocab_size is not None:
        vocab = vocab_of_ids(pretrained_draft_ids(str(config.from_pretrained)), verifier_config.vocab_size)
    else:
        vocab = choose_vocab(prepared, tokenizer, verifier_config.eos_token_ids, config.draft_vocab_size)
    drafter = _shape(config, verifier_config, spec, source, None if vocab.is_full else vocab.size, mask.id)
    train_ids, held_out_ids = split(first_by_hash(list(rows.extents), config.max_samples), config.train_data_ratio)
    warnings = [mask.warning] if mask.warning else []
    if config.endpoint and not config.asks_verifier:
        warnings.append(
            f"--endpoint {config.endpoint[0]} is not asked: --hidden-states {config.hidden_states} reads the store; "
            "online and hybrid ask a server"
        )
    if not vocab.is_full:
        left_out = vocab.mass_left_out(prepared.frequencies)
        logger.info("draft vocabulary: %d of %d tokens, %.2f %% of the supervised ones left out",
                    vocab.size, verifier_config.vocab_size, 100 * left_out)  # fmt: skip
    num_supervised = sum(rows.extents[row_id].num_supervised for row_id in train_ids)
    if num_supervised < _FEW_TOKENS:
        warnings.append(
            f"only {len(train_ids)} rows with {num_supervised} supervised tokens to train on: expect few accepted "
            "tokens. The published recipe has 5,000 conversations, some millions of tokens"
        )
    for lengths in (train_ids, held_out_ids):
        packs({row_id: rows.extents[row_id].num_tokens for row_id in lengths}, config.total_seq_len, config.seed, None)
    return Decision(
        drafter.model_dump(mode="json"),
        None if vocab.is_full else vocab.ids.tolist(),
        {row_id: list(asdict(rows.extents[row_id]).values()) for row_id in train_ids},
        {row_id: list(asdict(rows.extents[row_id]).values()) for row_id in held_out_ids},
        rows.dropped,
        len(prepared),
        verifier_config.dtype if config.save_dtype == "auto" else config.save_dtype,
        mask.how,
        warnings,
        {
            "rows_sha256": str(prepared.summary.get("rows_sha256", "")),
            "tokenizer_sha256": str(prepared.summary.get("tokenizer_sha256", "")),
            "verifier_fingerprint": spec.verifier_fingerprint,
        },
        asdict(spec),
    )


@dataclass(frozen=True)
class _Mask:
    id: int | None
    how: str
    warning: str | None


def _mask_token(config: TrainConfig, verifier_config: VerifierConfig, tokenizer: Any, rows: _Rows) -> _Mask:
    if config.speculator_type == "eagle3":
        return _Mask(None, "none: EAGLE-3", None)
    found = resolve_mask_token(tokenizer, verifier_config.vocab_size, config.mask_token_id, rows.seen_ids)
    return _Mask(found.id, found.how, found.warning)


def _shape(
    config: TrainConfig,
    verifier_config: VerifierConfig,
    spec: StoreSpec,
    source: DrafterConfig | None,
    draft_vocab_size: int | None,
    mask_token_id: int | None,
) -> DrafterConfig:
    """The drafter's config: made for the verifier, or taken over from the checkpoint that training starts from."""
    if source is not None:
        return config_from(
            source,
            config.speculator_type,
            config.num_layers,
            config.num_depths,
            mask_token_id,
            config.norm_output,
            verifier_config.name_or_path,
            tuple(verifier_config.architectures),
        )
    made = config_for(
        verifier_config,
        config.speculator_type,
        config.draft_arch,
        config.num_layers,
        config.intermediate_size,
        config.num_depths,
        spec.aux_layer_ids,
        draft_vocab_size,
        mask_token_id,
        config.norm_before_residual,
        config.norm_before_fc,
    )
    return DrafterConfig.build({**made.model_dump(), "norm_output": config.norm_output})


def _same_verifier(config: TrainConfig, verifier_config: VerifierConfig, prepared: Prepared, spec: StoreSpec) -> None:
    """Refuse rows or states that were made for another verifier, or with other layers."""
    where = hidden_states_path(config)
    if config.target_layer_ids is not None:
        wanted = resolve_aux_layer_ids(verifier_config.num_layers, config.target_layer_ids)
        if wanted != spec.aux_layer_ids:
            raise StoreError(
                f"{where}: the store has layers {_listed(spec.aux_layer_ids)}, --target-layer-ids asks for "
                f"{_listed(wanted)}. Extract again, or leave --target-layer-ids away."
            )
    for name in ("hidden_size", "num_layers", "vocab_size"):
        if getattr(spec, name) != getattr(verifier_config, name):
            raise StoreError(
                f"{where}: the store was made by {spec.verifier} ({name} {getattr(spec, name)}), "
                f"{verifier_config.name_or_path} has {getattr(verifier_config, name)}; extract again with this verifier"
            )
    if spec.verifier_fingerprint and fingerprint(verifier_config) != spec.verifier_fingerprint:
        raise StoreError(
            f"{where}: the store was made by other weights ({spec.verifier}) than those of {verifier_config.name_or_path}; "
            "extract again with this verifier"
        )
    if prepared.summary["vocab_size"] != verifier_config.vocab_size:
        raise DataError(
            f"{config.data_path}: prepared for {prepared.summary.get('model')} (vocabulary "
            f"{prepared.summary['vocab_size']}), {verifier_config.name_or_path} has {verifier_config.vocab_size}; prepare again for it"
        )


@dataclass(frozen=True)
class _Rows:
    extents: dict[str, Extent]
    dropped: dict[str, int]
    seen_ids: set[int]


def _rows(config: TrainConfig, verifier_config: VerifierConfig, prepared: Prepared, store: StoreReader | None) -> _Rows:
    """The rows that can be trained on: prepared, stored as prepared (or to be made), and supervised somewhere."""
    extents: dict[str, Extent] = {}
    missing: list[str] = []
    num_silent = 0
    seen = torch.zeros(verifier_config.vocab_size, dtype=torch.bool)
    with log.progress("check rows", len(prepared), "rows") as meter:
        for index in range(len(prepared)):
            row = prepared.row(index)
            meter.advance(1)
            ids = torch.tensor(row.input_ids)
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < verifier_config.vocab_size:
                raise DataError(
                    f"row {row.row_id}: token id {int(ids.max())} is beyond the verifier's {verifier_config.vocab_size} rows; "
                    "prepare again with this model"
                )
            seen[ids] = True
            found = extent(row)
            if not found.num_supervised:
                num_silent += 1
            elif store is not None and row.row_id in store:
                _same_row(row, store)
                extents[row.row_id] = found
            elif config.asks_verifier:
                extents[row.row_id] = found
            else:
                missing.append(row.row_id)
    if not extents and not missing:
        raise TrainingError(
            f"{config.data_path}: 0 of {len(prepared)} rows have a supervised token; look at them with `peagle inspect`"
        )
    if missing and (config.on_missing == "raise" or not extents):
        raise StoreError(
            f"{hidden_states_path(config)}: no hidden states of {len(missing)} of {len(prepared)} prepared rows (the "
            f"first is {missing[0]}). Run `peagle extract` to its end, train on the others with --on-missing skip, or "
            "ask the verifier for them with --on-missing generate."
        )
    dropped = {"no hidden states in the store": len(missing), "nothing supervised": num_silent}
    return _Rows(extents, {why: count for why, count in dropped.items() if count}, set(seen.nonzero()[:, 0].tolist()))


def _same_row(row: TokenRow, store: StoreReader) -> None:
    """Refuse states of other tokens: a row that was prepared again with another length or template."""
    entry = store.entry(row.row_id)
    if entry.ids_sha256 != _sha256(row.input_ids):
        raise StoreError(
            f"{store.folder}: row {row.row_id} was stored with other tokens ({entry.num_tokens}, prepared "
            f"{len(row.input_ids)}); the data was prepared again since. Extract again."
        )
    if entry.mask_sha256 != _sha256([*row.loss_mask, int(row.next_is_supervised), row.tail_length]):
        raise StoreError(
            f"{store.folder}: row {row.row_id} was stored with another loss mask; the data was prepared again since. "
            "Extract again."
        )


def _sha256(values: list[int]) -> str:
    """`files.sha256_ids`, at once."""
    return hashlib.sha256(np.asarray(values, dtype="<i8").tobytes()).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids))


def need_save_path(config: TrainConfig) -> None:
    """Refuse a --save-path that is no folder."""
    if config.save_path.exists() and not config.save_path.is_dir():
        raise ConfigError(f"--save-path {config.save_path}: is a file, expected a folder")


# ---- What the kind of drafter, and a checkpoint to start from, decide about a run's settings, before it begins.


Settings = TypeVar("Settings", bound=FitConfig)

# EAGLE-3's own flags and the loop's general ones that they stand for.
_CHAIN = {"ttt_steps": "num_depths", "ttt_step_loss_decay": "depth_loss_decay"}
# Of a checkpoint that training starts from: flag -> field of its config.
_SHAPE = {
    "num_layers": "num_layers",
    "draft_arch": "layer_type",
    "intermediate_size": "intermediate_size",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
}


def settle(config: TrainConfig) -> TrainConfig:
    """Settings with nothing left implied: what EAGLE-3 fixes, and what `--from-pretrained` brings along.

    EAGLE-3 trains whole chains, without sampling, and keeps the verifier's embedding frozen unless asked.

    Raises:
        ConfigError: a flag that this kind of drafter does not have, or that differs from the checkpoint.
        CheckpointError: the checkpoint cannot be read.
    """
    given, changes = config.model_fields_set, dict[str, Any]()
    if config.speculator_type == "eagle3":
        changes |= _chain_settings(config)
    else:
        for name in (*_CHAIN, "norm_output"):
            if name in given and getattr(config, name) != TrainConfig.model_fields[name].default:
                raise ConfigError(f"{_flag(name)} is for --speculator-type eagle3; P-EAGLE has {_flag('num_depths')}")
    if config.from_pretrained is not None:
        changes |= _shape_of(config, pretrained_config(config.from_pretrained))
    return TrainConfig.build({**config.model_dump(), **changes})


def for_drafter(config: Settings, shape: DrafterConfig) -> Settings:
    """Settings with nothing left to the drafter's shape: the learning rate is a number.

    The default decay over depths is P-EAGLE's; the steps of an EAGLE-3 chain weigh alike unless a decay was given.
    """
    changes: dict[str, Any] = {"lr": config.lr_at(shape.hidden_size)}
    if shape.speculators_model_type == "eagle3" and "depth_loss_decay" not in config.model_fields_set:
        changes["depth_loss_decay"] = 1.0
    return config.model_copy(update=changes)


def pretrained_config(checkpoint: str) -> DrafterConfig:
    """The shape of a drafter to start from."""
    folder = find(checkpoint)
    return DrafterConfig.from_json(read_config(folder), str(folder / CONFIG))


def pretrained_draft_ids(checkpoint: str) -> Tensor:
    """Verifier ids of a checkpoint's pruned vocabulary, ascending, int64, [draft_vocab_size]."""
    folder = find(checkpoint)
    d2t = read_weights(folder).get("d2t")
    if d2t is None:
        raise CheckpointError(f"{folder}: no tensor d2t; the checkpoint cannot be used")
    return torch.arange(d2t.numel()) + d2t


def _chain_settings(config: TrainConfig) -> dict[str, Any]:
    given = config.model_fields_set
    changes: dict[str, Any] = {"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    for own, general in _CHAIN.items():
        if general in given and getattr(config, general) != getattr(config, own):
            raise ConfigError(f"{_flag(general)} is for P-EAGLE; with --speculator-type eagle3 say {_flag(own)}")
        changes[general] = getattr(config, own)
    for name in ("down_sample_ratio", "down_sample_ratio_min"):
        if name in given and getattr(config, name) != 1.0:
            raise ConfigError(f"{_flag(name)} is for P-EAGLE; EAGLE-3 trains every chain to its end")
    if config.mask_token_id is not None:
        raise ConfigError("--mask-token-id is for P-EAGLE; EAGLE-3 has no mask token")
    if config.train_embeddings == "mask-token":
        raise ConfigError("--train-embeddings mask-token: EAGLE-3 has no mask token; say all or none")
    if "train_embeddings" not in given:
        changes["train_embeddings"] = "none"
    return changes


def _shape_of(config: TrainConfig, source: DrafterConfig) -> dict[str, Any]:
    """Flags that the checkpoint decides, checked against those that were given."""
    changes: dict[str, Any] = {}
    for flag, field in _SHAPE.items():
        value, asked = getattr(source, field), getattr(config, flag)
        # More layers than the checkpoint has are new ones; fewer would throw trained ones away.
        is_kept = flag == "num_layers" and asked > value
        if flag not in config.model_fields_set or asked is None:
            changes[flag] = value
        elif asked != value and not is_kept:
            raise ConfigError(f"{_flag(flag)} {asked}: {config.from_pretrained} has {value}; leave the flag away")
    size = source.draft_vocab_size if source.is_pruned else None
    if config.draft_vocab_size not in (None, source.draft_vocab_size):
        raise ConfigError(
            f"--draft-vocab-size {config.draft_vocab_size}: {config.from_pretrained} has {source.draft_vocab_size} "
            "tokens, and its vocabulary is taken over; leave the flag away"
        )
    changes["draft_vocab_size"] = size
    if config.speculator_type == "peagle" and source.mask_token_id is not None:
        if config.mask_token_id not in (None, source.mask_token_id):
            raise ConfigError(
                f"--mask-token-id {config.mask_token_id}: {config.from_pretrained} was trained with "
                f"{source.mask_token_id}; leave the flag away"
            )
        changes["mask_token_id"] = source.mask_token_id
    if config.speculator_type == source.speculators_model_type == "eagle3":
        if "norm_output" in config.model_fields_set and config.norm_output != source.norm_output:
            raise ConfigError(f"--norm-output: {config.from_pretrained} has it {'on' if source.norm_output else 'off'}")
        changes["norm_output"] = source.norm_output
    return changes


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
