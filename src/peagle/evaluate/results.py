"""What an evaluation says: the figures of evaluation.json, and from them Markdown and the lines on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle import log
from peagle.evaluate import counts
from peagle.evaluate.compare import Difference, LogitGap, dtype_name
from peagle.evaluate.counts import Counts, DatasetCounts, pool
from peagle.evaluate.decode import Decoded
from peagle.evaluate.replay_check import Agreement

_SHOWN = 10


@dataclass(frozen=True)
class Served:
    """Speed of a server."""

    tokens_per_s: float | None
    """Over all its requests under way."""
    by_concurrency: Sequence[Mapping[str, Any]]
    """See `served.under_load`."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that was measured; what was not is None."""

    depth: int
    """Drafted tokens per pass."""
    datasets: Mapping[str, DatasetCounts]
    notes: Sequence[str]
    decoded: Decoded | None = None
    agreement: Agreement | None = None
    served: Served | None = None

    @property
    def pooled(self) -> Counts:
        """Counts of all data sets together."""
        return pool((dataset.total for dataset in self.datasets.values()), self.depth)

    @property
    def differences(self) -> list[Difference]:
        """Answers that are not the verifier's own."""
        return [] if self.decoded is None else self.decoded.differences

    @property
    def is_sound(self) -> bool:
        """Something was drafted, every compared answer is the verifier's own, and replay counts as decoding does; a
        half-precision pair is excused where its logits are within rounding."""
        wrong = [one for one in self.differences if not one.gap.is_within_rounding]
        return (
            self.pooled.num_drafts > 0 and not wrong and (self.agreement is None or self.agreement.is_within_rounding)
        )

    def figures(self) -> dict[str, Any]:
        """The measured part of evaluation.json; what was not measured is null."""
        return {
            **counts.report(self.datasets),
            "num_speculative_tokens": self.depth,
            "lossless": self._lossless(),
            "replay": self._replay(),
            "speed": self._speed(),
            "notes": list(self.notes),
            "threads": torch.get_num_threads(),
            "versions": log.versions(),
        }

    def rounding_note(self) -> str | None:
        """Said where half precision gives answers that differ, or drafts that replay counts otherwise."""
        rounded = [one.gap for one in self.differences if one.gap.is_within_rounding and not one.gap.is_tie]
        if rounded:
            largest = max(abs(gap.value) for gap in rounded if gap.value is not None)
            return (
                f"{len(rounded)} answers differ from the verifier's own where its best logits are within the rounding "
                f"of {dtype_name(rounded[0].dtype)} (largest gap {largest:.2g}): it differs from itself there too, "
                "from one batch to another. --dtype float32 compares exactly"
            )
        agreement = self.agreement
        if agreement is None or agreement.equal is not False or not agreement.is_within_rounding:
            return None
        apart = agreement.disagreements
        return (
            f"in {len(apart)} answers replay and decoding draft differently where the drafter's best logits are within "
            f"the rounding of {dtype_name(apart[0].gap.dtype)}. --dtype float32 compares exactly"
        )

    def _lossless(self) -> dict[str, Any]:
        if self.decoded is None or not self.decoded.checked:
            return {"checked": None, "identical": None, "excused": None, "differences": []}
        differing, checked = self.differences, len(self.decoded.checked)
        return {
            "checked": checked,
            "identical": checked - len(differing),
            "excused": sum(one.gap.is_tie for one in differing),
            "differences": [
                {
                    "prompt": self.decoded.checked[one.index],
                    "position": one.position,
                    "token": one.token,
                    "own_token": one.own_token,
                    **_gap_figures(one.gap),
                }
                for one in differing[:_SHOWN]
            ],
        }

    def _replay(self) -> dict[str, Any]:
        if self.agreement is None:
            return {"equal": None, "answers": None, "passes": None, "excused": None, "differences": []}
        differing = self.agreement.disagreements
        return {
            "equal": self.agreement.equal,
            "answers": self.agreement.num_answers,
            "passes": self.agreement.num_passes,
            "excused": sum(one.gap.is_tie for one in differing),
            "differing": len(differing),
            "is_within_rounding": self.agreement.is_within_rounding,
            "differences": [
                {
                    "row_id": one.row_id,
                    "num_known": one.num_known,
                    "decoded_ids": list(one.decoded_ids),
                    "replayed_ids": list(one.replayed_ids),
                    **_gap_figures(one.gap),
                }
                for one in differing[:_SHOWN]
            ],
        }

    def _speed(self) -> dict[str, Any]:
        run = None if self.decoded is None else self.decoded.comparison
        if run is None:
            speed: dict[str, Any] = {"tokens_per_s": None, "plain_tokens_per_s": None, "speedup": None}
            if self.served is not None:
                speed["tokens_per_s"] = self.served.tokens_per_s
                speed["by_concurrency"] = [dict(point) for point in self.served.by_concurrency]
            return speed
        ours = run.tokens_per_s("drafter")
        plain = {name: run.tokens_per_s(name) for name in ("engine", "transformers")}
        faster = max(plain, key=lambda name: plain[name] or 0.0)
        best, steps = plain[faster], run.laps.num_steps
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


