"""How large the package is, and how many of its files one batch and one token pass through.

    .venv/bin/python scripts/structure.py           # a table
    .venv/bin/python scripts/structure.py --json    # one object on one line

`files` and `lines` count the Python of src/peagle. `circles` are groups of modules that import one another, at the
top or inside functions. `files_per_batch` and `files_per_token` are counted by tracing on a random verifier: the files whose code runs between reading one packed batch from a store and its gradients (one process, CPU, the training
loop after its first step), and while `Engine` drafts and verifies one token.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "peagle"


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


@contextmanager
def files_run() -> Iterator[set[str]]:
    """Collect the package's files whose functions are entered meanwhile, in all threads."""
    found: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            found.add(os.path.relpath(frame.f_code.co_filename, SOURCE))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


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
    if args.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        print(f"{name:24} {value}")
    for group in circles():
        print("circle:", ", ".join(group))
    return 0


if __name__ == "__main__":
    sys.exit(main())
