"""What is counted, whoever counts it (the engine, the replay, vLLM's counters), and the figures and table made of it.

Convention, the same as vLLM's: a pass is one run of the verifier over a draft (the prefill is none); a drafted token
counts as accepted as soon as the verifier accepts it, before an end-of-sequence token or a length limit cuts the
answer; acceptance length = 1 + accepted / passes, so the verifier's own token is included. Beside it stand the tokens
that reached the user per pass, after any cut and with the passes that checked no draft. Figures of a data set pool
all passes of all its answers; no figure here is a mean of per-answer means.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

CONVENTION = (
    "Pooled over all verifier passes; the prefill is no pass. Position k: share of passes in which the k-th drafted "
    "token was accepted. Acceptance length = 1 + accepted / passes: the verifier's own (bonus) token is included."
)
SMALLEST_CONTEXT_BUCKET = 128


@dataclass(frozen=True)
class PassCounts:
    """Sums over verifier passes. Expected counts (replay at temperature > 0) are not whole numbers."""

    num_drafts: float
    """Verifier passes that checked a draft."""
    accepted_per_position: tuple[float, ...]
    """Passes in which the k-th drafted token was accepted (so all before it were too), [num_speculative_tokens]."""
    num_generated_tokens: int
    """Tokens of the answers as the user got them, after any cut, first tokens (from the prefill) included."""
    num_answers: int = 0
    """Answers they belong to, 0 where that is not known: each one's first token is of no pass."""
    drafted: float | None = None
    """Tokens drafted, where the counter says so: a draft near a length limit is shorter. None: K in each pass."""

    @property
    def num_speculative_tokens(self) -> int:
        """K: tokens drafted per pass, at most."""
        return len(self.accepted_per_position)

    @property
    def num_draft_tokens(self) -> float:
        """Tokens drafted."""
        return self.num_drafts * self.num_speculative_tokens if self.drafted is None else self.drafted

    @property
    def passes_without_draft(self) -> float | None:
        """Verifier passes that checked no draft, at least so many: what the answers hold beyond all drafts' tokens.

        None where the number of answers is not known.
        """
        if not self.num_answers:
            return None
        return max(0, self.num_generated_tokens - self.num_answers - self.num_drafts - self.num_accepted)

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that reached the user per verifier pass, passes without a draft and cut answers included.

        Below the acceptance length where accepted tokens lie behind an end of sequence, or drafting stood still.
        """
        passes = None if self.passes_without_draft is None else self.num_drafts + self.passes_without_draft
        return (self.num_generated_tokens - self.num_answers) / passes if passes else None

    @property
    def num_accepted(self) -> float:
        """Drafted tokens that were accepted."""
        return sum(self.accepted_per_position)

    @property
    def accepted_per_pass(self) -> float | None:
        """Mean of accepted drafted tokens per pass, bonus token not included; None where nothing was drafted."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / passes; None where nothing was drafted."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...] | None:
        """Share of passes in which position k was accepted: unconditional, [num_speculative_tokens]."""
        if not self.num_drafts:
            return None
        return tuple(accepted / self.num_drafts for accepted in self.accepted_per_position)

    @property
    def conditional_per_position(self) -> tuple[float | None, ...] | None:
        """Share of the drafts that reached position k, all before it accepted, in which k was accepted too.

        None: no draft reached it, or drafts were of several lengths and the counts leave open how many did.
        """
        if not self.num_drafts:
            return None
        shares = []
        for place, accepted in enumerate(self.accepted_per_position):
            before = self.accepted_per_position[place - 1] if place else self.num_drafts
            least_long, most_long = self._drafts_as_long_as(place)
            most = min(before, most_long)
            least = max(accepted, before - (self.num_drafts - least_long))
            shares.append(accepted / most if most == least and most else None)
        return tuple(shares)

    def _drafts_as_long_as(self, place: int) -> tuple[float, float]:
        """Bounds on how many drafts had a token at this place (0-based): lengths add up to the tokens drafted."""
        drafts, tokens, accepted = self.num_drafts, self.num_draft_tokens, self.accepted_per_position
        if self.drafted is None or tokens >= drafts * len(accepted):
            return drafts, drafts
        least = max(accepted[place], math.ceil((tokens - drafts * place) / (len(accepted) - place)))

        def fewest_tokens(count: int) -> float:
            """Of drafts of which so many had a token at this place."""
            return sum(max(count, one) for one in accepted[: place + 1]) + sum(accepted[place + 1 :])

        more = range(int(least) + 1, int(drafts) + 1)
        return least, least + bisect.bisect_right(more, tokens, key=fewest_tokens)

    @property
    def histogram(self) -> tuple[float, ...]:
        """Passes that accepted exactly 0, 1, .. K drafted tokens, [num_speculative_tokens + 1]."""
        at_least = (self.num_drafts, *self.accepted_per_position)
        return tuple(a - b for a, b in zip(at_least, (*self.accepted_per_position, 0)))

    @staticmethod
    def of_passes(accepted: Sequence[int], num_speculative_tokens: int, num_generated_tokens: int) -> PassCounts:
        """Count the accepted drafted tokens of each pass, at most K = `num_speculative_tokens`.

        [4, 1, 1] with K = 4: 3 passes, accepted (3, 1, 1, 1), 2.0 per pass, acceptance length 3.0.
        """
        per_position = (sum(count > k for count in accepted) for k in range(num_speculative_tokens))
        return PassCounts(len(accepted), tuple(per_position), num_generated_tokens)