def _gap_figures(gap: LogitGap) -> dict[str, Any]:
    return {"logit_gap": gap.value, "is_tie": gap.is_tie, "is_within_rounding": gap.is_within_rounding}


# What people read. Each function takes the figures of evaluation.json.


def lines(evaluation: Mapping[str, Any]) -> list[str]:
    """Losslessness, replay and speed, a sentence each."""
    lossless, replay, speed = evaluation["lossless"], evaluation["replay"], evaluation["speed"]
    said = []
    if lossless["checked"]:
        ties = f", {lossless['excused']} more but for a tie (shown in the JSON)" if lossless["excused"] else ""
        same = f"{lossless['identical']} of {lossless['checked']}"
        said.append(f"lossless: {same} answers identical to the verifier's own{ties}")
    if replay["equal"] is not None:
        verdict = "gives the same counts"
        if not replay["equal"]:
            near = f"counts as decoding does but for rounding in {replay['differing']} answers"
            verdict = near if replay["is_within_rounding"] else "COUNTS OTHERWISE THAN DECODING"
        said.append(f"replay: {verdict} ({replay['answers']} answers, {replay['passes']} passes)")
    if speed["tokens_per_s"] and speed["plain_tokens_per_s"]:
        said.append(
            f"speed: {speed['tokens_per_s']:.1f} tokens/s, plain decoding {speed['plain_tokens_per_s']:.1f} "
            f"({speed['plain_by']}): {speed['speedup']:.2f} times"
        )
        if speed["draft_ms_per_pass"]:
            said.append(
                f"time per pass: drafting {speed['draft_ms_per_pass']:.2f} ms, verifying "
                f"{speed['verify_ms_per_pass']:.2f} ms; plainly decoded, a token takes "
                f"{speed['plain_ms_per_token']:.2f} ms"
            )
    elif speed["tokens_per_s"]:
        said.append(f"speed: {speed['tokens_per_s']:.1f} tokens/s over all requests under way")
    return said + [_under_load(point) for point in speed.get("by_concurrency", ())]


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


def markdown(evaluation: Mapping[str, Any]) -> str:
    """The notes, the table with its convention, and the other figures as lines."""
    text = [f"> {note}" for note in evaluation["notes"]] + ([""] if evaluation["notes"] else [])
    if evaluation["datasets"]:
        shares = evaluation["pooled"]["conditional_acceptance_per_position"]
        conditional = ", ".join(map(counts.percent, shares or [None] * evaluation["num_speculative_tokens"]))
        text += [*counts.markdown_table(evaluation), ""]
        text += [f"Pooled, given that all earlier positions were accepted: {conditional}."]
    else:
        text += ["Nothing was measured."]
    return "\n".join(text) + "\n" + "".join(f"\n{line}\n" for line in lines(evaluation))


def show(evaluation: Mapping[str, Any], title: str, console: Console) -> None:
    """Print the warnings, the table, and the other figures."""
    wraps = console.is_terminal
    for note in evaluation["notes"]:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False, soft_wrap=not wraps)
    if evaluation["datasets"]:
        head, *rows = counts.table(evaluation)
        caption = evaluation["convention"]
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        for place, name in enumerate(head):
            table.add_column(name, justify="right" if place else "left")
        for place, row in enumerate(rows, start=1 - len(rows)):
            table.add_row(*map(escape, row), end_section=place == -2, style="" if place else "bold")
        console.print(table)
    for line in lines(evaluation):
        console.print(escape(line), highlight=False, soft_wrap=not wraps)


def verdict(pooled: Counts, num_training_rows: int | None) -> str | None:
    """One honest sentence where the figures call for it: nothing drafted, or hardly anything accepted; else None."""
    length = pooled.acceptance_length
    if length is None:
        return "nothing was drafted, so there is no acceptance to report: no prompt got past its first token"
    if length >= 1.1:
        return None
    trained = "" if num_training_rows is None else f" The drafter was trained on {num_training_rows} rows."
    return (
        f"{pooled.num_accepted:.12g}/{pooled.num_draft_tokens:.12g} drafted tokens were accepted.{trained} "
        "A drafter needs thousands of its verifier's own answers: check how many it had, and whose they were."
    )
