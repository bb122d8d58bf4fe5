"""The verifier in this process through Transformers: the model and its hidden states, on the CPU or one GPU."""

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from peagle.data.records import TokenRow
from peagle.errors import VerifierError, one_line
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.source import RowStates
from peagle.verifier.weights import TensorFiles, VerifierHead, gguf_file

MAX_BATCH_TOKENS = 1 << 16
"""Padded tokens of one batch: bounds memory when rows are long, whatever the batch size."""
_HEAD_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest difference of logits over the largest logit: rounding in each dtype, measured at a tenth of this."""
_CAUSAL_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Median relative error of states that a longer row gives the same tokens: measured at 2e-6 and 0.01 for causal
families, 0.45 and more for the others."""
_CHOICES_EVERY = 32  # checked positions for one whose logits are compared over the whole vocabulary


@dataclass(frozen=True)
class PassStates:
    """One row of one pass, on the CPU, in the verifier's dtype."""

    aux_states: Tensor
    """[num_tokens, num_aux_layers * hidden_size]"""
    last_states: Tensor
    """Before the final norm, [num_tokens, hidden_size]."""
    choice_ids: list[int]
    """The verifier's own next-token choice at the positions asked for; of a checked pass, none."""
    fault: str | None
    """Of a checked pass: where the head's norm and logits are not the model's own."""


class NotCausalError(VerifierError):
    """A model whose states depend on later tokens."""


