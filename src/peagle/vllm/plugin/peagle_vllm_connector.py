"""A vLLM connector that writes a prompt's hidden states to a file, on any device.

vLLM's `extract_hidden_states` method scatters the auxiliary hidden states of every scheduled token into one more
KV-cache layer, through the request's own block table: chunked prefill, prefix caching and preemption lose nothing.
vLLM's own example connector then writes when a request has finished; it needs CUDA, and one more engine step that the
in-process `LLM` never makes. This one writes in the step that computes the prompt's last token:

1. the scheduler side sees that the step completes a prompt, and names the request, its file and its blocks;
2. after that step's forward passes the worker (tensor-parallel rank 0) copies the rows to host memory, a few blocks at
   a time, and queues them;
3. a writer thread writes one safetensors file aside and renames it (`peagle_vllm_writer`).

A request asks for its states with `kv_transfer_params: {"hidden_states_name": NAME}`; others are served as usual. The
answer carries `kv_transfer_params`: the file, and what the server is (`_server`). A failed write leaves `NAME.error`
beside, and is also reported in later answers (`failed_writes`), for a disk too full even for that. A request aborted
after its file was written takes the file with it.

A file holds `hidden_states` [num_tokens, num_layers, hidden_size] in the model's dtype, layers ascending, and
`token_ids` int64 [num_tokens]. Layer id j is the residual stream after j layers; the last is BEFORE the final norm.

Source: written against vLLM 0.32; vLLM's ExampleHiddenStatesConnector. Each data-parallel engine has its own pair of
scheduler and worker and writes its own requests' files; the client's names keep them apart.
"""

import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from peagle_vllm_writer import SAFE_NAME, StatesWriter, states_path
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

logger = init_logger("vllm.peagle_vllm_connector")

_STAGING_BYTES = 64 << 20
_REMEMBERED_FAILURES = 256


@dataclass(frozen=True)
class _Save:
    """One prompt whose last token this step computes."""

    name: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class _StepSaves(KVConnectorMetadata):
    """Scheduler to worker, once per step."""

    saves: list[_Save] = field(default_factory=list)
    discard: list[str] = field(default_factory=list)


