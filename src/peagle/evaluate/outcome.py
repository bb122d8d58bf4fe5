"""What an evaluation says: evaluation.json, Markdown, and the lines on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from peagle import log
from peagle.evaluate import table
from peagle.evaluate.contest import Difference
from peagle.evaluate.counts import DatasetCounts, pool
from peagle.evaluate.decoding import Decoded
from peagle.evaluate.replaying import Agreement

_SHOWN = 10


@dataclass(frozen=True)
class Served:
    """Speed of a server."""

    tokens_per_s: float | None
    """Over all its requests under way."""
    by_concurrency: Sequence[Mapping[str, Any]]
    """See `latency.under_load`."""


@dataclass(frozen=True)
class Outcome:
    """Everything that was found."""

    depth: int
    """Drafted tokens per pass."""
    datasets: Mapping[str, DatasetCounts]
    decoded: Decoded | None
    agreement: Agreement | None
    served: Served | None
    notes: Sequence[str]

    def figures(self) -> dict[str, Any]:
        """The measured part of evaluation.json; what was not measured is null."""
        return {
            **table.report(self.datasets),
            "num_speculative_tokens": self.depth,
            "lossless": self._lossless(),
            "replay": self._replay(),
            "speed": self._speed(),
            "notes": list(self.notes),
            "threads": torch.get_num_threads(),
            "versions": log.versions(),
        }

    def markdown(self) -> str:
        """The table with its notes, and the other figures as lines."""
        totals = {name: dataset.total for name, dataset in self.datasets.items()}
        text = table.markdown(totals, list(self.notes)) if totals else "Nothing was measured.\n"
        return text + "".join(f"\n{line}\n" for line in self.lines())

    def show(self, title: str, console: Console) -> None:
        """Print the warnings, the table, and the other figures."""
        for note in self.notes:
            whole = not console.is_terminal
            console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False, soft_wrap=whole)
        if self.datasets:
            console.print(table.terminal({name: dataset.total for name, dataset in self.datasets.items()}, title))
        for line in self.lines():
            console.print(escape(line), highlight=False, soft_wrap=not console.is_terminal)

    def lines(self) -> list[str]:
        """Losslessness, replay and speed, a sentence each."""
        found = []
        lossless, replayed, speed = self._lossless(), self._replay(), self._speed()
        if lossless["checked"]:
            ties = f", {lossless['excused']} more but for a tie (shown in the JSON)" if lossless["excused"] else ""
            same = f"{lossless['identical']} of {lossless['checked']}"
            found.append(f"lossless: {same} answers identical to the verifier's own{ties}")
        if self.agreement is not None and self.agreement.equal is not None:
            verdict = "gives the same counts"
            if not self.agreement.equal:
                near = f"counts as decoding does but for rounding in {len(self.agreement.found)} answers"
                verdict = near if self.agreement.is_within_rounding else "COUNTS OTHERWISE THAN DECODING"
            found.append(f"replay: {verdict} ({self.agreement.num_answers} answers, {replayed['passes']} passes)")
        if speed["tokens_per_s"] and speed["plain_tokens_per_s"]:
            found.append(
                f"speed: {speed['tokens_per_s']:.1f} tokens/s, plain decoding {speed['plain_tokens_per_s']:.1f} "
                f"({speed['plain_by']}): {speed['speedup']:.2f} times"
            )
            if speed["draft_ms_per_pass"]:
                found.append(
                    f"time per pass: drafting {speed['draft_ms_per_pass']:.2f} ms, verifying "
                    f"{speed['verify_ms_per_pass']:.2f} ms; plainly decoded, a token takes "
                    f"{speed['plain_ms_per_token']:.2f} ms"
                )
        elif speed["tokens_per_s"]:
            found.append(f"speed: {speed['tokens_per_s']:.1f} tokens/s over all requests under way")
        return found + [_under_load(point) for point in speed.get("by_concurrency", ())]

    @property
    def is_sound(self) -> bool:
        """Something was drafted, every compared answer is the verifier's own, and replay counts as decoding does; a
        half-precision pair is excused where its logits are within rounding."""
        drafted = pool((dataset.total for dataset in self.datasets.values()), self.depth).num_drafts > 0
        wrong = [one for one in self._differences() if not one.is_within_rounding]
        return drafted and not wrong and (self.agreement is None or self.agreement.is_within_rounding)

    def rounding_note(self) -> str | None:
        """Said where half precision gives answers that differ, or drafts that replay counts otherwise."""
        rounded = [one for one in self._differences() if one.is_within_rounding and not one.is_tie]
        if not rounded:
            agreement = self.agreement
            if agreement is None or agreement.equal is not False or not agreement.is_within_rounding:
                return None
            dtype = str(agreement.found[0].dtype).removeprefix("torch.")
            return (
                f"in {len(agreement.found)} answers replay and decoding draft differently where the drafter's best "
                f"logits are within the rounding of {dtype}. --dtype float32 compares exactly"
            )
        dtype = str(rounded[0].dtype).removeprefix("torch.")
        return (
            f"{len(rounded)} answers differ from the verifier's own where its best logits are within the rounding of "
            f"{dtype} (largest gap {max(abs(one.gap) for one in rounded):.2g}): it differs from itself there too, from "
            "one batch to another. --dtype float32 compares exactly"
        )

    def _differences(self) -> list[Difference]:
        return [] if self.decoded is None else self.decoded.differences

    def _lossless(self) -> dict[str, Any]:
        if self.decoded is None or not self.decoded.checked:
            return {"checked": None, "identical": None, "excused": None, "differences": []}
        found, checked = self._differences(), len(self.decoded.checked)
        return {
            "checked": checked,
            "identical": checked - len(found),
            "excused": sum(one.is_tie for one in found),
            "differences": [
                {
                    "prompt": self.decoded.checked[one.index],
                    "position": one.position,
                    "token": one.token,
                    "own_token": one.own_token,
                    "logit_gap": one.gap if math.isfinite(one.gap) else None,
                    "is_tie": one.is_tie,
                    "is_within_rounding": one.is_within_rounding,
                }
                for one in found[:_SHOWN]
            ],
        }

    def _replay(self) -> dict[str, Any]:
        if self.agreement is None:
            return {"equal": None, "answers": None, "passes": None, "excused": None, "differences": []}
        found = self.agreement.found
        return {
            "equal": self.agreement.equal,
            "answers": self.agreement.num_answers,
            "passes": self.agreement.num_passes,
            "excused": sum(one.is_tie for one in found),
            "differing": len(found),
            "is_within_rounding": self.agreement.is_within_rounding,
            "differences": [
                {
                    "row_id": one.row_id,
                    "num_known": one.num_known,
                    "decoded_ids": list(one.decoded_ids),
                    "replayed_ids": list(one.replayed_ids),
                    "logit_gap": one.gap,
                    "is_tie": one.is_tie,
                    "is_within_rounding": one.is_within_rounding,
                }
                for one in found[:_SHOWN]
            ],
        }

    def _speed(self) -> dict[str, Any]:
        run = None if self.decoded is None else self.decoded.contest
        if run is None:
            figures: dict[str, Any] = {"tokens_per_s": None, "plain_tokens_per_s": None, "speedup": None}
            if self.served is not None:
                figures["tokens_per_s"] = self.served.tokens_per_s
                figures["by_concurrency"] = [dict(point) for point in self.served.by_concurrency]
            return figures
        ours = run.tokens_per_s("drafter")
        plain = {"engine": run.tokens_per_s("engine"), "transformers": run.tokens_per_s("transformers")}
        faster = max(plain, key=lambda name: plain[name] or 0.0)
        best = plain[faster]
        steps = run.laps.num_steps
        by = {"engine": "our engine without a drafter", "transformers": "Transformers' generate"}
        return {
            "tokens_per_s": ours,
            "plain_tokens_per_s": best,
            "plain_by": by[faster],
            "speedup": ours / best if ours and best else None,
            "engine_tokens_per_s": plain["engine"],
            "transformers_tokens_per_s": plain["transformers"],
            "draft_ms_per_pass": 1e3 * run.laps.draft_s / steps if steps else None,
            "verify_ms_per_pass": 1e3 * run.laps.verify_s / steps if steps else None,
            "plain_ms_per_token": 1e3 / best if best else None,
            "compared_prompts": len(run.answers),
        }


def _under_load(point: Mapping[str, Any]) -> str:
    """One concurrency in a line, the plain server's figures in brackets."""

    def beside(key: str, unit: str) -> str:
        plain = point.get(f"plain_{key}")
        value = "-" if point[key] is None else f"{point[key]:.1f}"
        return f"{value}{unit}" + ("" if plain is None else f" ({plain:.1f})")

    rates = point["tokens_per_s"], point.get("plain_tokens_per_s")
    times = f", {rates[0] / rates[1]:.2f} times" if rates[1] else ""
    return (
        f"{point['concurrency']} at once: {beside('tokens_per_s', ' tokens/s')}{times}; first token "
        f"{beside('ttft_ms', ' ms')}, between tokens {beside('itl_ms', ' ms')}"
    )
