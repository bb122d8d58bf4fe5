"""Flags made from a stage's config: `num_depths: int` becomes `--num-depths`, docstring and default its help."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import typer
from pydantic.fields import FieldInfo

from peagle.cli.help import NEEDED, Command
from peagle.config import LAST_PANELS, StageConfig, read_yaml
from peagle.errors import ConfigError

EXTRA_ARGS = "extra_args"
"""A config field `extra_args: tuple[str, ...]` has no flag: it takes what follows `--`, word for word."""
_GLOBAL_PANEL = "Output"


def add_command(
    app: typer.Typer,
    name: str,
    config_type: type[StageConfig],
    run: Callable[[Any], int | None],
    panel: str,
    extra_args: tuple[str, ...] = (),
) -> None:
    """Add subcommand `name`: its flags are `config_type`'s fields, its help the config's docstring.

    Args:
        app: the typer application.
        name: the subcommand.
        config_type: the stage's config; tuple fields take several values (`--ids 2 4 5`, `--ids 2,4,5` or repeated).
        run: takes the built config, returns the exit status (None is 0).
        panel: the group under which `peagle --help` lists it.
        extra_args: what followed `--` on the command line, for the config's field of that name (vLLM's own flags).
    """

    def command(**given: Any) -> None:
        from peagle import log

        quiet, verbose = given.pop("quiet"), given.pop("verbose")
        config_file = given.pop("config")
        log.set_up(quiet, verbose)
        values = read_yaml(config_file) if config_file else {}
        if set(values) == {name} and isinstance(values[name], dict):
            values = values[name]  # a run.yaml written by an earlier run
        for key, value in given.items():
            if value is None or value == []:
                continue
            is_whole = bool(_extra(config_type.model_fields[key]).get("whole"))
            values[key] = _split(value) if isinstance(value, list) and not is_whole else value
            if _is_blank(values[key], config_type.model_fields[key]):
                raise ConfigError(f"{_named(key, config_type.model_fields[key])} is given without a value")
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
    parameters += [
        _option("config", Path | None, "--config", "YAML file with these settings; flags win over it.", _GLOBAL_PANEL),
        _option("quiet", bool, "--quiet", "Warnings and errors only.", _GLOBAL_PANEL, default=False),
        _option("verbose", bool, "--verbose", "Debug messages too.", _GLOBAL_PANEL, default=False),
    ]
    parameters.sort(key=lambda parameter: parameter.kind)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = _unwrapped(inspect.getdoc(config_type) or "")
    app.command(name, rich_help_panel=panel, cls=Command)(command)


def _is_blank(value: Any, field: FieldInfo) -> bool:
    """Whether nothing was said where something must be: `--endpoint "$UNSET"` must not mean "without an endpoint"."""
    return value == [] or (value == "" and (field.is_required() or bool(_extra(field).get("positional"))))


def _named(key: str, field: FieldInfo) -> str:
    """What a user types to give a field."""
    return key.upper() if _extra(field).get("positional") else "--" + key.replace("_", "-")


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _panel(field: FieldInfo) -> str:
    return str(_extra(field).get("panel", "Options"))


def _parameter(key: str, field: FieldInfo) -> inspect.Parameter:
    extra = _extra(field)
    annotation = _plain(field.annotation)
    help_text = " ".join((field.description or "").split())
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if annotation is bool:
        help_text += f" (default: {'on' if default else 'off'})"
    elif default not in (None, (), [], ""):
        help_text += f" (default: {_shown(default)})"
    elif field.is_required():
        help_text += NEEDED
    if extra.get("positional"):
        kind = annotation if typing.get_origin(annotation) is list else annotation | None
        argument = typer.Argument(help=help_text, show_default=False)
        annotated: Any = Annotated[kind, argument]
        return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotated)
    flag = "--" + key.replace("_", "-")
    if annotation is bool:
        flag += "/--no-" + key.replace("_", "-")
    kind = annotation if typing.get_origin(annotation) is list else annotation | None
    aliases = extra.get("aliases", [])
    names = [flag, *(str(alias) for alias in aliases)] if isinstance(aliases, list) else [flag]
    return _option(key, kind, names, help_text, _panel(field))


def _option(
    key: str, kind: Any, names: str | list[str], text: str, panel: str, default: Any = None
) -> inspect.Parameter:
    names = [names] if isinstance(names, str) else names
    option = typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, metavar=_takes(kind))
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


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
    if origin is Literal or annotation in (int, float, str, bool, Path):
        return annotation
    raise TypeError(f"no flag for type {annotation}")


def _shown(default: Any) -> str:
    """A default as it would be typed."""
    return " ".join(map(str, default)) if isinstance(default, (tuple, list)) else str(default)


def _unwrapped(text: str) -> str:
    """Paragraphs as one line each, for the terminal to wrap; indented ones (examples) stay as they are."""
    parts = text.split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else " ".join(part.split()) for part in parts)


def _split(values: list[str]) -> list[str]:
    """`["2,4", "5"]` to `["2", "4", "5"]`; paths and hub names hold no comma."""
    return [part for value in values for part in str(value).split(",") if part]


def spread(arguments: list[str], many: dict[str, set[str]]) -> list[str]:
    """Let flags of several values be written `--ids 2 4 5`, as argparse users expect.

    Args:
        arguments: the command line after the program's name.
        many: for each subcommand, its flags that take several values.

    Returns:
        The same command line with each further value given its flag again. What follows `--` is untouched.
    """
    if not arguments:
        return arguments
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
    found = set()
    for key, field in config_type.model_fields.items():
        extra = _extra(field)
        if key == EXTRA_ARGS or extra.get("positional") or typing.get_origin(_plain(field.annotation)) is not list:
            continue
        aliases = extra.get("aliases")
        found |= {"--" + key.replace("_", "-"), *(map(str, aliases) if isinstance(aliases, list) else ())}
    return found


def need(value: Any, flag: str) -> Any:
    """Return `value`, or refuse with the flag's name."""
    if value is None:
        raise ConfigError(f"{flag} is needed")
    return value
