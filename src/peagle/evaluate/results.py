"""What an evaluation says: the figures of evaluation.json, and from them Markdown and the lines on the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle import log
from peagle.evaluate import counts
from peagle.evaluate.compare import Comparison, Difference, LogitGap, dtype_name
from peagle.evaluate.counts import DatasetCounts, PassCounts, pool
from peagle.evaluate.decode import Decoded
from peagle.evaluate.replay_check import Agreement

_SHOWN = 10
# A drafter that was hardly trained may have none of a few drafts accepted; of so many, something is wrong.
_MANY_PASSES = 100


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Everything that was measured; what was not is None."""

    depth: int
    """Drafted tokens per pass."""
    datasets: Mapping[str, DatasetCounts]
    notes: Sequence[str]
    decoded: Decoded | None = None
    agreement: Agreement | None = None
    served: Mapping[str, Any] | None = None
    """Of a server: `tokens_per_s` over all its requests under way, and `by_concurrency`, see `served.under_load`."""

    @property
    def pooled(self) -> PassCounts:
        """Counts of all data sets together."""
        return pool((dataset.total for dataset in self.datasets.values()), self.depth)

    @property
    def differences(self) -> list[Difference]:
        """Answers that are not the verifier's own."""
        return [] if self.decoded is None else self.decoded.differences

    @property
    def is_sound(self) -> bool:
        """Something was drafted, and of many drafts something accepted; every compared answer is the verifier's own,
        and replay counts as decoding does; a half-precision pair is excused where its logits are within rounding."""
        drafts = self.pooled.num_drafts
        works = self.pooled.num_accepted > 0 or 0 < drafts < _MANY_PASSES
        is_lossless = all(one.gap.is_within_rounding for one in self.differences)
        return works and is_lossless and (not self.agreement or self.agreement.is_within_rounding)

    def figures(self) -> dict[str, Any]:
        """The measured part of evaluation.json; what was not measured is null."""
        return {
            **counts.report(self.datasets),
            "num_speculative_tokens": self.depth,
            "lossless": _lossless_figures(self.decoded),
            "replay": _replay_figures(self.agreement),
            "speed": _speed_figures(self.decoded.comparison if self.decoded else None, self.served),
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


def _lossless_figures(decoded: Decoded | None) -> dict[str, Any]:
    if decoded is None or not decoded.checked:
        return {"checked": None, "identical": None, "excused": None, "differences": []}
    shown = [
        {"prompt": decoded.checked[one.index], "position": one.position, "token": one.token, "own_token": one.own_token}
        for one in decoded.differences[:_SHOWN]
    ]
    return {
        "checked": len(decoded.checked),
        "identical": len(decoded.checked) - len(decoded.differences),
        **_gap_figures([one.gap for one in decoded.differences], shown),
    }


def _replay_figures(agreement: Agreement | None) -> dict[str, Any]:
    if agreement is None:
        return {"equal": None, "answers": None, "passes": None, "excused": None, "differences": []}
    names = ("row_id", "num_known", "decoded_ids", "replayed_ids")
    shown = [{name: getattr(one, name) for name in names} for one in agreement.disagreements[:_SHOWN]]
    return {
        "equal": agreement.equal,
        "answers": agreement.num_answers,
        "passes": agreement.num_passes,
        "differing": len(agreement.disagreements),
        "is_within_rounding": agreement.is_within_rounding,
        **_gap_figures([one.gap for one in agreement.disagreements], shown),
    }


def _gap_figures(gaps: Sequence[LogitGap], shown: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first differences, each with its gap, and how many of all are ties."""
    differences = [
        {**one, "logit_gap": gap.value, "is_tie": gap.is_tie, "is_within_rounding": gap.is_within_rounding}
        for one, gap in zip(shown, gaps)
    ]
    return {"excused": sum(gap.is_tie for gap in gaps), "differences": differences}


def _speed_figures(run: Comparison | None, served: Mapping[str, Any] | None) -> dict[str, Any]:
    if run is None:
        return {"tokens_per_s": None, "plain_tokens_per_s": None, "speedup": None, **(served or {})}
    engine, transformers = run.tokens_per_s["engine"], run.tokens_per_s["transformers"]
    by, best = "our engine without a drafter", engine
    if (transformers or 0.0) > (engine or 0.0):
        by, best = "Transformers' generate", transformers
    ours, steps = run.tokens_per_s["drafter"], run.laps.num_steps
    return {
        "tokens_per_s": ours,
        "plain_tokens_per_s": best,
        "plain_by": by,
        "speedup": ours / best if ours and best else None,
        "engine_tokens_per_s": engine,
        "transformers_tokens_per_s": transformers,
        "draft_ms_per_pass": 1e3 * run.laps.draft_s / steps if steps else None,
        "verify_ms_per_pass": 1e3 * run.laps.verify_s / steps if steps else None,
        "plain_ms_per_token": 1e3 / best if best else None,
        "compared_prompts": len(run.answers),
    }


# What people read. Each function takes the figures of evaluation.json.


def lines(evaluation: Mapping[str, Any]) -> list[str]:
    """Losslessness, replay and speed, a sentence each."""
    lossless, replay, speed = evaluation["lossless"], evaluation["replay"], evaluation["speed"]
    said = []
    pooled = evaluation["pooled"]
    if pooled.get("tokens_per_pass") is not None and pooled["acceptance_length"] is not None:
        without = pooled["passes_without_draft"]
        stood = f"; {without:,.0f} passes or more checked no draft" if without else ""
        said.append(
            f"tokens per pass: {pooled['tokens_per_pass']:.3f} reached the user, acceptance length "
            f"{pooled['acceptance_length']:.3f}{stood}"
        )
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
    for point in speed.get("by_concurrency", ()):  # the plain server's figures in brackets
        shown = {}
        for key, unit in (("tokens_per_s", " tokens/s"), ("ttft_ms", " ms"), ("itl_ms", " ms")):
            plain = point.get(f"plain_{key}")
            beside = "" if plain is None else f" ({plain:.1f})"
            shown[key] = ("-" if point[key] is None else f"{point[key]:.1f}") + unit + beside
        rate, plain_rate = point["tokens_per_s"], point.get("plain_tokens_per_s")
        times = f", {rate / plain_rate:.2f} times" if plain_rate else ""
        said.append(
            f"{point['concurrency']} at once: {shown['tokens_per_s']}{times}; first token {shown['ttft_ms']}, "
            f"between tokens {shown['itl_ms']}"
        )
    return said


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


def verdict(pooled: PassCounts, num_training_rows: int | None) -> str | None:
    """One honest sentence where the figures call for it: nothing drafted, nothing or hardly anything accepted."""
    length = pooled.acceptance_length
    if length is None:
        why = "no prompt got past its first token"
        if pooled.passes_without_draft:
            why = (
                f"{pooled.passes_without_draft:.12g} passes checked no draft. A server stops drafting at its length "
                "limit, for requests that its drafter does not serve, and at large batches where it was told so"
            )
        return f"nothing was drafted, so there is no acceptance to report: {why}"
    if length >= 1.1:
        return None
    if not pooled.num_accepted:
        rows = "hardly any training" if num_training_rows is None else f"training on {num_training_rows} rows only"
        return (
            f"0/{pooled.num_draft_tokens:.12g} drafted tokens were accepted. Likely causes, in this order: the dtype "
            "(float16 overflows where bfloat16 and float32 do not: try --dtype float32); another verifier, layer list "
            f"or mask token than it was trained with, or a damaged checkpoint (`peagle check`); {rows}"
        )
    trained = "" if num_training_rows is None else f" The drafter was trained on {num_training_rows} rows."
    return (
        f"{pooled.num_accepted:.12g}/{pooled.num_draft_tokens:.12g} drafted tokens were accepted.{trained} "
        "A drafter needs thousands of its verifier's own answers: check how many it had, and whose they were."
    )