def pool(parts: Iterable[PassCounts], num_speculative_tokens: int) -> PassCounts:
    """Add counts up; the sum of nothing has all zeros."""
    sums = PassCounts(0, (0,) * num_speculative_tokens, 0)
    for part in parts:
        if part.num_speculative_tokens != num_speculative_tokens:
            raise ValueError(f"{part.num_speculative_tokens} drafted per pass pooled with {num_speculative_tokens}")
        is_counted = sums.drafted is not None or part.drafted is not None
        sums = PassCounts(
            sums.num_drafts + part.num_drafts,
            tuple(a + b for a, b in zip(sums.accepted_per_position, part.accepted_per_position)),
            sums.num_generated_tokens + part.num_generated_tokens,
            sums.num_answers + part.num_answers,
            sums.num_draft_tokens + part.num_draft_tokens if is_counted else None,
        )
    return sums


# What a shape must be like to be believed, see `implausible`.
_FEWEST_PASSES, _STEEPEST_FALL = 20, 1 / 3


def implausible(counts: PassCounts) -> str | None:
    """What a count's shape says against it, or None.

    A later position cannot be accepted more often than the one before. Among drafts that reached a position, it is
    accepted somewhat less often than the one before it, in published drafters by a tenth or two; where at least 20
    drafts reached it and fewer than a third of the share before are accepted, deeper positions are hardly what the
    drafter was trained for.
    """
    accepted = counts.accepted_per_position
    conditional = counts.conditional_per_position or (None,) * len(accepted)
    for place in range(1, len(accepted)):
        if accepted[place] > accepted[place - 1]:
            return (
                f"position {place + 1} was accepted {accepted[place]:.12g} times, position {place} before it "
                f"{accepted[place - 1]:.12g} times: these counters are not what they are taken for"
            )
    for place in range(1, len(accepted)):
        before, here = conditional[place - 1], conditional[place]
        if accepted[place - 1] < _FEWEST_PASSES or before is None or here is None:
            continue
        if here < _STEEPEST_FALL * before:
            return (
                f"position {place + 1} is accepted in {percent(here)} % of the drafts that reach it, position {place} "
                f"in {percent(before)} %: deeper positions look untrained or misread. Check that the server drafts as "
                "many tokens as the drafter was trained for, its mask token, and that it runs this very checkpoint"
            )
    return None


@dataclass(frozen=True)
class DatasetCounts:
    """The counts of one data set, whole and by context length."""

    total: PassCounts
    by_context: Mapping[str, PassCounts]
    """Context bucket (see `context_bucket`) -> counts of the passes that started in it; empty where not known."""


def context_bucket(num_known_tokens: int) -> str:
    """Name the bucket of a pass by the tokens known before it: "1-128", "129-256", "257-512" and so on, doubling."""
    low, high = 1, SMALLEST_CONTEXT_BUCKET
    while num_known_tokens > high:
        low, high = high + 1, high * 2
    return f"{low}-{high}"


def count_by_context(passes: Iterable[tuple[int, int]], num_speculative_tokens: int) -> dict[str, PassCounts]:
    """Count passes, each as (tokens known before it, drafted tokens accepted), by context bucket."""
    accepted: dict[str, list[int]] = {}
    for num_known, num_accepted in passes:
        accepted.setdefault(context_bucket(num_known), []).append(num_accepted)
    return {name: PassCounts.of_passes(some, num_speculative_tokens, 0) for name, some in accepted.items()}


