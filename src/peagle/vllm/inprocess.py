"""Hidden states from vLLM inside this process: no server, no port, the same connector and the same files."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from peagle.data.records import TokenRow
from peagle.errors import ConfigError, VerifierError, one_line
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.source import RowRefused, RowStates
from peagle.vllm.launch import PLUGIN_FOLDER, detour_arguments, extraction_arguments, find_engine, plugin_environment
from peagle.vllm.states import GREEDY, StatesFolder, connector_answer, row_states, to_be_checked

logger = logging.getLogger(__name__)

_UNDER_WAY = 64  # bounds the files that wait while a shard is written
_FILE_WAIT_S = 120.0


class InProcessSource:
    """A `StateSource` over a vLLM engine of its own.

    Args:
        verifier: the model.
        aux_layer_ids: layers wanted, ascending; the last layer is always wanted too.
        dtype: what the engine computes in ("auto", "float32", "bfloat16", "float16").
        folder: through which the engine hands its files over; a memory disk is fastest.
        store: identity of the result (its output path), for naming files.
        check_all_positions: see `states.EndpointSource`.
        vllm_arguments: vLLM's own flags (--tensor-parallel-size 2 ...).

    Raises:
        ConfigError: vLLM is not installed here, or a flag that it does not know.
        VerifierError: the engine does not start.
    """

    def __init__(
        self,
        *,
        verifier: VerifierConfig,
        aux_layer_ids: Sequence[int],
        dtype: str,
        folder: Path,
        store: str,
        check_all_positions: bool,
        vllm_arguments: Sequence[str],
    ) -> None:
        self._layers = (*aux_layer_ids, verifier.num_layers)
        self._check_all = check_all_positions
        self._folder = StatesFolder(folder, store)
        self._closed = False
        self._engine = _start_engine(verifier, self._layers, dtype, self._folder.path, vllm_arguments)
        self.max_tokens = int(self._engine.model_config.max_model_len) - 1
        """The engine's limit, less the one token that each request generates."""
        self._folder.sweep()

    def states(self, rows: Sequence[TokenRow], wanted: AbstractSet[str]) -> Iterator[RowStates | RowRefused]:
        """See `StateSource`."""
        source = (row for row in rows if row.row_id in wanted)
        under_way: dict[str, TokenRow] = {}
        number = 0
        while True:
            while len(under_way) < _UNDER_WAY and (row := next(source, None)) is not None:
                name = self._folder.new_name()
                try:
                    self._ask(name, row, to_be_checked(row, number, self._check_all))
                except ValueError as error:  # vLLM's own check of a prompt
                    yield RowRefused(row.row_id, "refused by vLLM", one_line(error))
                else:
                    under_way[name] = row
                number += 1
            if not under_way:
                return
            for output in self._engine.step():
                if output.finished and (row := under_way.pop(output.request_id, None)) is not None:
                    yield self._result(row, output)

    def close(self) -> None:
        """Stop the engine, remove this store's files."""
        if not self._closed:
            self._closed = True
            core = getattr(self._engine, "engine_core", None)
            if core is not None:
                core.shutdown()
            self._folder.sweep()

    def _ask(self, name: str, row: TokenRow, is_checked: bool) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=1,
            **GREEDY,
            prompt_logprobs=1 if is_checked else None,
            detokenize=False,
            extra_args={"kv_transfer_params": {"hidden_states_name": name}},
        )
        self._engine.add_request(name, {"type": "token", "prompt_token_ids": row.input_ids}, parameters)

    def _result(self, row: TokenRow, output: Any) -> RowStates | RowRefused:
        connector = connector_answer(output.kv_transfer_params, "vLLM")
        served = self._folder.read(output.request_id, _FILE_WAIT_S)
        order = [connector["layer_ids"].index(i) for i in self._layers]
        ranks = [{token: value.rank for token, value in (of or {}).items()} for of in output.prompt_logprobs or []]
        generated = output.outputs[0].token_ids if output.outputs else ()
        if (wrong := served.fault(connector)) is not None:
            return RowRefused(row.row_id, "vLLM's file is not what it says", wrong)
        return row_states(row, served, order, ranks, generated, "")


def _start_engine(
    verifier: VerifierConfig, layers: Sequence[int], dtype: str, folder: Path, vllm_arguments: Sequence[str]
) -> Any:
    engine = find_engine(None)
    os.environ.update(plugin_environment())  # for the processes that the engine starts
    if str(PLUGIN_FOLDER) not in sys.path:
        sys.path.insert(0, str(PLUGIN_FOLDER))
    folder.mkdir(parents=True, exist_ok=True)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False, exit_on_error=False))
    detour = [] if "--hf-overrides" in vllm_arguments else detour_arguments(engine, verifier.architectures)
    arguments = ["--model", verifier.name_or_path, "--dtype", dtype, *detour, *vllm_arguments]
    if verifier.trust_remote_code:
        arguments.append("--trust-remote-code")
    arguments += extraction_arguments(layers, folder, num_threads=2, max_bytes=1 << 30)
    try:
        parsed, unknown = parser.parse_known_args(arguments)
    except (SystemExit, Exception) as error:  # argparse's own errors, whichever kind this version raises
        raise ConfigError(f"vLLM does not take these arguments: {one_line(error)}") from None
    if unknown:
        raise ConfigError(f"vLLM does not know {unknown[0]}")
    try:
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))
    except (RuntimeError, ValueError, OSError) as error:
        where = verifier.name_or_path
        raise VerifierError(f"{where}: vLLM {engine.version} does not start: {one_line(error)}") from error
