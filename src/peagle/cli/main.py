"""`peagle` and `python -m peagle`: the list of subcommands, and the one place where errors become one line."""

import importlib
import io
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from peagle._version import __version__
from peagle.cli.flags import add_command, many_valued, split_extra, spread
from peagle.cli.help import Commands
from peagle.errors import PeagleError, masked
from peagle.files import os_error_line

# Typer may bring its own copy of click (seen in 0.29), whose exceptions are other classes than click's.
_Abort, _Exit = typer.Abort, typer.Exit
_ClickException = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand's settings and its function are, as MODULE:NAME, imported only when they are needed.

    `peagle --help` must not take the seconds that PyTorch takes: a config module imports no torch.
    """

    config: str
    """The stage's config, whose docstring is the subcommand's help."""
    run: str
    """Takes the built config, returns the exit status."""
    panel: str
    """The group under which `peagle --help` lists it."""


COMMANDS = {
    "demo": Subcommand("peagle.pipeline.config:DemoConfig", "peagle.pipeline.demo:demo", "Start here"),
    "doctor": Subcommand("peagle.pipeline.config:DoctorConfig", "peagle.pipeline.doctor:doctor", "Start here"),
    "run": Subcommand("peagle.pipeline.config:RunConfig", "peagle.pipeline.run:run", "Start here"),
    "prepare": Subcommand("peagle.data.config:PrepareConfig", "peagle.data.prepare:prepare", "Data"),
    "inspect": Subcommand("peagle.data.config:InspectConfig", "peagle.data.inspect:inspect", "Data"),
    "regenerate": Subcommand("peagle.regenerate.config:RegenerateConfig", "peagle.regenerate.run:regenerate", "Data"),
    "extract": Subcommand("peagle.hidden_states.config:ExtractConfig", "peagle.hidden_states.extract:extract", "Data"),
    "launch-vllm": Subcommand("peagle.vllm.config:LaunchConfig", "peagle.vllm.launch:launch", "Data"),
    "train": Subcommand("peagle.train.config:TrainConfig", "peagle.train.run:main", "Train"),
    "convert": Subcommand("peagle.convert.config:ConvertConfig", "peagle.convert.convert:convert", "Train"),
    "evaluate": Subcommand(
        "peagle.evaluate.config:EvaluateConfig", "peagle.evaluate.run:evaluate", "Measure and serve"
    ),
    "report": Subcommand("peagle.report.config:ReportConfig", "peagle.report.report:report", "Measure and serve"),
    "check": Subcommand("peagle.serve.config:CheckConfig", "peagle.serve.check:check", "Measure and serve"),
    "serve": Subcommand("peagle.serve.config:ServeConfig", "peagle.serve.launch:serve", "Measure and serve"),
    "push": Subcommand("peagle.report.config:PushConfig", "peagle.report.hub:push", "Measure and serve"),
}


def find(name: str) -> Any:
    """What a `MODULE:NAME` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def build(names: list[str], arguments: list[str]) -> tuple[typer.Typer, list[str]]:
    """The application with the named subcommands, and the command line as typer takes it (`spread`, `split_extra`)."""
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
            print(__version__)
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
        command = COMMANDS[name]
        config_type = find(command.config)
        extra: tuple[str, ...] = ()
        if name in arguments:
            arguments, extra = split_extra(arguments, config_type)
        add_command(app, name, config_type, _later(command.run), command.panel, extra)
        many[name] = many_valued(config_type)
    return app, spread(arguments, many)


def _later(run: str) -> Callable[[Any], int | None]:
    return lambda config: find(run)(config)


def main(arguments: list[str] | None = None) -> int:
    """Run `peagle`; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = next((a for a in arguments if not a.startswith("-")), None)
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character gets its number, not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app, spread_out = build([asked] if asked in COMMANDS else list(COMMANDS), arguments)
        return int(app(args=spread_out, prog_name="peagle", standalone_mode=False) or 0)
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
        if line := os_error_line(error):
            return _fail(line)
        raise


def _fail(message: str) -> int:
    logging.getLogger("peagle").debug("failed", exc_info=True)
    print(f"peagle: error: {' '.join(masked(message).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
