"""`peagle demo`: run the shipped recipe `demo` on a laptop's CPU, and show what came out.

Only the verifier and the questions are shipped: the drafter starts from the verifier's last layers, and is measured on
questions that neither of the two was trained on. The recipe says with which settings.
"""

import json
import shutil
import statistics
import time
import timeit
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle import log
from peagle.errors import PeagleError
from peagle.pipeline.config import DemoConfig
from peagle.pipeline.recipe import STAGES, find, read
from peagle.pipeline.run import run_recipe


def demo(config: DemoConfig) -> int:
    """Run the recipe; returns the exit status of a stage that failed, else `verdict`."""
    began_s = time.monotonic()
    root = config.output
    asked = {
        "regenerate.max_samples": config.questions,
        "train.max_steps": config.steps,
        "train.seed": config.seed,
        "evaluate.max_samples": config.test_questions,
        "evaluate.output": root / "evaluation.json",
    }
    changes = tuple(f"{key}={json.dumps(value, default=str)}" for key, value in asked.items() if value is not None)
    recipe = read(find("demo"), root, changes)
    clear(root)
    # Single tokens of a model this small are decoded faster by one thread, with a drafter and without.
    num_threads = dict.fromkeys(STAGES, fastest_threads()) | {"evaluate": 1}
    status = run_recipe(recipe, None, num_threads)
    if status:
        return status
    figures = json.loads((root / "evaluation.json").read_text(encoding="utf-8"))
    show(figures, root, time.monotonic() - began_s, Console(highlight=False))
    return verdict(figures)


def clear(root: Path) -> None:
    """Remove what an earlier demo left; a PeagleError if the folder holds something that no demo made."""
    if root.is_dir() and any(root.iterdir()) and not (root / "demo.json").is_file():
        raise PeagleError(f"{root}: not empty, and no earlier demo made it; give another --output")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    (root / "demo.json").write_text('{"made_by": "peagle demo"}\n', encoding="utf-8")


def fastest_threads() -> int:
    """Threads with which this machine multiplies a training step's matrices fastest right now: all, or one.

    On cores that other programs use too, threads wait for each other at every operation, and one alone is faster.
    """
    import torch

    most = torch.get_num_threads()
    rows, weight = torch.randn(512, 192), torch.randn(192, 576)
    seconds = {}
    for count in {1, most}:
        torch.set_num_threads(count)
        step = timeit.Timer(lambda: torch.relu(rows @ weight) @ weight.t())
        seconds[count] = statistics.median(step.repeat(5, 60))
    torch.set_num_threads(most)
    return min(seconds, key=seconds.__getitem__)


def verdict(figures: dict[str, Any]) -> int:
    """0 if every answer was the verifier's own and both ways of counting agree, else 1."""
    lossless = figures["lossless"]
    return int(lossless["identical"] != lossless["checked"] or figures["replay"]["equal"] is not True)


def show(figures: dict[str, Any], root: Path, seconds: float, out: Console) -> None:
    """The end of the demo: what it means, and where the files are. The table and its proofs stand above."""
    length, speed = figures["pooled"]["acceptance_length"], figures["speed"]
    out.print()
    out.print(f"[bold]{length:.2f} tokens per verifier pass[/bold], where plain decoding writes 1.")
    ratio = speed["tokens_per_s"] / speed["plain_tokens_per_s"]
    rates = f"{speed['tokens_per_s']:.0f} tokens/s, plain decoding {speed['plain_tokens_per_s']:.0f}"
    out.print(f"[bold]{ratio:.2f} times as fast[/bold]: {rates}.")
    checked, same = figures["lossless"]["checked"], figures["lossless"]["identical"]
    count = f"all {checked} answers are" if same == checked else f"ONLY {same} of {checked} answers are"
    out.print(f"[bold]Lossless[/bold]: {count} identical, token by token, to what the verifier writes alone.")
    out.print()
    for name, about in (
        ("report/report.html", "all of it on one page"),
        ("evaluation.json", "the figures"),
        ("checkpoints/checkpoint_best", "the drafter; `peagle serve` takes it where vLLM is installed"),
        ("answers.jsonl", "the verifier's answers that it learned from"),
    ):
        out.print(f"  {root / name}  [dim]{about}[/dim]", soft_wrap=True)
    out.print(f"\nAll of it took {log.duration(seconds)}.")
