"""FlexAttention's calls of a run, lowered as for a GPU. A few of them: `python -m tests.train.lowering 90` does all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.train.lowering import SHARED_MEMORY, Case

pytest.importorskip("triton", reason="Triton has no build for this system")
pytestmark = [pytest.mark.lowering, pytest.mark.slow]


def solved(cases: list[Case]) -> list[dict[str, Any]]:
    """The cases' answers from a process of their own: what it pretends holds for the whole of it."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "tests.train.lowering"],
        input=json.dumps([asdict(case) for case in cases]),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_R20_every_length_and_group_of_heads_lowers_for_an_h100():
    """Unpadded, 33 to 127 queries of four heads to a key head have no configuration of Inductor's decoding kernel."""
    shapes = [
        # heads, kv_heads, head_dim, queries, base pass, gradients
        (32, 8, 128, 90, False, True),
        (64, 8, 64, 20, False, False),
        (16, 8, 80, 127, True, True),
        (28, 4, 128, 33, False, False),
        (4, 4, 256, 1, False, False),
        (32, 8, 128, 700, True, False),
    ]
    names = ("heads", "kv_heads", "head_dim", "num_queries", "is_base", "with_grad")
    cases = [Case(capability=90, **dict(zip(names, shape))) for shape in shapes]
    for case, answer in zip(cases, solved(cases)):
        assert "error" not in answer, f"{case}: {answer['error']}"
        assert answer["parts"] == ["backward", "forward"][not case.with_grad :], case


def test_R20_a_card_with_99_kb_of_shared_memory_holds_the_kernels():
    """Inductor's own choices want 104 KB at a head size of 128, and 134 in the backward at 256."""
    shape = {"capability": 89, "heads": 32, "kv_heads": 8, "num_queries": 300, "is_compiled": True}
    cases = [
        Case(head_dim=128, with_grad=False, **shape),
        Case(head_dim=256, **shape),
    ]
    for case, answer in zip(cases, solved(cases)):
        assert "error" not in answer, f"{case}: {answer['error']}"
        assert len(answer["shared_memory"]) == 1 + case.with_grad
        assert max(answer["shared_memory"]) <= SHARED_MEMORY[89], case
