"""A key or a password is in no file, no log line, no error and no shown command; whoever needs it still gets it."""

import logging
import subprocess
import sys

import pytest
import yaml

from peagle import log
from peagle.cli.main import main
from peagle.config import ServerSettings
from peagle.errors import ConfigError, EndpointError, masked
from peagle.evaluate.config import EvaluateConfig
from peagle.hidden_states.config import ExtractConfig
from peagle.pipeline.recipe import read
from peagle.processes import ServerCommand
from peagle.regenerate.config import RegenerateConfig
from peagle.train.config import TrainConfig

KEY, PASSWORD = "sk-Kzq81Lm0", "pw-77Xy12Qa"
ADDRESS = f"http://user:{PASSWORD}@127.0.0.1:9/v1"
SETTINGS = {"api_key": KEY, "endpoint": (ADDRESS,)}
NEEDED = {
    RegenerateConfig: {"model": "m", "data": ("d",), "output": "o.jsonl"},
    ExtractConfig: {"preprocessed_data": "p", "output": "o"},
    TrainConfig: {"verifier_name_or_path": "v", "data_path": "d", "save_path": "s", "hidden_states": "online"},
    EvaluateConfig: {"checkpoint": "c", "data": ("d",), "concurrencies": (1,), "plain_endpoint": ADDRESS},
}


@pytest.mark.parametrize("kind", list(NEEDED), ids=lambda kind: kind.__name__)
def test_N09_no_config_writes_a_key_or_a_password(kind, tmp_path):
    config = kind.build({**NEEDED[kind], **SETTINGS})
    log.write_run(tmp_path, "stage", config, {})
    text = (tmp_path / "run.yaml").read_text() + repr(config) + str(config.model_dump(mode="json"))
    assert KEY not in text
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())["stage"]
    assert PASSWORD not in str(written)
    assert written["endpoint"] == ["http://user:***@127.0.0.1:9/v1"]
    # What asks the server has both.
    assert config.authorization == {"Authorization": f"Bearer {KEY}"}
    assert config.endpoint == (ADDRESS,)
    assert kind.build(config.model_dump()) == config


def test_N09_what_was_written_is_used_again_with_the_environments_help(monkeypatch):
    config = ServerSettings.build(SETTINGS)
    written = config.model_dump(mode="json")
    with pytest.raises(ConfigError, match="set PEAGLE_ENDPOINT_PASSWORD"):
        ServerSettings.build(written)
    for name, value in config.child_environment().items():
        monkeypatch.setenv(name, value)
    assert ServerSettings.build(written) == config
    assert ServerSettings.build({"api_key": "other"}).authorization == {"Authorization": "Bearer other"}


def test_N09_an_error_a_log_line_and_a_wrong_value_hide_it(caplog, capsys):
    ServerSettings.build(SETTINGS)
    assert KEY not in str(EndpointError(f"{ADDRESS}: refused {KEY}"))
    assert masked("https://hf_abc123@host/x http://a:b@c http://plain:80/x@y") == (
        "https://***@host/x http://a:***@c http://plain:80/x@y"
    )
    log.set_up(quiet=False, verbose=False)
    logging.getLogger("peagle.test").info("%s with %s", ADDRESS, KEY)
    said = capsys.readouterr().err
    assert "user:***@127.0.0.1" in said
    assert KEY not in said
    with pytest.raises(ConfigError) as caught:
        ServerSettings.build({"api_key": 918273645})
    assert "918273645" not in str(caught.value)


def test_N09_a_command_that_is_shown_hides_the_servers_own_key():
    command = ServerCommand(("vllm", "serve", "m", "--api-key", "k-1", "--hf-token=t-2", "--port", "8000"), {})
    assert "k-1" not in str(command)
    assert "t-2" not in str(command)
    assert "--port 8000" in str(command)
    assert command.arguments[4] == "k-1"


def test_N09_a_recipes_settings_hold_none(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"name: r\nverifier: embedded:verifier\noutput: {tmp_path}/out\n"
        f"regenerate:\n  data: [embedded:train]\n  api_key: {KEY}\n  endpoint: ['{ADDRESS}']\n"
    )
    from peagle.pipeline.plan import stages_until

    (stage, *_) = stages_until(read(recipe, None, ()), None)
    assert KEY not in str(stage.settings)
    assert PASSWORD not in str(stage.settings)
    assert stage.config.child_environment() == {"PEAGLE_API_KEY": KEY, "PEAGLE_ENDPOINT_PASSWORD": PASSWORD}


def test_N09_a_command_that_fails_prints_and_leaves_none(tmp_path, capsys):
    question = tmp_path / "q.jsonl"
    question.write_text('{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}\n')
    arguments = ["--model", "embedded:verifier", "--data", str(question), "--output", str(tmp_path / "a.jsonl")]
    arguments += ["--endpoint", ADDRESS, "--api-key", KEY, "--verbose"]
    assert main(["regenerate", *arguments]) == 2
    said = "".join(capsys.readouterr())
    files = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "nobody answers there" in said
    assert KEY not in said + files
    assert PASSWORD not in said + files


def test_N09_a_key_that_is_a_word_hides_no_text():
    ServerSettings.build({"api_key": "other"})
    assert masked("the verifier read other token ids") == "the verifier read other token ids"


def test_N09_help_names_the_variable():
    shown = subprocess.run([sys.executable, "-m", "peagle", "extract", "--help"], capture_output=True, text=True)
    assert "PEAGLE_API_KEY" in shown.stdout
