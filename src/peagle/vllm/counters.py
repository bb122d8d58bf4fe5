"""vLLM's speculative-decoding counters from its Prometheus text: summed over engines, differences of two readings."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from peagle.errors import EndpointError

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_DRAFTS = "vllm:spec_decode_num_drafts"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_GENERATED = "vllm:generation_tokens"
_COUNTERS = {_DRAFTS, _DRAFT_TOKENS, _PER_POSITION, _GENERATED}


@dataclass(frozen=True)
class Reading:
    """One reading of the counters. Engines (data-parallel ranks) stay apart, so that the restart of one is seen."""

    values: Mapping[tuple[str, str, str], float]
    """(counter, engine, position or "") -> value."""

    @property
    def engines(self) -> list[str]:
        """The engines' labels, sorted."""
        return sorted({engine for _, engine, _ in self.values})


def read_metrics(text: str, model_name: str | None) -> Reading:
    """Parse Prometheus text.

    Args:
        text: what `GET /metrics` answered.
        model_name: keep only series with this `model_name` label; None keeps all.

    Returns:
        The counters that matter here. A server without a drafter has none of the spec_decode ones.
    """
    values: dict[tuple[str, str, str], float] = {}
    for line in text.splitlines():
        match = _LINE.match(line.strip())
        if match is None:
            continue
        name = match["name"].removesuffix("_total")
        if name not in _COUNTERS:
            continue
        labels = dict(_LABEL.findall(match["labels"] or ""))
        if model_name is not None and labels.get("model_name", model_name) != model_name:
            continue
        key = (name, labels.get("engine", "0"), labels.get("position", ""))
        values[key] = values.get(key, 0.0) + float(match["value"])
    return Reading(values)


@dataclass(frozen=True)
class Gain:
    """By how much the counters grew between two readings."""

    num_drafts: float
    """Verifier passes that checked a draft."""
    num_draft_tokens: float | None
    """Tokens of these drafts; None where the server does not count them."""
    accepted_per_position: tuple[float, ...]
    """Passes in which the k-th drafted token was accepted, [num_speculative_tokens]."""
    num_generated_tokens: int


def difference(before: Reading, after: Reading) -> Gain:
    """What the counters gained between two readings, summed over all engines.

    Raises:
        EndpointError: a counter fell or an engine vanished (the server was restarted in between), or the server lacks
            speculative-decoding counters (it runs without a drafter), or those by position.
    """
    if not any(name == _DRAFTS for name, _, _ in after.values):
        raise EndpointError(
            "the server has no vllm:spec_decode counters: it runs without a drafter, or with --disable-log-stats"
        )
    if not any(name == _PER_POSITION for name, _, _ in after.values):
        raise EndpointError(
            f"the server counts drafts but has no {_PER_POSITION}: acceptance by position cannot be told; serve "
            "with a vLLM that counts it"
        )
    for key, value in before.values.items():
        now = after.values.get(key)
        if now is None or now < value:
            name, engine, _ = key
            fell = "is gone" if now is None else f"fell from {value:.0f} to {now:.0f}"
            raise EndpointError(
                f"the server was restarted between the two readings: {name} of engine {engine} {fell}; measure again"
            )
    gained: dict[tuple[str, str], float] = {}
    for (name, engine, position), value in after.values.items():
        old = before.values.get((name, engine, position), 0.0)
        gained[name, position] = gained.get((name, position), 0.0) + value - old
    positions = sorted(int(position) for name, position in gained if name == _PER_POSITION)
    per_position = tuple(gained[_PER_POSITION, str(k)] for k in positions)
    return Gain(
        num_drafts=gained[_DRAFTS, ""],
        num_draft_tokens=gained.get((_DRAFT_TOKENS, "")),
        accepted_per_position=per_position,
        num_generated_tokens=int(gained.get((_GENERATED, ""), 0)),
    )
