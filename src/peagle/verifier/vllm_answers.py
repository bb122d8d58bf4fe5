"""One row's request to vLLM for hidden states, and what comes back, the same for a server and in process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peagle.errors import EndpointError

GREEDY: dict[str, float] = {
    "temperature": 0,
    # A model's generation_config.json may hold penalties, which the server would apply to its choice.
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def states_request(ids: list[int], name: str, checked: bool) -> dict[str, Any]:
    """A completion of one token whose prompt's states are stored under `name`."""
    payload = {
        "prompt": ids,
        "max_tokens": 1,
        **GREEDY,
        "return_token_ids": True,
        "kv_transfer_params": {"hidden_states_name": name},
    }
    return {**payload, "prompt_logprobs": 1} if checked else payload


def connector_facts(facts: Any, where: str) -> dict[str, Any]:
    """What the connector says in an answer's `kv_transfer_params`.

    Raises:
        EndpointError: no connector, or its complaint.
    """
    if not isinstance(facts, dict) or "layer_ids" not in facts:
        raise EndpointError(
            f"{where}: runs without peagle's hidden-states connector; start it with `peagle launch-vllm MODEL "
            "--hidden-states-path DIR`"
        )
    if "hidden_states_error" in facts:
        raise EndpointError(f"{where}: {facts['hidden_states_error']}")
    return facts


def difference(sent: list[int], read: list[int]) -> str:
    """Where the ids that a server read part from those that were sent."""
    first = next((i for i, (a, b) in enumerate(zip(sent, read)) if a != b), min(len(sent), len(read)))
    return (
        f"the server read {len(read)} ids, sent were {len(sent)}; first difference at index {first} (sent "
        f"{sent[first : first + 1]}, read {read[first : first + 1]})"
    )


def split_layers(hidden_states: Tensor, order: list[int]) -> tuple[Tensor, Tensor]:
    """[num_tokens, num_layers, hidden_size] to (aux_states, last_states), both in memory of their own.

    Args:
        hidden_states: as served.
        order: places of the auxiliary layers, ascending layer id, then of the last layer.
    """
    aux_places = order[:-1]
    first = aux_places[0]
    if aux_places == list(range(first, first + len(aux_places))):
        aux = hidden_states[:, first : first + len(aux_places)]
    else:
        aux = hidden_states[:, aux_places]
    # One copy each, into memory of their own: what was served may be mapped from a file.
    return aux.clone(memory_format=torch.contiguous_format).flatten(1), hidden_states[:, order[-1]].clone()


def choices(answer: dict[str, Any], num_tokens: int) -> tuple[list[int], list[int]]:
    """Positions and the verifier's own next tokens there, as far as a completion tells."""
    choice = answer["choices"][0]
    positions: list[int] = []
    ids: list[int] = []
    for index, entry in enumerate(choice.get("prompt_logprobs") or []):
        top = [int(token) for token, value in (entry or {}).items() if value.get("rank") == 1]
        if top:
            positions.append(index - 1)
            ids.append(top[0])
    generated = choice.get("token_ids")
    if generated:
        positions.append(num_tokens - 1)
        ids.append(int(generated[0]))
    return positions, ids