def pool_contexts(parts: Sequence[Mapping[str, PassCounts]], num_speculative_tokens: int) -> dict[str, PassCounts]:
    """Pool the counts of several answers or data sets by context bucket."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: pool([part[name] for part in parts if name in part], num_speculative_tokens) for name in names}


def count_datasets(
    answers: Iterable[tuple[str, int, Mapping[str, PassCounts]]], num_speculative_tokens: int
) -> dict[str, DatasetCounts]:
    """Add up answers, each as (its data set, tokens generated, counts by context), per data set."""
    by_source: dict[str, list[tuple[int, Mapping[str, PassCounts]]]] = {}
    for source, generated, by_context in answers:
        by_source.setdefault(source, []).append((generated, by_context))
    datasets = {}
    for source, some in by_source.items():
        contexts = pool_contexts([by_context for _, by_context in some], num_speculative_tokens)
        total = replace(
            pool(contexts.values(), num_speculative_tokens),
            num_generated_tokens=sum(n for n, _ in some),
            num_answers=len(some),
        )
        datasets[source] = DatasetCounts(total, contexts)
    return datasets


# Counts as the figures of evaluation.json, and those as the field's table.


def figures(counts: PassCounts) -> dict[str, Any]:
    """One data set's figures as JSON: null, never 0 or NaN, where nothing was drafted."""
    per_position = counts.acceptance_per_position
    conditional = counts.conditional_per_position
    return {
        "acceptance_length": counts.acceptance_length,
        "acceptance_per_position": None if per_position is None else list(per_position),
        "conditional_acceptance_per_position": None if conditional is None else list(conditional),
        "accepted_per_pass": counts.accepted_per_pass,
        "tokens_per_pass": counts.tokens_per_pass,
        "passes_without_draft": None if counts.passes_without_draft is None else _whole(counts.passes_without_draft),
        "verifier_passes": _whole(counts.num_drafts),
        "drafted_tokens": _whole(counts.num_draft_tokens),
        "accepted_tokens": _whole(counts.num_accepted),
        "accepted_tokens_per_position": [_whole(accepted) for accepted in counts.accepted_per_position],
        "passes_by_accepted_tokens": [_whole(passes) for passes in counts.histogram],
        "generated_tokens": counts.num_generated_tokens,
    }


def report(datasets: Mapping[str, DatasetCounts]) -> dict[str, Any]:
    """The acceptance part of `evaluation.json`.

    `average` is the plain mean of the data sets that drafted, as published; `pooled` sums the passes of all data sets
    and is the figure to rank by. All data sets have the same number of drafted tokens.
    """
    totals = [dataset.total for dataset in datasets.values()]
    depth = totals[0].num_speculative_tokens if totals else 0
    pooled = pool(totals, depth)
    contexts = pool_contexts([dataset.by_context for dataset in datasets.values()], depth)
    by_name = {name: figures(dataset.total) for name, dataset in datasets.items()}
    drafted = [one for one in by_name.values() if one["acceptance_length"] is not None]
    columns = zip(*(one["acceptance_per_position"] for one in drafted))
    average = {
        "acceptance_length": sum(one["acceptance_length"] for one in drafted) / len(drafted) if drafted else None,
        "acceptance_per_position": [sum(column) / len(drafted) for column in columns] if drafted else None,
        "is_mean_of_datasets": True,
    }
    return {
        "convention": CONVENTION,
        "num_speculative_tokens": depth,
        "pooled": figures(pooled),
        "average": average,
        "datasets": by_name,
        "by_context_length": {
            name: figures(contexts[name]) for name in sorted(contexts, key=lambda name: int(name.split("-")[0]))
        },
    }


