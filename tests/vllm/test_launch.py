from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from peagle.cli.main import main
from peagle.errors import ConfigError, EndpointError
from peagle.processes import ServerCommand
from peagle.verifier.model_config import load_verifier_config
from peagle.vllm import launch as vllm_launch
from peagle.vllm.client import normal_url
from peagle.vllm.launch import (
    InstalledVllm,
    LaunchConfig,
    detour_arguments,
    hands_out_states,
    launch_command,
    option,
    server_url,
)
from tests.fakes import tiny_verifier

ENGINE = InstalledVllm("0.32.0", "/opt/python", None)


def command(verifier: Path, *extra: str, ids: tuple[int, ...] = ()) -> ServerCommand:
    config = LaunchConfig(
        model=str(verifier), hidden_states_path=Path("/shm/states"), target_layer_ids=ids, extra_args=extra
    )
    return launch_command(config, load_verifier_config(str(verifier), False), ENGINE)


def json_of(made: ServerCommand, flag: str) -> dict:
    return json.loads(option(made.arguments, flag) or "")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier"))


def test_the_command_asks_for_the_default_layers_and_the_last(verifier: Path) -> None:
    made = command(verifier)
    spec = json_of(made, "--speculative-config")
    assert spec["method"] == "extract_hidden_states"
    assert spec["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5, 8]
    transfer = json_of(made, "--kv-transfer-config")
    assert transfer["kv_connector_module_path"] == "peagle_vllm_connector"
    assert transfer["kv_connector_extra_config"]["folder"] == "/shm/states/in-flight"
    assert made.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert made.environment["PYTHONPATH"].split(":")[0] == str(vllm_launch.PLUGIN_FOLDER)
    assert made.arguments[:5] == ("/opt/python", "-m", "vllm.entrypoints.cli.main", "serve", str(verifier))


def test_layers_asked_for_are_sorted_and_the_last_is_not_doubled(verifier: Path) -> None:
    spec = json_of(command(verifier, ids=(8, 6, 1, 3)), "--speculative-config")
    assert spec["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6, 8]


def test_the_server_listens_on_the_loopback_interface_unless_told_otherwise(verifier: Path) -> None:
    assert option(command(verifier).arguments, "--host") == "127.0.0.1"
    made = command(verifier, "--host", "0.0.0.0", "--port=9000", "--data-parallel-size", "2")
    assert [a for a in made.arguments if a.startswith(("--host", "--port"))] == ["--host", "--port=9000"]
    assert option(made.arguments, "--data-parallel-size") == "2"
    assert server_url(("--host", "0.0.0.0", "--port=9000")) == "http://127.0.0.1:9000"
    assert server_url(()) == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("--speculative-config", "{}"), "sets this itself"),
        (("--kv_transfer_config={}",), "sets this itself"),
        (("--pipeline-parallel-size", "2"), "need it to be 1"),
    ],
)
def test_arguments_that_cannot_work_are_refused(verifier: Path, extra: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command(verifier, *extra)


def test_dry_run_prints_the_command_and_starts_nothing(
    verifier: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_launch, "find_engine", lambda python: ENGINE)
    folder = tmp_path / "states"
    arguments = ["launch-vllm", str(verifier), "--hidden-states-path", str(folder), "--target-layer-ids", "1", "3", "6"]
    assert main([*arguments, "--dry-run", "--", "--port", "8001", "--max-model-len", "64"]) == 0
    printed = capsys.readouterr().out
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in printed
    assert "[1, 3, 6, 8]" in printed
    assert printed.strip().endswith("--host 127.0.0.1 --port 8001 --max-model-len 64")
    assert not folder.exists()


def test_without_vllm_the_line_says_how_to_get_it(
    verifier: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.vllm.launch.engine_here", lambda: None)
    assert main(["launch-vllm", str(verifier), "--hidden-states-path", "/nowhere"]) == 2
    assert 'pip install "peagle[vllm]"' in capsys.readouterr().err


def fake_package(folder: Path, **classes: str) -> InstalledVllm:
    """A vLLM of a few lines: architecture -> the bases of its class."""
    models = folder / "model_executor" / "models"
    models.mkdir(parents=True)
    entries = ", ".join(f'"{name}": ("zoo", "{name}")' for name in classes)
    (models / "registry.py").write_text(f"_MODELS: dict = {{{entries}}}\n")
    lines = ["from .interfaces import SupportsEagle3, SupportsPP", "from .base import Parent", "import torch.nn as nn"]
    lines += [f"class {name}({bases}): ..." for name, bases in classes.items()]
    (models / "zoo.py").write_text("\n".join(lines))
    (models / "base.py").write_text("from .interfaces import SupportsEagle3\nclass Parent(SupportsEagle3): ...\n")
    return InstalledVllm("0.32.0", "python", folder)


def test_F15_families_that_the_engine_cannot_read_get_the_detour_or_a_refusal(tmp_path: Path) -> None:
    engine = fake_package(
        tmp_path,
        GoodForCausalLM="nn.Module, SupportsPP, SupportsEagle3",
        ChildForCausalLM="Parent",
        OldForCausalLM="nn.Module, SupportsPP",
        OldForConditionalGeneration="nn.Module",
    )
    assert hands_out_states(engine, "GoodForCausalLM") is True
    assert hands_out_states(engine, "ChildForCausalLM") is True
    assert hands_out_states(engine, "OldForCausalLM") is False
    assert hands_out_states(engine, "NewForCausalLM") is None
    assert detour_arguments(engine, ("GoodForCausalLM",)) == []
    assert detour_arguments(engine, ("NewForCausalLM",)) == []
    assert json.loads(detour_arguments(engine, ("OldForCausalLM",))[1]) == {
        "architectures": ["TransformersForCausalLM"]
    }
    with pytest.raises(ConfigError, match=r"vLLM 0.32.0 has no EAGLE-3 support for OldForConditionalGeneration"):
        detour_arguments(engine, ("OldForConditionalGeneration",))


def test_a_server_that_ends_before_it_is_ready_is_an_error_and_one_that_hangs_too() -> None:
    ended = vllm_launch.start(ServerCommand((sys.executable, "-c", "raise SystemExit(3)"), {}), None)
    with pytest.raises(EndpointError, match="ended with status 3 before it was ready"):
        vllm_launch.wait_ready(ended, "http://127.0.0.1:9", 20.0)
    hangs = vllm_launch.start(ServerCommand((sys.executable, "-c", "import time; time.sleep(60)"), {}), None)
    with pytest.raises(EndpointError, match=r"not ready within 0\.2 s"):
        vllm_launch.wait_ready(hangs, "http://127.0.0.1:9", 0.2)
    vllm_launch.stop(hangs, 30.0)
    assert hangs.poll() is not None


def test_stopping_takes_the_children_too(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time, pathlib\n"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(c.pid)); time.sleep(60)"
    )
    process = vllm_launch.start(ServerCommand((sys.executable, "-c", code), {}), None)
    while not child.exists() or not child.read_text():
        time.sleep(0.05)
    vllm_launch.stop(process, 30.0)
    state = Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("https://host/v1/", "https://host"),
        (" http://[::1]:8000/ ", "http://[::1]:8000"),
    ],
)
def test_addresses_are_taken_with_or_without_v1(given: str, made: str) -> None:
    assert normal_url(given) == made


@pytest.mark.parametrize("given", ["", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(EndpointError, match="expected an address"):
        normal_url(given)
