"""`--help` fits its purpose: every command says what it does, flags are whole, grouped, and show their defaults."""

from __future__ import annotations

import errno
import io

import pytest

from peagle.cli.help import entry
from peagle.cli.main import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", ["60", "100"])
def test_help_of_every_command_is_whole_at_any_width(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: peagle {name}")
    assert "…" not in shown
    assert "PydanticUndefined" not in shown
    assert "--config PATH" in shown
    described = shown.split("\n\n")[1]
    assert len(described) > 20


def test_flags_stand_in_the_groups_of_their_config_and_show_defaults(capsys):
    main(["train", "--help"])
    shown = capsys.readouterr().out
    assert shown.index("\nPaths\n") < shown.index("\nOptimizer\n") < shown.index("\nOutput\n")
    assert "--loss-fn {kl_div,ce,tv}" in shown
    assert "--num-depths N" in shown
    assert "(default: 4)" in shown


def test_what_must_be_said_is_in_the_usage_and_marked(capsys):
    shown = {}
    for name in ("prepare", "check", "doctor", "report"):
        main([name, "--help"])
        shown[name] = capsys.readouterr().out
    assert shown["prepare"].startswith("Usage: peagle prepare --model TEXT --data TEXT ... [FLAGS]\n")
    assert shown["prepare"].count("(needed)") == 2
    assert shown["check"].startswith("Usage: peagle check CHECKPOINT [FLAGS]\n")
    assert shown["doctor"].startswith("Usage: peagle doctor [MODEL] [FLAGS]\n")
    assert shown["report"].startswith("Usage: peagle report FOLDERS ... [FLAGS]\n")
    assert main(["check"]) == 2
    assert "error: CHECKPOINT is needed" in capsys.readouterr().err
    assert main(["prepare"]) == 2
    assert "error: --model is needed; --data is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["extract", "--endpoint", "", "--output", "x", "--preprocessed-data", "x"], "--endpoint is given without"),
        (["prepare", "--model", "", "--data", "x"], "--model is given without a value"),
        (["prepare", "--model", "x", "--data", ""], "--data is given without a value"),
        (["check", ""], "CHECKPOINT is given without a value"),
    ],
)
def test_an_empty_value_is_not_taken_for_none(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_terminal_without_a_character_gets_its_number(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    monkeypatch.setattr("peagle.serve.check.check", lambda _config: print("z\u00e4hlt"))
    assert main(["check", "x"]) == 0
    assert shown.getvalue() == b"z\\xe4hlt\n"


def test_interrupted_says_how_to_go_on(capsys, monkeypatch):
    def interrupted(_config):
        raise KeyboardInterrupt

    monkeypatch.setattr("peagle.serve.check.check", interrupted)
    assert main(["check", "x"]) == 130
    assert "run the same command again" in capsys.readouterr().err


def test_what_the_file_system_refuses_is_one_line_and_our_own_faults_are_not(capsys, monkeypatch):
    refused = OSError(errno.EROFS, "Read-only file system", "/somewhere/out")

    def run(_config):
        raise refused

    monkeypatch.setattr("peagle.serve.check.check", run)
    assert main(["check", "x"]) == 2
    assert capsys.readouterr().err == (
        "peagle: error: /somewhere/out: read-only file system; choose a place that can be written\n"
    )
    refused = OSError(errno.EBADF, "Bad file descriptor")
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["check", "x"])


def test_a_long_name_puts_its_help_on_the_next_line():
    assert entry("--x", "short", 80) == "  --x" + " " * 33 + "short\n"
    lines = entry("--a-name-that-is-longer-than-the-column N", "help", 80).splitlines()
    assert lines[1].strip() == "help"


def test_the_list_of_commands_is_grouped(capsys):
    main(["--help"])
    shown = capsys.readouterr().out
    for panel in ("Start here", "Data", "Train", "Measure and serve"):
        assert f"\n{panel}\n" in shown
    for name in COMMANDS:
        assert f"\n  {name} " in shown
    assert main([]) == 2
    assert capsys.readouterr().out.strip() == shown.strip()


def test_a_wrong_flag_a_wrong_command_and_no_command_are_one_line_or_help(capsys):
    assert main(["train", "--no-such-flag"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["run", "--until", "x", "--recipe"]) == 2
    assert main(["--version"]) == 0
