"""`peagle demo`: the whole road on the embedded verifier, measured and proved, on a laptop's CPU.

The same functions as the commands, one after the other. Only the verifier and the questions are shipped: the drafter
starts from its last layers, and is measured on questions that neither of the two was trained on.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle import embedded, log
from peagle.errors import PeagleError
from peagle.pipeline.config import DemoConfig

logger = logging.getLogger(__name__)

NUM_DEPTHS = 4
ANSWER_LIMIT = 200
# Single tokens of a model this small are decoded faster by one thread, with a drafter and without.
ONE_THREAD = ("evaluate",)
# In a run of minutes Muon is ahead of the default in time, if not in multiply-adds (docs/recipe.md).
OPTIMIZER = {"optimizer": "muon", "lr": 1.6e-3}


@dataclass(frozen=True)
class Places:
    """Where the demo puts things."""

    root: Path

    @property
    def answers(self) -> Path:
        """The verifier's answers to the train questions."""
        return self.root / "answers.jsonl"

    @property
    def prepared(self) -> Path:
        """Their token rows."""
        return self.root / "prepared"

    @property
    def states(self) -> Path:
        """Their hidden states."""
        return self.root / "hidden_states"

    @property
    def checkpoints(self) -> Path:
        """The drafter."""
        return self.root / "checkpoints"

    @property
    def report(self) -> Path:
        """The page about it."""
        return self.root / "report"


def demo(config: DemoConfig) -> int:
    """Walk the road.

    Returns:
        0, or 1 if an answer differed from the verifier's own or replay counted otherwise than decoding.
    """
    out = Console(stderr=True, highlight=False)
    began_s = time.monotonic()
    at = Places(config.output)
    clear(at.root)
    stages: list[tuple[str, str, Callable[[], Any]]] = [
        ("regenerate", f"the verifier answers {config.questions} questions itself", lambda: _regenerate(config, at)),
        ("prepare", "its answers become token rows with a loss mask", lambda: _prepare(at)),
        ("extract", "its hidden states on them are stored", lambda: _extract(at)),
        ("train", f"a drafter learns to draft {NUM_DEPTHS} tokens at once", lambda: _train(config, at)),
        ("evaluate", f"it is measured on {config.test_questions} questions new to both", lambda: _evaluate(config, at)),
        ("report", "everything on one page", lambda: _report(at)),
    ]
    fastest = fastest_threads()
    for number, (name, about, run) in enumerate(stages, start=1):
        out.print(f"[bold][{number}/{len(stages)}] {name}[/bold]: {about}")
        stage_began_s = time.monotonic()
        with threads(1 if name in ONE_THREAD else fastest):
            run()
        out.print(f"      [dim]{log.duration(time.monotonic() - stage_began_s)}[/dim]")
    figures = json.loads((at.root / "evaluation.json").read_text(encoding="utf-8"))
    show(figures, at, time.monotonic() - began_s, Console(highlight=False))
    return verdict(figures)


def fastest_threads() -> int:
    """Threads with which this machine does a training step's products fastest right now: all, or one.

    On cores that other programs use too, threads wait for each other at every operation, and one alone is faster.
    """
    import torch

    most = torch.get_num_threads()
    rows, weight = torch.randn(512, 192), torch.randn(192, 576)
    seconds = {}
    for count in {1, most}:
        with threads(count):
            rounds = []
            for _ in range(5):
                began_s = time.perf_counter()
                for _ in range(60):
                    torch.relu(rows @ weight) @ weight.t()
                rounds.append(time.perf_counter() - began_s)
            seconds[count] = sorted(rounds)[2]
    return min(seconds, key=seconds.__getitem__)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clear(root: Path) -> None:
    """Remove what an earlier demo left, and nothing else.

    Raises:
        PeagleError: the folder holds something that no demo made.
    """
    if root.is_dir() and any(root.iterdir()) and not (root / "demo.json").is_file():
        raise PeagleError(f"{root}: not empty, and no earlier demo made it; give another --output")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    (root / "demo.json").write_text('{"made_by": "peagle demo"}\n', encoding="utf-8")


