"""How large the package is, and how many of its files one batch and one token pass through.

    .venv/bin/python scripts/structure.py           # a table
    .venv/bin/python scripts/structure.py --json    # one object on one line

`files` and `lines` count the Python of src/peagle. `circles` are groups of modules that import one another, at the
top or inside functions. `files_per_batch` and `files_per_token` are counted by tracing on a random verifier: the
distinct files whose code runs between reading one packed batch from a store and its gradients (one process, CPU, the
training loop after its first step), and while `Engine` drafts and verifies a pass.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "peagle"

# The functions between which files are counted, as FILE:NAME.
LOADING = "train/batches.py:lay_out"
STEP, TRAIN_STEP = "train/loop.py:_step", "train/step.py:train_step"
ENGINE_PASS = "engine/engine.py:_step"


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ["peagle", *path.relative_to(SOURCE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The package's modules that a file imports, at its top or inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return {name for name in found if name in known}


def circles() -> list[list[str]]:
    """Groups of modules of which each reaches each other by imports."""
    known = modules()
    direct = {name: imports(path, known) - {name} for name, path in known.items()}
    reached = {name: set(names) for name, names in direct.items()}
    changed = True
    while changed:
        changed = False
        for names in reached.values():
            more = set().union(*(reached[name] for name in names)) - names if names else set()
            names |= more
            changed |= bool(more)
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in known
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


class Trace:
    """Collects the package's files whose functions are entered, thread by thread, between one function's call and its
    return or another's.

    Args:
        windows: pairs of functions, as FILE:NAME: entering the first opens a window in that thread, and the
            return of the second closes it. A window counts when it is closed.
    """

    def __init__(self, windows: dict[str, str]) -> None:
        self._windows, self._open = windows, threading.local()
        self.closed: list[tuple[str, set[str]]] = []

    def __enter__(self) -> Trace:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(SOURCE)):
            return
        file = os.path.relpath(code.co_filename, SOURCE)
        function, opened = f"{file}:{code.co_name}", self._open.__dict__
        if event == "call":
            if function in self._windows and "files" not in opened:
                opened.update(name=function, files=set())
            if "files" in opened:
                opened["files"].add(file)
        elif "files" in opened and function == self._windows[opened["name"]]:
            self.closed.append((opened["name"], opened["files"]))
            opened.clear()


def batch_files(folder: Path) -> set[str]:
    """The files that one batch passes through from the store to its gradients, in `fit` after a first step."""
    from peagle.hidden_states.store import StoreReader, StoreSpec
    from peagle.hidden_states.writer import StoreWriter
    from peagle.train.loop import fit
    from peagle.train.sources import StoreRows
    from tests.train import problem

    rows = problem.rows(8)
    spec = StoreSpec(
        verifier="nowhere", verifier_fingerprint="", model_type="qwen3", num_layers=8, hidden_size=problem.HIDDEN,
        vocab_size=problem.VOCAB, aux_layer_ids=(1, 2, 3), dtype="float32", tokenizer_sha256="",
    )  # fmt: skip
    with StoreWriter.open(folder, spec, 1 << 20) as writer:
        for row in rows:
            writer.add(row)
        writer.finish()
    reader = StoreReader.open(folder)
    config = problem.config(total_seq_len=64, epochs=3, dtype="float32", attention="auto")
    rows_of = {which: StoreRows(reader, problem.MemoryRows(chosen).extents()) for which, chosen in
               {"train": rows[:6], "held_out": rows[6:]}.items()}  # fmt: skip
    # The data thread reads a pack and draws its layout; the loop's step ends with the gradients of its packs.
    with Trace({LOADING: LOADING, STEP: TRAIN_STEP}) as trace:
        fit(problem.drafter(), problem.verifier_head(), rows_of["train"], rows_of["held_out"], config, problem.ALONE,
            None, None, None)  # fmt: skip
    loaded = [files for name, files in trace.closed if name == LOADING]
    stepped = [files for name, files in trace.closed if name == STEP]
    assert len(loaded) > 2, f"{LOADING} is not the function that loads a pack"
    assert len(stepped) > 2, f"{STEP} and {TRAIN_STEP} are not the functions of a step"
    return set().union(*loaded[1:], *stepped[1:])


def token_files() -> set[str]:
    """The files that `Engine` passes through to draft and verify once, after a first pass."""
    import torch

    from peagle.engine import Engine, Request, Sampling
    from tests.engine.helpers import random_drafter
    from tests.fakes import tiny_model

    torch.manual_seed(0)
    model = tiny_model("qwen3")
    drafter = random_drafter(model)
    engine = Engine(model, drafter, num_speculative_tokens=3, eos_token_ids=(), sampling=Sampling(), batch_size=1)
    with Trace({ENGINE_PASS: ENGINE_PASS}) as trace:
        engine.generate([Request([5, 6, 7, 8], 12)])
    passes = [files for _, files in trace.closed]
    assert len(passes) > 2, f"{ENGINE_PASS} is not the function of an engine's pass"
    return set().union(*passes[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object on one line")
    parser.add_argument("--static", action="store_true", help="do not trace")
    args = parser.parse_args()
    texts = {path: path.read_text(encoding="utf-8").count("\n") for path in modules().values()}
    sizes: dict[str, int] = {}
    for path in texts:
        folder = path.relative_to(SOURCE).parts[0] if path.parent != SOURCE else "core"
        sizes[folder] = sizes.get(folder, 0) + 1
    figures: dict[str, Any] = {
        "files": len(texts),
        "lines": sum(texts.values()),
        "largest_package_files": dict(sorted(sizes.items(), key=lambda item: -item[1])[:5]),
        "circles": len(circles()),
    }
    passed: dict[str, set[str]] = {}
    if not args.static:
        sys.path[:0] = [str(ROOT), str(ROOT / "src")]
        with tempfile.TemporaryDirectory() as folder:
            passed["files_per_batch"] = batch_files(Path(folder) / "store")
        passed["files_per_token"] = token_files()
        figures |= {name: len(files) for name, files in passed.items()}
    if args.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        print(f"{name:24} {value}")
    for group in circles():
        print("circle:", ", ".join(group))
    for name, files in passed.items():
        print(f"{name}:", ", ".join(sorted(files)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
