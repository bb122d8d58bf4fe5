"""The verifier in this process through Transformers: the model and its hidden states, on the CPU or one GPU."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peagle.data.records import TokenRow
from peagle.errors import VerifierError, one_line
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.source import RowStates
from peagle.verifier.weights import VerifierHead, gguf_file

MAX_BATCH_TOKENS = 1 << 16
"""Padded tokens of one batch: bounds memory when rows are long, whatever the batch size."""
_HEAD_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest difference of logits over the largest logit: rounding in each dtype, measured at a tenth of this."""


@dataclass(frozen=True)
class PassStates:
    """One row of one pass, on the CPU, in the verifier's dtype."""

    aux_states: Tensor
    """[num_tokens, num_aux_layers * hidden_size]"""
    last_states: Tensor
    """Before the final norm, [num_tokens, hidden_size]."""
    choice_ids: list[int]
    """The verifier's own next-token choice at the positions asked for."""


class TransformersVerifier:
    """A verifier in this process; see `resolve_dtype` and `resolve_device`.

    Raises:
        VerifierError: it cannot be loaded, or weights are missing from its files; one line.
    """

    def __init__(self, config: VerifierConfig, dtype: str | torch.dtype, device: str | torch.device) -> None:
        self.verifier_config = config
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(config, dtype)
        self.model = _load_model(config, self.dtype, self.device)
        self.decoder = self.model.get_decoder()
        lists = (module for module in self.decoder.modules() if isinstance(module, nn.ModuleList))
        layers = next((one for one in lists if len(one) == config.num_layers), None)
        if layers is None:
            name = type(self.decoder).__name__
            raise VerifierError(f"{config.name_or_path}: {name} has no list of {config.num_layers} layers")
        self.layers = layers
        self.lm_head = self.model.get_output_embeddings()
        if self.lm_head is None:
            raise VerifierError(f"{config.name_or_path}: {type(self.model).__name__} has no language-model head")

    def states(self, rows: Sequence[list[int]], aux_layer_ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Auxiliary and last states (see `PassStates`) of each row, none empty, in the order given.

        Rows of like length run together, padded on the right, where causal attention cannot see it: a row's states are
        those of running it alone, up to rounding.
        """
        states: dict[int, PassStates] = {}
        for group in group_by_length([len(row) for row in rows], 16):
            passed = self.run([rows[i] for i in group], aux_layer_ids, [[] for _ in group])
            states.update(zip(group, passed))
        return [(states[i].aux_states, states[i].last_states) for i in range(len(rows))]

    @torch.no_grad()
    def run(
        self, rows: Sequence[list[int]], aux_layer_ids: Sequence[int], choice_pos: Sequence[list[int]]
    ) -> list[PassStates]:
        """One pass over the rows together.

        `choice_pos` has for each row the positions whose next-token choice is wanted, by the model's own norm and head.
        """
        ids = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
        for r, row in enumerate(rows):
            ids[r, : len(row)] = torch.tensor(row)
        last_id = self.verifier_config.num_layers
        with _captured(self.layers, {*aux_layer_ids, last_id}) as captured:
            output = self.decoder(input_ids=ids.to(self.device), use_cache=False)
        passed = []
        for r, (row, positions) in enumerate(zip(rows, choice_pos)):
            aux = torch.cat([captured[j][r, : len(row)] for j in sorted(aux_layer_ids)], dim=-1)
            choices = self.lm_head(output.last_hidden_state[r, positions]).argmax(-1).tolist() if positions else []
            passed.append(PassStates(aux.cpu(), captured[last_id][r, : len(row)].clone().cpu(), choices))
        return passed

    @torch.no_grad()
    def check_head(self, head: VerifierHead, ids: list[int]) -> None:
        """Prove on one row, of at least one token, that a head read from the files gives the model's own logits.

        Raises:
            VerifierError: the logits differ by more than the dtype's rounding: a family whose norm, scale or soft-cap
                is not what `model_config` says.
        """
        last_id = self.verifier_config.num_layers
        with _captured(self.layers, {last_id}) as captured:
            own = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits.float()
        refuse_damaged_logits(own, self.model)
        mine = head.logits(head.normed(captured[last_id].to(head.weight.device))).float().to(own.device)
        error = float((mine - own).abs().max() / own.abs().max())
        if not error < _HEAD_TOLERANCE[self.dtype]:
            config = self.verifier_config
            raise VerifierError(
                f"{config.name_or_path}: head(norm(last states)) differs from the model's own by {error:.2g} of the "
                f"largest: peagle does not know how the {config.model_type} family computes them"
            )


def refuse_damaged_logits(logits: Tensor, model: Any) -> None:
    """Refuse a verifier that computes nonsense: a VerifierError if any of its own logits is NaN or infinite."""
    if not torch.isfinite(logits).all():
        raise VerifierError(
            f"{model.name_or_path}: its logits are NaN or infinite: damaged weights, or numbers too large for "
            f"{str(model.dtype).removeprefix('torch.')} (try --dtype float32)"
        )


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" is the first GPU, or else the CPU; a VerifierError where there is no such device."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise VerifierError(f"--device {device}: no such device; try cpu or cuda") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise VerifierError(f"--device {device}: torch sees no GPU here")
    return chosen


def resolve_dtype(config: VerifierConfig, dtype: str | torch.dtype) -> torch.dtype:
    """ "auto" is the verifier's own dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = config.dtype if dtype == "auto" else dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise VerifierError(f"--dtype {name}: expected auto, float32, bfloat16 or float16")
    return getattr(torch, name)


def group_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in groups of like length: at most `batch_size` rows and `MAX_BATCH_TOKENS` padded tokens each.

    A function of the lengths alone, so that a resumed job forms the groups of the first run.

    Example:
        Lengths 5, 90, 7, 80 in groups of two: [1, 3], [2, 0]. The longest come first, so that memory runs out at once
        or never.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        full = not groups or len(groups[-1]) >= batch_size
        if full or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > MAX_BATCH_TOKENS:
            groups.append([])
        groups[-1].append(i)
    return groups


@contextlib.contextmanager
def _captured(layers: nn.ModuleList, ids: set[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the residual stream at layer ids during a pass: 0 enters the first layer, j leaves layer j - 1."""
    states: dict[int, Tensor] = {}

    def keep_output(layer_id: int, module: nn.Module, arguments: Any, output: Any) -> None:
        states[layer_id] = output[0] if isinstance(output, tuple) else output

    def keep_input(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        states[0] = arguments[0] if arguments else named["hidden_states"]

    handles = [
        layers[layer_id - 1].register_forward_hook(functools.partial(keep_output, layer_id))
        if layer_id
        else layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
        for layer_id in ids
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _load_model(verifier: VerifierConfig, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers
    from transformers.utils import logging as hf_logging

    name, trust = verifier.name_or_path, verifier.trust_remote_code
    shows_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust)
        is_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map")
        auto: Any = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
        gguf = gguf_file(name)
        model, report = auto.from_pretrained(
            name,
            dtype=dtype,
            trust_remote_code=trust,
            output_loading_info=True,
            **({"gguf_file": gguf.name, "config": config} if gguf else {}),
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise VerifierError(f"{name}: cannot be loaded: {one_line(error)}") from None
    finally:
        if shows_bars:
            hf_logging.enable_progress_bar()
    missing = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if missing:
        raise VerifierError(
            f"{name}: its files lack {len(missing)} of the model's tensors (first: {missing[0]}); they would be random"
        )
    model.eval().requires_grad_(False)
    return model if verifier.quantization else model.to(device)


class TransformersSource:
    """A `StateSource` over the verifier in this process: rows of like length run together.

    The groups depend on the whole job, not on what is left of it, and a group of which one row is wanted runs whole: a
    resumed job gives the bits of an uninterrupted one. A pass takes `batch_size` rows; `with_choices` gives the
    verifier's next-token choice at every position that has a label.
    """

    def __init__(
        self, verifier: TransformersVerifier, aux_layer_ids: tuple[int, ...], batch_size: int, with_choices: bool
    ) -> None:
        self._verifier, self._aux_layer_ids = verifier, aux_layer_ids
        self._batch_size, self._with_choices = batch_size, with_choices
        self.max_tokens = verifier.verifier_config.max_position_embeddings
        """The verifier's own limit."""

    def states(self, rows: Sequence[TokenRow], wanted: AbstractSet[str]) -> Iterator[RowStates]:
        """See `source.StateSource.states`; refuses no row."""
        sizes = [(row.row_id, len(row.input_ids)) for row in rows]
        for group in group_by_length([length for _, length in sizes], self._batch_size):
            if wanted.isdisjoint(sizes[i][0] for i in group):
                continue
            members = [rows[i] for i in group]
            positions = [row.label_positions() if self._with_choices else [] for row in members]
            passed = self._verifier.run([row.input_ids for row in members], self._aux_layer_ids, positions)
            for row, states, choice_pos in zip(members, passed, positions):
                if row.row_id in wanted:
                    yield RowStates(
                        row_id=row.row_id,
                        input_ids=row.input_ids,
                        aux_states=states.aux_states,
                        last_states=states.last_states,
                        choice_pos=choice_pos,
                        choice_ids=states.choice_ids,
                    )

    def close(self) -> None:
        """Nothing to release."""