def table(evaluation: Mapping[str, Any]) -> list[list[str]]:
    """The field's table as strings: what the terminal, Markdown, the model card and the report show.

    Returns:
        Lines of cells: the head, a line per data set, `Average` if there is one, `Pooled`. Acceptance in %; "-" where
        nothing was drafted.
    """
    pooled = evaluation["pooled"]
    depth = int(evaluation.get("num_speculative_tokens") or len(pooled.get("acceptance_per_position") or ()))
    lines = [["dataset", *("pos 1" if k == 1 else str(k) for k in range(1, depth + 1)), "length", "passes"]]
    means = [("Average", evaluation["average"])] if evaluation.get("average") else []
    for name, one in (*evaluation["datasets"].items(), *means, ("Pooled", pooled)):
        shares = one.get("acceptance_per_position") or [None] * depth
        length, passes = one.get("acceptance_length"), one.get("verifier_passes")
        cells = ["-" if length is None else f"{length:.3f}", "" if passes is None else f"{passes:,.0f}"]
        lines.append([name, *map(percent, shares), *cells])
    return lines


def percent(share: float | None) -> str:
    """A share of 0..1 in %, without the sign; "-" for None."""
    return "-" if share is None else f"{100 * share:.1f}"


def markdown_table(evaluation: Mapping[str, Any]) -> list[str]:
    """`table` in Markdown, with the convention below it."""
    head, *rows = table(evaluation)
    return [*markdown_lines(head, rows, "---:"), "", str(evaluation.get("convention", CONVENTION))]


def markdown_lines(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """A table in Markdown, its first column on the left; a cell's `|` is escaped."""
    first, *rest = (
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in (head, *rows)
    )
    return [first, "|" + "|".join(["---", *[align] * (len(head) - 1)]) + "|", *rest]


def card_section(evaluation: Mapping[str, Any] | None) -> str | None:
    """What a model card says of an `evaluation.json`; None where there is none, or nothing was drafted."""
    if evaluation is None or not (evaluation.get("pooled") or {}).get("acceptance_per_position"):
        return None
    text = "\n".join(markdown_table(evaluation))
    speed = evaluation.get("speed") or {}
    if speed.get("tokens_per_s") and speed.get("plain_tokens_per_s"):
        ratio = speed["tokens_per_s"] / speed["plain_tokens_per_s"]
        text += f"\n\nMeasured beside plain decoding on the same machine: {ratio:.2f} times its tokens per second."
    return text


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


# Which number of drafted tokens pays: measured acceptance weighed against the measured cost of drafting and verifying.


@dataclass(frozen=True)
class PassCost:
    """Milliseconds, measured on one machine at one batch size."""

    plain_ms: float
    """One token of plain decoding."""
    draft_ms: float
    """Drafting `num_speculative_tokens` tokens."""
    verify_ms: float
    """One verifier pass over that draft, acceptance and cache work included."""
    num_speculative_tokens: int
    """At which the two were measured."""


@dataclass(frozen=True)
class Expected:
    """What drafting `k` tokens is expected to give."""

    k: int
    acceptance_length: float
    speedup: float
    """Tokens per second over plain decoding."""


def expected_speedups(acceptance_per_position: Sequence[float], cost: PassCost, is_sequential: bool) -> list[Expected]:
    """Expected speed-up for each k from 1 to the number of measured positions.

    A pass that drafts k tokens yields 1 + p_1 + .. + p_k tokens, for one draft and one verifier pass over k + 1 tokens,
    whose cost is taken as linear between plain decoding (k = 0) and the measured pass. One-pass drafting makes position
    j the same draft whatever k is, so one measurement at a large k tells about all smaller ones.

    Args:
        acceptance_per_position: p, unconditional, 0..1, [num_speculative_tokens].
        cost: measured costs.
        is_sequential: EAGLE-3 drafts token by token, so its drafting cost grows with k; P-EAGLE's is one pass.

    Example:
        acceptance (0.8, 0.5), plain 10 ms, draft 2 ms, verify 11 ms at k = 2: k = 1 gives 1.8 tokens in 12.5 ms, a
        speed-up of 1.44; k = 2 gives 2.3 tokens in 13 ms, 1.77.
    """
    expected = []
    length = 1.0
    for k, share in enumerate(acceptance_per_position, start=1):
        length += share
        part = k / cost.num_speculative_tokens
        draft_ms = cost.draft_ms * part if is_sequential else cost.draft_ms
        verify_ms = cost.plain_ms + (cost.verify_ms - cost.plain_ms) * part
        expected.append(Expected(k, length, length * cost.plain_ms / (draft_ms + verify_ms)))
    return expected


def best(expected: Sequence[Expected]) -> Expected | None:
    """The k with the highest expected speed-up, the smaller of two equals; None where nothing was measured."""
    return max(expected, key=lambda e: (e.speedup, -e.k), default=None)