def _regenerate(config: DemoConfig, at: Places) -> None:
    from peagle.regenerate.config import RegenerateConfig
    from peagle.regenerate.run import regenerate

    regenerate(
        RegenerateConfig.build(
            {
                "model": str(embedded.VERIFIER),
                "data": ["gsm8k=embedded:train"],
                "output": at.answers,
                "max_samples": config.questions,
                "max_new_tokens": ANSWER_LIMIT,
                "batch_size": 64,
                "dtype": "float32",
            }
        )
    )


def _prepare(at: Places) -> None:
    from peagle.data.config import PrepareConfig
    from peagle.data.prepare import prepare

    settings = {"model": str(embedded.VERIFIER), "data": [str(at.answers)], "output": at.prepared, "seq_length": 1024}
    prepare(PrepareConfig.build(settings))


def _extract(at: Places) -> None:
    from peagle.hidden_states.config import ExtractConfig
    from peagle.hidden_states.extract import extract

    settings = {"preprocessed_data": at.prepared, "output": at.states, "dtype": "float32", "validate_outputs": True}
    extract(ExtractConfig.build(settings))


def _train(config: DemoConfig, at: Places) -> None:
    from peagle.train.config import TrainConfig
    from peagle.train.run import train

    train(
        TrainConfig.build(
            {
                "verifier_name_or_path": str(embedded.VERIFIER),
                "data_path": at.prepared,
                "hidden_states_path": at.states,
                "save_path": at.checkpoints,
                "num_layers": 2,
                "num_depths": NUM_DEPTHS,
                "total_seq_len": 1024,
                "batch_size": 1,
                "epochs": 100,
                "max_steps": config.steps,
                **OPTIMIZER,
                "checkpoint_freq": 100,
                "train_data_ratio": 0.98,
                "save_dtype": "float32",
                "seed": config.seed,
            }
        )
    )


def _evaluate(config: DemoConfig, at: Places) -> None:
    from peagle.evaluate.config import EvaluateConfig
    from peagle.evaluate.run import evaluate

    evaluate(
        EvaluateConfig.build(
            {
                "checkpoint": str(at.checkpoints / "checkpoint_best"),
                "mode": "both",
                "data": ["gsm8k=embedded:test"],
                "output": at.root,
                "num_speculative_tokens": NUM_DEPTHS,
                "max_samples": config.test_questions,
                "max_new_tokens": ANSWER_LIMIT,
                "compare_samples": min(16, config.test_questions),
                "dtype": "float32",
            }
        )
    )


def _report(at: Places) -> None:
    from peagle.report.config import ReportConfig
    from peagle.report.report import report

    report(ReportConfig.build({"folders": [str(at.root)], "output": at.report, "title": "The demo's drafter"}))


def verdict(figures: dict[str, Any]) -> int:
    """0 if every answer was the verifier's own and both ways of counting agree, else 1."""
    lossless = figures["lossless"]
    return int(lossless["identical"] != lossless["checked"] or figures["replay"]["equal"] is not True)


def show(figures: dict[str, Any], at: Places, seconds: float, out: Console) -> None:
    """The end of the demo: what it means, and where the files are. The table and its proofs stand above."""
    length, speed = figures["pooled"]["acceptance_length"], figures["speed"]
    out.print()
    out.print(f"[bold]{length:.2f} tokens per verifier pass[/bold], where plain decoding writes 1.")
    ratio = speed["tokens_per_s"] / speed["plain_tokens_per_s"]
    rates = f"{speed['tokens_per_s']:.0f} tokens/s, plain decoding {speed['plain_tokens_per_s']:.0f}"
    out.print(f"[bold]{ratio:.2f} times as fast[/bold]: {rates}.")
    checked, same = figures["lossless"]["checked"], figures["lossless"]["identical"]
    told = f"all {checked} answers are" if same == checked else f"ONLY {same} of {checked} answers are"
    out.print(f"[bold]Lossless[/bold]: {told} identical, token by token, to what the verifier writes alone.")
    out.print()
    for path, about in (
        (at.report / "report.html", "all of it on one page"),
        (at.root / "evaluation.json", "the figures"),
        (at.checkpoints / "checkpoint_best", "the drafter; `peagle serve` takes it where vLLM is installed"),
        (at.answers, "the verifier's answers that it learned from"),
    ):
        out.print(f"  {path}  [dim]{about}[/dim]", soft_wrap=True)
    out.print(f"\nThe whole road took {log.duration(seconds)}.")
