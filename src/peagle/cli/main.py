"""`peagle` and `python -m peagle`: the list of subcommands, and the one place where errors become one line."""

from __future__ import annotations

import importlib
import io
import logging
import sys

import typer

import peagle
from peagle.cli.flags import add_command, many_valued, split_extra, spread
from peagle.cli.help import Commands
from peagle.errors import DiskError, PeagleError
from peagle.files import os_error_line

# Typer may bring its own copy of click (seen in 0.29), whose exceptions are other classes than click's.
_Abort, _Exit = typer.Abort, typer.Exit
_ClickException = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

# subcommand -> (module with `CONFIG` and `run`, help panel). A module is imported only when its command is asked for,
# or when all are listed: `peagle --help` must not take the seconds that torch takes.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("peagle.cli.demo", "Start here"),
    "doctor": ("peagle.cli.doctor", "Start here"),
    "run": ("peagle.cli.run", "Start here"),
    "prepare": ("peagle.cli.prepare", "Data"),
    "inspect": ("peagle.cli.inspect", "Data"),
    "regenerate": ("peagle.cli.regenerate", "Data"),
    "extract": ("peagle.cli.extract", "Data"),
    "launch-vllm": ("peagle.cli.launch_vllm", "Data"),
    "train": ("peagle.cli.train", "Train"),
    "convert": ("peagle.cli.convert", "Train"),
    "evaluate": ("peagle.cli.evaluate", "Measure and serve"),
    "report": ("peagle.cli.report", "Measure and serve"),
    "check": ("peagle.cli.check", "Measure and serve"),
    "serve": ("peagle.cli.serve", "Measure and serve"),
    "push": ("peagle.cli.push", "Measure and serve"),
}


def build(names: list[str], arguments: list[str]) -> tuple[typer.Typer, list[str]]:
    """The application with the named subcommands, and the command line as typer takes it.

    A flag of several values is repeated before each; what follows `--` has gone to the command that takes it.
    """
    app = typer.Typer(
        name="peagle",
        cls=Commands,
        help="Train, measure and serve P-EAGLE drafters for speculative decoding.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(asked: bool) -> None:
        if asked:
            print(peagle.__version__)
            raise typer.Exit()

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.", is_eager=True, callback=show_version
        ),
    ) -> None:
        pass

    many = {}
    for name in names:
        path, panel = COMMANDS[name]
        module = importlib.import_module(path)
        extra: tuple[str, ...] = ()
        if name in arguments:
            arguments, extra = split_extra(arguments, module.CONFIG)
        add_command(app, name, module.CONFIG, module.run, panel, extra)
        many[name] = many_valued(module.CONFIG)
    return app, spread(arguments, many)


def main(arguments: list[str] | None = None) -> int:
    """Run `peagle`; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = next((a for a in arguments if not a.startswith("-")), None)
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character gets its number, not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app, spread_out = build([asked] if asked in COMMANDS else list(COMMANDS), arguments)
        status = app(args=spread_out, prog_name="peagle", standalone_mode=False)
        return int(status or 0)
    except PeagleError as error:
        return _fail(str(error))
    except _Exit as error:
        return int(error.exit_code)
    except _ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message())  # strips the colours where there is no terminal
            return 2
        hint = f" (see `peagle {asked} --help`)" if asked in COMMANDS else " (see `peagle --help`)"
        return _fail(error.format_message() + hint)
    except (KeyboardInterrupt, _Abort):
        print("peagle: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, `head` for example, has seen enough
        return 0
    except OSError as error:
        line = os_error_line(error)
        if line is None:
            raise
        return _fail(str(DiskError(line)))


def _fail(message: str) -> int:
    logging.getLogger("peagle").debug("failed", exc_info=True)
    print(f"peagle: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
