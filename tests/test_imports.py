"""The order of the packages: each imports the core and the packages before it, never a later one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src" / "peagle"
# In the order in which they may import: a package imports the core and those before it.
PACKAGES = ["layout", "data", "verifier", "vllm", "hidden_states", "kernels", "drafter", "convert", "train", "engine"]
PACKAGES += ["regenerate", "evaluate", "report", "serve", "pipeline"]
PACKAGES += ["api", "cli"]  # Python's way in, and the terminal's
CORE = {"_version", "config", "errors", "files", "log", "processes", "embedded"}


def imports(path: Path) -> set[str]:
    """The packages and core modules of `peagle` that a file imports, at its top or inside functions."""
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


def test_each_package_imports_only_the_core_and_the_packages_before_it():
    wrong = []
    for path in sorted(SRC.rglob("*.py")):
        package = path.relative_to(SRC).parts[0].removesuffix(".py")
        if package in {"__init__", "__main__"}:
            continue
        allowed = CORE if package in CORE else CORE | set(PACKAGES[: PACKAGES.index(package) + 1])
        wrong += [f"{path.relative_to(SRC)} imports peagle.{name}" for name in sorted(imports(path) - allowed)]
    assert not wrong, "\n".join(wrong)


def test_every_package_has_its_place_in_the_order():
    folders = {path.name for path in SRC.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= set(PACKAGES) | CORE


def test_vllm_is_imported_only_in_its_package_and_there_inside_functions():
    """The plugin is loaded by vLLM itself, so vLLM is there before it."""
    for path in sorted(SRC.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        relative = path.relative_to(SRC).as_posix()
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            if not any(name.split(".")[0] == "vllm" for name in names):
                continue
            assert relative.startswith("vllm/"), relative
            assert "vllm/plugin" in relative or node not in tree.body, f"{relative} imports vllm at its top"


def test_importing_the_layout_needs_only_torch():
    code = (
        "import sys, peagle.layout; "
        "print(sorted({'transformers', 'datasets', 'vllm', 'pydantic', 'typer'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
