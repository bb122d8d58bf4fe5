from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from peagle.cli.main import main
from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.errors import CheckpointError, ConfigError
from peagle.processes import ServerCommand
from peagle.serve import launch
from peagle.serve.launch import ServeConfig, serve, serve_command
from peagle.vllm.launch import InstalledVllm, option
from tests.fakes import edit_config, tiny_verifier
from tests.serve.test_check import drafter_of

VLLM = InstalledVllm("0.32.0", "/opt/python", None)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier"), "qwen3", dtype="bfloat16")


@pytest.fixture
def folder(verifier: Path, tmp_path: Path) -> Path:
    drafter_checkpoint.save(drafter_of(verifier), tmp_path / "d", "bfloat16")
    return tmp_path / "d"


def command(folder: Path, *extra: str, tokens: int | None = None, engine: InstalledVllm = VLLM) -> ServerCommand:
    config = ServeConfig(checkpoint=str(folder), num_speculative_tokens=tokens, extra_args=extra)
    return serve_command(config, folder, engine, False)


def test_X12_a_checkpoint_becomes_a_method_and_a_parallel_flag(folder: Path, verifier: Path) -> None:
    made = command(folder, "--port", "9000")
    spec = json.loads(option(made.arguments, "--speculative-config") or "")
    assert spec == {
        "model": str(folder),
        "method": "eagle3",
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }
    assert made.arguments[:5] == ("/opt/python", "-m", "vllm.entrypoints.cli.main", "serve", str(verifier))
    assert made.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert option(made.arguments, "--host") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"needs 0\.28"):
        command(folder, engine=InstalledVllm("0.27.0", "", None))


def test_an_eagle3_checkpoint_is_served_without_the_parallel_flag(verifier: Path, tmp_path: Path) -> None:
    drafter = drafter_of(verifier, speculators_model_type="eagle3", mask_token_id=None)
    drafter_checkpoint.save(drafter, tmp_path / "e", "bfloat16")
    assert "parallel_drafting" not in str(command(tmp_path / "e", engine=InstalledVllm("0.20.0", "p", None)))


def test_X05_the_command_always_passes_the_number_of_tokens(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "peagle"):
        assert '"num_speculative_tokens": 3' in str(command(folder, tokens=3))
        assert not caplog.records
        assert '"num_speculative_tokens": 7' in str(command(folder, tokens=7))
    assert "trained for 4" in caplog.text
    for count in (0, -1):
        with pytest.raises(ConfigError, match="expected at least 1"):
            command(folder, tokens=count)


def test_vllms_own_speculative_flags_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="peagle serve sets this itself"):
        command(folder, "--speculative-config", "{}")


def test_what_the_check_refuses_is_not_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_engine", lambda python: VLLM)
    ran: list[ServerCommand] = []
    monkeypatch.setattr(launch, "exec_server", ran.append)
    assert serve(ServeConfig(checkpoint=str(folder))) == 0
    assert len(ran) == 1
    edit_config(folder, norm_before_residual=..., architectures=...)
    with pytest.raises(CheckpointError, match=r"architectures is None.*and 1 more: `peagle check"):
        serve(ServeConfig(checkpoint=str(folder)))
    assert serve(ServeConfig(checkpoint=str(folder), skip_check=True)) == 0
    assert len(ran) == 2


def test_dry_run_prints_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_engine", lambda python: VLLM)
    assert main(["serve", str(folder), "--dry-run", "--", "--max-model-len", "64", "--port", "1"]) == 0
    assert capsys.readouterr().out.strip().endswith("--host 127.0.0.1 --max-model-len 64 --port 1")