@dataclass
class _Failures(KVConnectorWorkerMetadata):
    """Worker to scheduler, after a step: reasons of failed writes, by name."""

    reasons: dict[str, str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return _Failures({**self.reasons, **other.reasons})


class PeagleHiddenStates(KVConnectorBase_V1, SupportsHMA):
    """See the module. Settings in `kv_connector_extra_config`:

    folder: where files appear (made if missing).
    num_writer_threads: default 2.
    max_queued_bytes: rows waiting for the disk, default 1 GiB; when full, the engine waits.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise ValueError("PeagleHiddenStates needs the speculative method `extract_hidden_states`")
        parallel = vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ValueError(f"PeagleHiddenStates needs {name} 1: one worker must hold a prompt's rows whole")
        setting = self._kv_transfer_config.get_from_extra_config
        folder = setting("folder", None)
        if not folder:
            raise ValueError("kv_connector_extra_config: `folder` is not set")
        self._folder = os.path.abspath(folder)
        self._num_writer_threads = int(setting("num_writer_threads", 2))
        self._max_queued_bytes = int(setting("max_queued_bytes", 1 << 30))
        self._layer_ids = list(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        if self._layer_ids != sorted(set(self._layer_ids)):
            raise ValueError(f"layer ids {self._layer_ids} must ascend: models emit them in that order")
        self._server = _server(vllm_config, self._layer_ids)
        self._group, self._block_size = _find_group(kv_cache_config)
        # scheduler side
        self._open: dict[str, Any] = {}  # request id -> request whose prompt is not complete
        self._saved: dict[str, str] = {}  # request id -> name
        self._refused: dict[str, str] = {}  # request id -> reason
        self._discard: list[str] = []
        self._failures: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED_FAILURES)
        # worker side, rank 0 only
        self._cache: torch.Tensor | None = None
        self._writer: StatesWriter | None = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        # Keeps a token's layers together. The logical view is [blocks, layers, slot, hidden] under any layout; the CPU
        # attention kernel accepts only its own.
        from vllm.platforms import current_platform

        return None if current_platform.is_cpu() else "LBNHC"

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # stores only, never loads

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id = request.request_id
        name = (request.kv_transfer_params or {}).get("hidden_states_name")
        if name is None or request_id in self._saved or request_id in self._refused:
            return
        if not isinstance(name, str) or not SAFE_NAME.match(name):
            self._refused[request_id] = "hidden_states_name: only letters, digits, - and _ (at most 128)"
        elif request.prompt_token_ids is None:
            self._refused[request_id] = "a prompt of embeddings has no token ids to store"
        else:
            self._open[request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        step = _StepSaves(discard=self._discard)
        self._discard = []
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
        computed.update({new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs})
        for request_id, before in computed.items():
            request = self._open.get(request_id)
            if request is None:
                continue
            token_ids = request.prompt_token_ids
            if before + scheduler_output.num_scheduled_tokens.get(request_id, 0) < len(token_ids):
                continue  # more chunks to come
            del self._open[request_id]
            name = request.kv_transfer_params["hidden_states_name"]
            self._saved[request_id] = name
            block_ids = self._kv_cache_manager.get_block_ids(request_id)[self._group]
            step.saves.append(_Save(name, list(token_ids), list(block_ids)))
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        failures = connector_output.kv_connector_worker_meta
        if isinstance(failures, _Failures):
            self._failures.extend(failures.reasons.items())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        from vllm.v1.request import RequestStatus

        request_id = request.request_id
        was_open = self._open.pop(request_id, None) is not None
        name = self._saved.pop(request_id, None)
        refused = self._refused.pop(request_id, None)
        if name is not None and request.status == RequestStatus.FINISHED_ABORTED:
            self._discard.append(name)  # nobody will come for it
        if name is None and refused is None and not was_open:
            return False, None
        answer = dict(self._server)
        if name is not None:
            answer["hidden_states_path"] = states_path(self._folder, name)
            answer["num_tokens"] = len(request.prompt_token_ids)
        else:
            answer["hidden_states_error"] = refused or "the request ended before its prompt was computed"
        if self._failures:
            answer["failed_writes"] = dict(self._failures)
        return False, answer  # the rows are copied in the step itself: no block outlives its request

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = list(get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)))
        if len(layers) != 1:
            raise ValueError(f"expected one layer that keeps hidden states, found {layers}")
        cache = kv_caches[layers[0]]
        if tuple(cache.shape[1:3]) != (len(self._layer_ids), self._block_size):
            raise ValueError(
                f"hidden-states cache of shape {tuple(cache.shape)}, expected [blocks, {len(self._layer_ids)} layers, "
                f"{self._block_size} slots, hidden]: rows would be read from the wrong place"
            )
        if get_tensor_model_parallel_rank() == 0:
            self._cache = cache
            self._writer = StatesWriter(self._folder, self._layer_ids, self._num_writer_threads, self._max_queued_bytes)
            logger.info("hidden states of layers %s are written to %s", self._layer_ids, self._folder)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        """Runs after the step's forward passes, on the same stream: the rows are there and not yet overwritten."""
        if self._writer is None or not self.has_connector_metadata():
            return
        step = self._get_connector_metadata()
        if not isinstance(step, _StepSaves):
            return
        for name in step.discard:
            self._writer.discard(name)
        cache = self._cache
        assert cache is not None
        for save in step.saves:
            num_bytes = len(save.token_ids) * cache.shape[1] * cache.shape[3] * cache.element_size()
            self._writer.budget.acquire(num_bytes)
            try:
                rows, copied = _copy_rows(cache, save, self._block_size)
                self._writer.submit(save.name, save.token_ids, rows, copied)
            except BaseException:
                self._writer.budget.release(num_bytes)
                raise

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        failures = self._writer.take_failures() if self._writer is not None else {}
        for name, reason in failures.items():
            logger.error("hidden states %s could not be written: %s", name, reason)
        return _Failures(failures) if failures else None

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _copy_rows(cache: torch.Tensor, save: _Save, block_size: int) -> tuple[torch.Tensor, Any]:
    """A prompt's rows in host memory, [num_tokens, num_layers, hidden_size], and an event that says when.

    `cache` is [num_blocks, num_layers, block_size, hidden_size].
    """
    num_tokens, layers, hidden = len(save.token_ids), cache.shape[1], cache.shape[3]
    off_host = cache.device.type != "cpu"
    rows = torch.empty((num_tokens, layers, hidden), dtype=cache.dtype, pin_memory=off_host)
    used = -(-num_tokens // block_size)
    if not off_host:
        _copy_blocks(cache, save.block_ids[:used], rows)
        return rows, None
    _gather_blocks(cache, save.block_ids[:used], rows)
    copied = torch.Event(device=cache.device)
    copied.record()
    return rows, copied


def _copy_blocks(cache: torch.Tensor, block_ids: list[int], rows: torch.Tensor) -> None:
    """Fill rows block by block, and copy only slots that hold something: the fastest way within host memory."""
    block_size = cache.shape[2]
    for number, block in enumerate(block_ids):
        part = rows[number * block_size : (number + 1) * block_size]
        part.copy_(cache[block, :, : part.shape[0]].transpose(0, 1))


def _gather_blocks(cache: torch.Tensor, block_ids: list[int], rows: torch.Tensor) -> None:
    """Fill rows from another device, with few launches: many blocks in one copy, in a bounded buffer.

    A gather of a whole long prompt (131,072 tokens of an 8B model: 4 GB) would not fit beside a full KV cache.
    """
    _, layers, block_size, hidden = cache.shape
    blocks = torch.tensor(block_ids, dtype=torch.long).to(cache.device, non_blocking=True)
    step = max(1, _STAGING_BYTES // (block_size * layers * hidden * cache.element_size()))
    for first in range(0, len(block_ids), step):
        part = cache[blocks[first : first + step]].transpose(1, 2).reshape(-1, layers, hidden)
        begin = first * block_size
        end = min(begin + part.shape[0], rows.shape[0])
        rows[begin:end].copy_(part[: end - begin], non_blocking=True)


def _server(vllm_config: Any, layer_ids: list[int]) -> dict[str, Any]:
    """What each answer says about the server, so that a client can tell that it talks to the model it means."""
    model = vllm_config.model_config
    return {
        "layer_ids": layer_ids,
        "model": model.model,
        "num_layers": model.get_total_num_hidden_layers(),
        "hidden_size": model.get_hidden_size(),
        "vocab_size": model.get_vocab_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
    }


def _find_group(kv_cache_config: Any) -> tuple[int, int]:
    """Index and block size of the cache group whose blocks hold the hidden states.

    Uniform attention has one group for everything, and the scheduler is shown an arbitrary layer's spec of it. Hybrid
    attention (sliding window and full) gives the hidden states their own group, with its own block size.
    """
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = kv_cache_config.kv_cache_groups
    holding = [index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if not holding and len(groups) == 1:
        holding = [0]
    if len(holding) != 1:
        raise ValueError(f"cannot tell which of {len(groups)} cache groups holds the hidden states")
    return holding[0], groups[holding[0]].kv_cache_spec.block_size
