"""Every step of `scripts/gpu_check.sh` runs here on a CPU, in small: no typo waits for a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peagle.cli.main import main
from scripts import gpu_check

ROOT = Path(__file__).parents[2]
TOY = gpu_check.Setting("cpu", toy=True)


@pytest.mark.parametrize("name", [name for name in gpu_check.WORKER if name != "step"])
def test_a_step_of_the_one_process(name: str):
    result = gpu_check.WORKER[name](TOY)
    assert result["ok"], result
    json.dumps(result)


def test_the_steps_at_8b_shapes_report_what_the_docs_need():
    result = gpu_check.WORKER["step"](TOY)
    chosen = result["block chosen"]
    assert {"seconds", "tokens_per_s", "peak_gb", "num_waits", "profile"} <= set(chosen)
    assert chosen["seconds"] > 0
    assert len(chosen["seconds_all"]) == 4
    assert chosen["profile"]["top_ms"]
    assert 0 <= chosen["profile"]["idle_share"] < 1
    assert result["block 64"]["block_slots"] == 64
    assert result["ok"]
    json.dumps(result)


def test_the_pipelines_commands_run(tmp_path):
    commands = gpu_check.commands(TOY, tmp_path)
    tests = commands.pop("tests")
    assert all((ROOT / part).is_dir() for part in tests if part.startswith("tests/"))
    assert set(commands) == set(gpu_check.commands(gpu_check.Setting("cuda", toy=False), tmp_path)) - {"tests"}
    for name, command in commands.items():
        assert command[:3] == [sys.executable, "-m", "peagle"]
        assert main(command[3:]) in (0, None), name
    assert (tmp_path / "evaluation.json").is_file()


def test_what_fails_or_takes_too_long_is_said_and_does_not_stop_the_rest(tmp_path, monkeypatch, capsys):
    python = [sys.executable, "-c"]
    table = {
        "tests": [*python, "print('no good'); raise SystemExit(3)"],
        "regenerate": [*python, "print('fine')"],
        "train": [*python, "import time; time.sleep(60)"],
        "evaluate": [*python, "print('never')"],
    }
    monkeypatch.setattr(gpu_check, "commands", lambda *_: table)
    report = gpu_check.Report(tmp_path / "gpu-check.json", TOY)
    began_s = time.monotonic()
    gpu_check.run_commands(TOY, tmp_path, report, began_s + 5.6)
    assert time.monotonic() - began_s < 20
    written = json.loads((tmp_path / "gpu-check.json").read_text())
    steps = written["steps"]
    assert steps["tests"]["status"] == 3
    assert steps["tests"]["end"] == ["no good"]
    assert steps["regenerate"]["ok"]
    assert steps["train"]["status"] == "out of time"
    assert steps["evaluate"]["error"].startswith("not run")
    assert report.num_failed == 3
    assert "vLLM" in written["serving"]
    assert "== tests: FAILED" in capsys.readouterr().out


def test_a_process_that_dies_leaves_what_it_had_said(tmp_path, monkeypatch):
    line = gpu_check.MARK + json.dumps({"step": "flex", "seconds": 1.0, "ok": True})
    (tmp_path / "fake.py").write_text(f"print({line!r}, flush=True)\nimport time\ntime.sleep(60)\n")
    monkeypatch.setattr(gpu_check, "__file__", str(tmp_path / "fake.py"))
    report = gpu_check.Report(tmp_path / "gpu-check.json", TOY)
    gpu_check.run_worker(TOY, tmp_path, report, 3.0)
    assert report.steps["flex"]["ok"]
    assert all("not finished" in report.steps[name]["error"] for name in ("graphs", "step", "bfloat16"))


def test_without_a_gpu_it_says_so(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = ["bash", "scripts/gpu_check.sh"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 2
    import os

    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