class TransformersVerifier:
    """A verifier in this process; see `resolve_dtype` and `resolve_device`.

    Raises:
        VerifierError: it cannot be loaded, weights are missing from its files, or it is not causal; one line.
    """

    def __init__(self, config: VerifierConfig, dtype: str | torch.dtype, device: str | torch.device) -> None:
        self.verifier_config = config
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(config, dtype)
        self.model = _load_model(config, self.dtype, self.device)
        self._passes = threading.Lock()  # a hook of one thread's pass would also see another's
        self.decoder, self.layers = decoder_of(self.model)
        self.lm_head = self.model.get_output_embeddings()
        if self.lm_head is None:
            raise VerifierError(f"{config.name_or_path}: {type(self.model).__name__} has no language-model head")
        if self.device.type == "cpu":
            self.lm_head.register_forward_pre_hook(_copied)
        self._check_causal()

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

    def run(
        self,
        rows: Sequence[list[int]],
        aux_layer_ids: Sequence[int],
        choice_pos: Sequence[list[int]],
        head: VerifierHead | None = None,
    ) -> list[PassStates]:
        """One pass over the rows together; see `begin`."""
        return self.begin(rows, aux_layer_ids, choice_pos, head)()

    @torch.no_grad()
    def begin(
        self,
        rows: Sequence[list[int]],
        aux_layer_ids: Sequence[int],
        choice_pos: Sequence[list[int]],
        head: VerifierHead | None,
    ) -> Callable[[], list[PassStates]]:
        """Start one pass over the rows together; what is returned waits for its results.

        `choice_pos` has for each row the positions whose next-token choice is wanted, by the model's own norm and head.
        With a `head` (on this device) they are checked instead: its norm must give the model's own normed state at
        each, and at one in `_CHOICES_EVERY`, the last included, its logits the model's own choice."""
        ids = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
        for r, row in enumerate(rows):
            ids[r, : len(row)] = torch.tensor(row)
        last_id = self.verifier_config.num_layers
        with self._passes, _captured(self.layers, {*aux_layer_ids, last_id}) as captured:
            output = self.decoder(input_ids=ids.to(self.device), use_cache=False)
        started = []
        for r, (row, positions) in enumerate(zip(rows, choice_pos)):
            aux = torch.cat([captured[j][r, : len(row)] for j in sorted(aux_layer_ids)], dim=-1)
            last = captured[last_id][r, : len(row)]
            own = output.last_hidden_state[r, positions]
            choices = own.new_empty(0) if head is not None or not positions else self.lm_head(own).argmax(-1)
            errors = None if head is None or not positions else self._head_errors(head, own, last[positions])
            started.append((_on_host(aux), _on_host(last.clone()), choices, errors))

        copied = None if self.device.type != "cuda" else torch.cuda.current_stream(self.device).record_event()

        def finish() -> list[PassStates]:
            if copied is not None:
                copied.synchronize()
            return [
                PassStates(
                    aux, last, choices.tolist(), None if errors is None else _head_fault(errors, positions, self.dtype)
                )
                for (aux, last, choices, errors), positions in zip(started, choice_pos)
            ]

        return finish

    def _head_errors(self, head: VerifierHead, own: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Relative errors of the head's normed states, and of its logit at some of the model's own choices, per
        position."""
        mine = head.normed(last)
        states = (mine - own).float().norm(dim=-1) / own.float().norm(dim=-1)
        some = slice((len(own) - 1) % _CHOICES_EVERY, None, _CHOICES_EVERY)
        choices = self.lm_head(own[some]).argmax(-1, keepdim=True)
        logits = head.logits(mine[some]).float()
        return states, (logits.amax(-1) - logits.gather(-1, choices)[:, 0]) / logits.abs().amax(-1)

    @torch.no_grad()
    def layer_states(self, ids: list[int]) -> dict[int, Tensor]:
        """The states of one row at every layer id, 0 to the last, before the norm; on the CPU, [num_tokens,
        hidden_size]."""
        with self._passes, _captured(self.layers, set(range(len(self.layers) + 1))) as captured:
            self.decoder(input_ids=torch.tensor([ids], device=self.device), use_cache=False)
        return {layer_id: states[0].cpu() for layer_id, states in captured.items()}

    def _check_causal(self) -> None:
        """Refuse a model whose states depend on later tokens: a prefix alone must give those of the longer row."""
        size = self.verifier_config.vocab_size
        ids = [(3 + 7919 * i) % size for i in range(24)]
        ((_, alone),), ((_, within),) = self.states([ids[:12]], [0]), self.states([ids], [0])
        alone, within = alone.float(), within[:12].float()
        error = float(((alone - within).norm(dim=-1) / alone.norm(dim=-1).clamp(min=1e-12)).median())
        if error > _CAUSAL_TOLERANCE[self.dtype]:
            name = self.verifier_config.name_or_path
            raise NotCausalError(
                f"{name}: {type(self.model).__name__} is not causal: with more tokens behind them the same tokens have "
                f"other states (by {error:.0%}), so no drafter can be trained on it"
            )

    @torch.no_grad()
    def check_head(self, head: VerifierHead, ids: list[int]) -> None:
        """Prove on one row, of at least one token, that a head read from the files gives the model's own logits.

        Raises:
            VerifierError: the logits differ by more than the dtype's rounding: a family whose norm, scale or soft-cap
                is not what `model_config` says.
        """
        last_id = self.verifier_config.num_layers
        with self._passes, _captured(self.layers, {last_id}) as captured:
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


def decoder_of(model: Any) -> tuple[Any, nn.ModuleList]:
    """What turns ids into the final norm's output, and its layers: a model's `get_decoder()`, or, where that still has
    the head (Llama 4), the part of it that has the layers. A VerifierError if there is none."""
    decoder, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    has_head = decoder.get_output_embeddings() is not None
    for module in decoder.modules():
        for part in module.children():
            if isinstance(part, nn.ModuleList) and len(part) == count:
                return (module if has_head else decoder), part
    raise VerifierError(f"{model.name_or_path}: {type(decoder).__name__} has no list of {count} layers")


def _copied(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give a frozen bfloat16 head a copy of a slice: on a slice of longer states PyTorch 2.13 takes 35 times as
    long."""
    return tuple(one.clone() if one.untyped_storage().nbytes() > one.nbytes else one for one in arguments)


def _on_host(states: Tensor) -> Tensor:
    """The same on the CPU; from a GPU once its stream has come there, into pinned memory."""
    if states.device.type != "cuda":
        return states.cpu()
    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    return host.copy_(states, non_blocking=True)


def _head_fault(errors: tuple[Tensor, Tensor], positions: list[int], dtype: torch.dtype) -> str | None:
    """The first of the checked positions at which a head's states or choice are not the model's own; None: nowhere."""
    for what, found, checked in (
        ("norm(last_states)", errors[0], positions),
        ("head(norm(last_states))", errors[1], positions[::-1][::_CHOICES_EVERY][::-1]),
    ):
        wrong = (~(found <= _HEAD_TOLERANCE[dtype])).nonzero()
        if len(wrong):
            at = int(wrong[0])
            by = f"by {float(found[at]):.2g} at position {checked[at]}"
            return f"{what} differs from the verifier's own {by}: wrong norm, head or layer"
    return None


def refuse_damaged_logits(logits: Tensor, model: Any) -> None:
    """Refuse a verifier that computes nonsense: a VerifierError if any of its own logits is NaN or infinite."""
    if not torch.isfinite(logits).all():
        raise VerifierError(
            f"{model.name_or_path}: its logits are NaN or infinite: damaged weights, or numbers too large for "
            f"{str(model.dtype).removeprefix('torch.')} (try --dtype float32)"
        )


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" is the current GPU, or else the CPU; a GPU comes with its index, so that every thread means the same one.

    Raises:
        VerifierError: there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise VerifierError(f"--device {device}: no such device; try cpu or cuda") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise VerifierError(f"--device {device}: torch sees no GPU here")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
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
    elsewhere = f"{name}: quantised ({verifier.quantization}): run it in vLLM (--endpoint, or --backend vllm)"
    placed: dict[str, Any] = {}
    if verifier.quantization and device.type != "cpu":  # `to` moves no quantised weights
        if importlib.util.find_spec("accelerate") is None:
            raise VerifierError(f"{elsewhere}, or install accelerate, which puts it on {device}")
        placed = {"device_map": {"": device}}
    shows_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        TensorFiles.open(name).check()
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust)
        is_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map")
        auto: Any = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
        gguf = gguf_file(name)
        model, report = auto.from_pretrained(
            name,
            dtype=dtype,
            trust_remote_code=trust,
            output_loading_info=True,
            **placed,
            **({"gguf_file": gguf.name, "config": config} if gguf else {}),
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
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
    if not verifier.quantization:
        model.to(device)
    elsewhere_on = next(
        (p.device for p in (*model.parameters(), *model.buffers()) if p.device.type != device.type), None
    )
    if elsewhere_on is not None:
        raise VerifierError(f"{elsewhere}: Transformers put parts of it on {elsewhere_on}, not {device}")
    return model


class TransformersSource:
    """A `StateSource` over the verifier in this process: rows of like length run together.

    The groups depend on the whole job, not on what is left of it, and a group of which one row is wanted runs whole: a
    resumed job gives the bits of an uninterrupted one. A pass takes `batch_size` rows. With a `head`, every position
    that has a label is checked with it (see `TransformersVerifier.begin`)."""

    def __init__(
        self,
        verifier: TransformersVerifier,
        aux_layer_ids: tuple[int, ...],
        batch_size: int,
        head: VerifierHead | None,
    ) -> None:
        self.verifier, self._aux_layer_ids, self._batch_size = verifier, aux_layer_ids, batch_size
        own = verifier.lm_head.weight
        if head is not None and isinstance(own, nn.Parameter) and own.shape == head.weight.shape:
            head = replace(head, weight=own.detach())  # proved equal on a row, and there already
        self._head = None if head is None else head.to(verifier.device, verifier.dtype)
        self.max_tokens = verifier.verifier_config.max_position_embeddings
        """The verifier's own limit."""

    def states(self, rows: Sequence[TokenRow], wanted: AbstractSet[str]) -> Iterator[RowStates]:
        """See `source.StateSource.states`; refuses no row. A group is handed out while a GPU computes the next."""
        sizes = [(row.row_id, len(row.input_ids)) for row in rows]
        before: Iterator[RowStates] = iter(())
        for group in group_by_length([length for _, length in sizes], self._batch_size):
            if wanted.isdisjoint(sizes[i][0] for i in group):
                continue
            members = [rows[i] for i in group]
            positions = [row.label_positions() if self._head is not None else [] for row in members]
            ids = [row.input_ids for row in members]
            finish = self.verifier.begin(ids, self._aux_layer_ids, positions, self._head)
            yield from before
            before = self._handed_out(members, finish, wanted)
            if self.verifier.device.type == "cpu":  # nothing would run meanwhile
                yield from before
        yield from before

    def _handed_out(
        self, members: list[TokenRow], finish: Callable[[], list[PassStates]], wanted: AbstractSet[str]
    ) -> Iterator[RowStates]:
        for row, states in zip(members, finish()):
            if row.row_id in wanted:
                yield RowStates(
                    row_id=row.row_id,
                    input_ids=row.input_ids,
                    aux_states=states.aux_states,
                    last_states=states.last_states,
                    choice_pos=[],
                    choice_ids=[],
                    fault=states.fault,
                )

    def states_again(self, ids: list[int], origin: str) -> dict[int, Tensor]:
        """Tokens alone: `TransformersVerifier.layer_states`."""
        return self.verifier.layer_states(ids)

    def close(self) -> None:
        """Nothing to release."""
