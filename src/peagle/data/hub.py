"""Data sets by name: where the field's training and evaluation sets live on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from peagle.data.files import Numbered, without_nulls
from peagle.errors import DataError


@dataclass(frozen=True)
class HubSet:
    """One named data set. Its rows go through the same normaliser as local files."""

    hub_id: str
    config: str | None
    split: str
    parts: tuple[str, ...]
    """Files that are read as data sets of their own (`NAME.jsonl`), each a row in the evaluation table."""


BENCHMARK_PARTS = (
    "HumanEval",
    "math_reasoning",
    "qa",
    "question",
    "rag",
    "summarization",
    "tool_call",
    "translation",
    "writing",
)
"""The nine kinds of the published acceptance table; each file has a `prompt` column."""

SPEC_BENCH_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"

HUB_SETS: dict[str, HubSet] = {
    "sharegpt": HubSet("Aeala/ShareGPT_Vicuna_unfiltered", None, "train", ()),
    "ultrachat": HubSet("HuggingFaceH4/ultrachat_200k", None, "train_sft", ()),
    "gsm8k": HubSet("openai/gsm8k", "main", "train", ()),
    "humaneval": HubSet("openai/openai_humaneval", None, "test", ()),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", ()),
    "spec-bench": HubSet(SPEC_BENCH_URL, None, "train", ()),
    "speculator-benchmarks": HubSet("RedHatAI/speculator_benchmarks", None, "train", BENCHMARK_PARTS),
}
ALIASES = {
    "mt_bench": "mt-bench",
    "spec_bench": "spec-bench",
    "specbench": "spec-bench",
    "speculator_benchmarks": "speculator-benchmarks",
    "openai/gsm8k": "gsm8k",
    "openai/openai_humaneval": "humaneval",
    "redhatai/speculator_benchmarks": "speculator-benchmarks",
    "huggingfaceh4/ultrachat_200k": "ultrachat",
    "huggingfaceh4/mt_bench_prompts": "mt-bench",
    "aeala/sharegpt_vicuna_unfiltered": "sharegpt",
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class HubPart:
    """What one call of `datasets.load_dataset` loads."""

    source: str
    hub_id: str
    config: str | None
    split: str
    file: str | None


def hub_parts(name: str) -> list[HubPart] | None:
    """The parts of `sharegpt`, `gsm8k:test`, `speculator-benchmarks:qa`, `hf:org/set` or `org/set:split`; else None.

    Raises:
        DataError: a named set has no such part.
    """
    wanted, _, choice = name.removeprefix("hf:").partition(":")
    key = ALIASES.get(wanted.lower(), wanted.lower())
    known = HUB_SETS.get(key)
    if known is None:
        if not HUB_ID.fullmatch(wanted):
            return None
        return [HubPart(wanted.split("/")[1], wanted, None, choice or "train", None)]
    if not known.parts:
        return [HubPart(key, known.hub_id, known.config, choice or known.split, None)]
    if choice and choice not in known.parts:
        raise DataError(f"--data {name}: no part {choice!r}; {wanted} has {', '.join(known.parts)}")
    chosen = (choice,) if choice else known.parts
    return [HubPart(part, known.hub_id, known.config, known.split, f"{part}.jsonl") for part in chosen]


def read_hub(part: HubPart) -> Iterator[Numbered]:
    """Yield the rows of a hub data set; a local folder of the same name stands in for the hub.

    Raises:
        DataError: it cannot be loaded.
    """
    import datasets

    try:
        if part.hub_id.startswith("https://"):
            table = datasets.load_dataset("json", data_files=part.hub_id, split=part.split)
        elif part.file is not None:
            table = datasets.load_dataset(part.hub_id, data_files={part.split: part.file}, split=part.split)
        else:
            table = datasets.load_dataset(part.hub_id, part.config, split=part.split)
    except Exception as error:  # the hub client raises dozens of kinds: no network, no such set, no such split
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"--data {part.hub_id}: cannot be loaded from the hub ({type(error).__name__}: {reason[:200]}). "
            "Check the name and the network, or give a downloaded .jsonl or .parquet file."
        ) from None
    yield from rows_of(table)


def rows_of(table: Any) -> Iterator[Numbered]:
    """The rows of a `datasets.Dataset`, numbered from 1, null fields left out."""
    for number, row in enumerate(table, start=1):
        yield number, without_nulls(row)
