"""Flags made from a config."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from peagle.cli.flags import add_command, split_extra
from peagle.config import StageConfig


class WithExtra(StageConfig):
    number: int = 1
    """A number."""
    extra_args: tuple[str, ...] = ()
    """The rest."""


def test_what_follows_the_dashes_goes_to_extra_args_word_for_word() -> None:
    before, extra = split_extra(["go", "--number", "3", "--", "--port", "1,2", "--", "x"], WithExtra)
    assert (before, extra) == (["go", "--number", "3"], ("--port", "1,2", "--", "x"))
    seen: list[WithExtra] = []
    app = typer.Typer()
    add_command(app, "go", WithExtra, seen.append, "Panel", extra)
    add_command(app, "other", WithExtra, seen.append, "Panel")
    assert CliRunner().invoke(app, before).exit_code == 0
    assert seen[0].extra_args == extra
    assert seen[0].number == 3
    assert "--extra-args" not in CliRunner().invoke(app, ["go", "--help"]).output
