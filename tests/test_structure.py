"""The package's size, and how many files one batch and one token pass through: the limits that keep it readable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What was aimed at, with room for a twentieth. 23,000 lines and 13 files a batch were the aim before steps were planned
# in the data thread (train/blocks.py), losses had a kernel on GPUs, and rows, states and secrets were proved.
LIMITS = {"files": 132, "lines": 24_600, "files_per_batch": 14, "files_per_token": 8}


def test_the_package_stays_small_and_without_circles():
    run = subprocess.run([sys.executable, ROOT / "scripts" / "structure.py", "--json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    assert figures["circles"] == 0
    too_many = {name: figures[name] for name, limit in LIMITS.items() if figures[name] > 1.05 * limit}
    assert not too_many, f"limits are {LIMITS}"
