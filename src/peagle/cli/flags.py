"""Flags made from a stage's config: `num_depths: int` becomes `--num-depths`, docstring and default its help."""

import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from peagle.cli.help import NEEDED, Command
from peagle.config import LAST_PANELS, StageConfig, read_yaml
from peagle.errors import ConfigError

EXTRA_ARGS = "extra_args"
"""A config field `extra_args: tuple[str, ...]` has no flag: it takes what follows `--`, word for word."""


def add_command(
    app: typer.Typer,
    name: str,
    config_type: type[StageConfig],
    run: Callable[[Any], int | None],
    panel: str,
    extra_args: tuple[str, ...] = (),
) -> None:
    """Add subcommand `name`: its flags are `config_type`'s fields, its help the config's docstring.

    Tuple fields take several values (`--ids 2 4 5`, `--ids 2,4,5` or repeated). `run` takes the built config, returns
    the exit status (None is 0); `extra_args` followed `--` on the command line.
    """

    def command(**given: Any) -> None:
        from peagle import log

        quiet, verbose = given.pop("quiet"), given.pop("verbose")
        config_file = given.pop("config")
        log.set_up(bool(quiet), bool(verbose))
        values = read_yaml(config_file) if config_file else {}
        if set(values) == {name} and isinstance(values[name], dict):
            values = values[name]  # a run.yaml written by an earlier run
        for key, value in given.items():
            if value is None or value == []:
                continue
            field = config_type.model_fields[key]
            is_positional = bool(_extra(field).get("positional"))
            # paths and hub names hold no comma
            if isinstance(value, list) and not _extra(field).get("whole"):
                value = [part for text in value for part in text.split(",") if part]
            # nothing said where something must be: `--endpoint "$UNSET"` must not mean "without an endpoint"
            if value == [] or (value == "" and (field.is_required() or is_positional)):
                raise ConfigError(f"{key.upper() if is_positional else _flag(key)} is given without a value")
            values[key] = value
        if extra_args:
            values[EXTRA_ARGS] = extra_args
        try:
            status = run(config_type.build(values))
        except KeyboardInterrupt:  # typer would make a silent status 130 of it
            raise typer.Abort() from None
        raise typer.Exit(status or 0)

    fields = {key: field for key, field in config_type.model_fields.items() if key != EXTRA_ARGS}
    first = {_panel(field) for field in fields.values() if field.is_required()}  # panels list what must be said first
    ordered = sorted(fields, key=lambda key: (_panel(fields[key]) not in first, _panel(fields[key]) in LAST_PANELS))
    parameters = [_parameter(key, fields[key]) for key in ordered]
    for key, kind, text in (
        ("config", Path | None, "YAML file with these settings; flags win over it."),
        ("quiet", bool | None, "Warnings and errors only."),
        ("verbose", bool | None, "Debug messages too."),
    ):
        parameters.append(_option(key, kind, [_flag(key)], text, "Output"))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = _unwrapped(inspect.getdoc(config_type) or "")
    app.command(name, rich_help_panel=panel, cls=Command)(command)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _panel(field: FieldInfo) -> str:
    return str(_extra(field).get("panel", "Options"))


def _parameter(key: str, field: FieldInfo) -> inspect.Parameter:
    annotation = _plain(field.annotation)
    kind = annotation if typing.get_origin(annotation) is list else annotation | None
    help_text = " ".join((field.description or "").split())
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if annotation is bool:
        help_text += f" (default: {'on' if default else 'off'})"
    elif default not in (None, (), [], ""):
        typed = " ".join(map(str, default)) if isinstance(default, (tuple, list)) else str(default)
        help_text += f" (default: {typed})"
    elif field.is_required():
        help_text += NEEDED
    if _extra(field).get("positional"):
        return _keyword(key, kind, typer.Argument(help=help_text, show_default=False))
    switch = f"{_flag(key)}/--no-{key.replace('_', '-')}" if annotation is bool else _flag(key)
    return _option(key, kind, [switch, *_extra(field).get("aliases", ())], help_text, _panel(field))


def _option(key: str, kind: Any, names: list[str], text: str, panel: str) -> inspect.Parameter:
    option = typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, metavar=_takes(kind))
    return _keyword(key, kind, option)


def _keyword(key: str, kind: Any, about: Any) -> inspect.Parameter:
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, about])


def _takes(kind: Any) -> str | None:
    """What a flag's value is called in `--help`; None for a flag without one."""
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    if typing.get_origin(kind) in (Union, types.UnionType):
        kind = members[0]
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    names = {bool: None, int: "N", float: "X", Path: "PATH"}
    return "TEXT ..." if typing.get_origin(kind) is list else names.get(kind, "TEXT")


def _plain(annotation: Any) -> Any:
    """The type that typer parses: optional types unwrapped, tuples as lists of text, `int | str` as text."""
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return _plain(members[0]) if len(members) == 1 else str
    if origin in (tuple, list):
        return list[str]
    if annotation is SecretStr:
        return str
    if origin is Literal or annotation in (int, float, str, bool, Path):
        return annotation
    raise TypeError(f"no flag for type {annotation}")


def _unwrapped(text: str) -> str:
    """Paragraphs as one line each, for the terminal to wrap; indented ones (examples) stay as they are."""
    parts = text.split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else " ".join(part.split()) for part in parts)


def spread(arguments: list[str], many: dict[str, set[str]]) -> list[str]:
    """Let flags of several values be written `--ids 2 4 5`, as argparse users expect: each further value gets its flag.

    `many` has each subcommand's flags that take several values. What follows `--` is untouched.
    """
    flags = next((many[a] for a in arguments if a in many), set())
    out: list[str] = []
    current: str | None = None
    fresh = False
    for index, argument in enumerate(arguments):
        if argument == "--":
            return out + arguments[index:]
        if argument.startswith("-") and not argument.lstrip("-").isdigit():
            current, fresh = (argument if argument in flags else None), True
        elif current is not None:
            if not fresh:
                out.append(current)
            fresh = False
        out.append(argument)
    return out


def split_extra(arguments: list[str], config_type: type[StageConfig]) -> tuple[list[str], tuple[str, ...]]:
    """What stands before `--`, and what stands after it, where the command takes such arguments."""
    if EXTRA_ARGS not in config_type.model_fields or "--" not in arguments:
        return arguments, ()
    at = arguments.index("--")
    return arguments[:at], tuple(arguments[at + 1 :])


def many_valued(config_type: type[StageConfig]) -> set[str]:
    """The flags of a config that take several values, aliases included."""
    flags: set[str] = set()
    for key, field in config_type.model_fields.items():
        extra = _extra(field)
        if key != EXTRA_ARGS and not extra.get("positional") and typing.get_origin(_plain(field.annotation)) is list:
            flags |= {_flag(key), *extra.get("aliases", ())}
    return flags
