"""The house rule of the package: a room imports the hallway and the rooms above it, never one below."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src" / "peagle"
ROOMS = ["data", "verifier", "states", "layout", "drafter", "train", "engine", "evaluate", "serve", "road"]
ROOMS += ["api", "cli"]  # the two front doors: Python's and the terminal's
HALLWAY = {"config", "errors", "files", "log", "native", "products", "embedded"}


def imports(path: Path) -> set[str]:
    """The rooms and hallway modules of `peagle` that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "peagle":
                names = [f"peagle.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("peagle.")}
    return found - {"__version__"}


def test_each_room_imports_only_the_hallway_and_the_rooms_above_it():
    wrong = []
    for path in sorted(SRC.rglob("*.py")):
        room = path.relative_to(SRC).parts[0].removesuffix(".py")
        if room in {"__init__", "__main__"}:
            continue
        allowed = HALLWAY if room in HALLWAY else HALLWAY | set(ROOMS[: ROOMS.index(room) + 1])
        wrong += [f"{path.relative_to(SRC)} imports peagle.{name}" for name in sorted(imports(path) - allowed)]
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_room_that_has_its_place_in_the_order():
    folders = {path.name for path in SRC.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= set(ROOMS) | HALLWAY


def test_vllm_is_imported_only_in_its_homes_and_there_inside_functions():
    """The plugin is loaded by vLLM itself, so vLLM is there before it."""
    homes = ("verifier/vllm", "serve/", "road/doctor")
    for path in sorted(SRC.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        relative = path.relative_to(SRC).as_posix()
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            if not any(name.split(".")[0] == "vllm" for name in names):
                continue
            assert relative.startswith(homes), relative
            assert "vllm_plugin" in relative or node not in tree.body, f"{relative} imports vllm at its top"


def test_importing_the_layout_room_needs_only_torch():
    code = (
        "import sys, peagle.layout; "
        "print(sorted({'transformers', 'datasets', 'vllm', 'pydantic', 'typer'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
