"""Real vLLM (its CPU build is enough): run with `.venv-vllm/bin/python -m pytest -m vllm tests/vllm/real`.

Every process has one thread, engines run one after another in forked children, servers one at a time.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle import embedded

ROOT = Path(__file__).resolve().parents[3]


def why_not() -> str | None:
    """Why these tests cannot run, or None."""
    if importlib.util.find_spec("vllm") is not None:
        return None
    note = ROOT / ".venv-vllm" / ".cannot-install"
    if note.exists():
        return f"vLLM cannot be installed here: {note.read_text().strip()}"
    return "vLLM is not installed beside this Python; run scripts/setup_vllm.sh and use .venv-vllm/bin/python"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(3600))
            if reason and not os.environ.get("CI"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    reason = why_not()
    if reason:
        pytest.fail(f"in CI these tests are never skipped: {reason}")
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def work() -> Iterator[Path]:
    """A folder on a memory disk, if there is one."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="peagle-") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def engines(work: Path) -> Iterator[object]:
    from tests.vllm.support.engines import Engines

    made = Engines(work / "vllm.log")
    yield made
    made.close()


@pytest.fixture(scope="session")
def verifier() -> Path:
    """The embedded verifier; PEAGLE_TEST_VERIFIER names another."""
    found = Path(os.environ.get("PEAGLE_TEST_VERIFIER", embedded.VERIFIER))
    if not (found / "config.json").exists():
        pytest.fail(f"{found}: no verifier there")
    return found


def questions(file: Path, count: int, output: Path) -> Path:
    """The first `count` questions as a file of their own, as prompts."""
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    made = [{"id": json.loads(line)["id"], "prompt": json.loads(line)["question"]} for line in lines]
    output.write_text("".join(json.dumps(line) + "\n" for line in made), encoding="utf-8")
    return output
