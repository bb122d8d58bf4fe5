"""`--help` of one command: flags whole, grouped by what they are for, each with what it takes and means."""

import shutil
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

NEEDED = " (needed)"
"""How the help of a parameter without a default ends."""
_NAMES_WIDTH = 34
_INDENT = 2
_COMMAND_WIDTH = 11


class Commands(TyperGroup):
    """The list of commands, grouped by what people do, in the same plain style as each command's help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, the commands with their first sentence, and the flags of `peagle` itself."""
        width = _width()
        formatter.write(f"Usage: {ctx.command_path} COMMAND [FLAGS]\n\n{textwrap.fill(self.help or '', width)}\n\n")
        panels: dict[str, list[Any]] = {}
        for command in self.commands.values():
            panels.setdefault(str(getattr(command, "rich_help_panel", None) or "Commands"), []).append(command)
        for panel, commands in panels.items():
            formatter.write(typer.style(panel, bold=True) + "\n")
            for command in commands:
                about = " ".join((command.help or "").split("\n\n")[0].split())
                formatter.write(entry(str(command.name), about, width, _COMMAND_WIDTH))
            formatter.write("\n")
        formatter.write(typer.style("Flags", bold=True) + "\n")
        for parameter in self.get_params(ctx):
            formatter.write(entry(", ".join(parameter.opts), _about(parameter), width))
        formatter.write(f"\n`{ctx.command_path} COMMAND --help` shows the flags of a command.\n")


class Command(TyperCommand):
    """A command whose help never cuts a flag's name, whatever the terminal's width."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description and the groups of flags."""
        width = _width()
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        shown = [names(p) if _is_needed(p) or p.nargs < 0 else f"[{names(p)}]" for p in arguments]
        shown += [f"{p.opts[0]} {p.metavar}" for p in self.params if p not in arguments and _is_needed(p)]
        usage = " ".join(["Usage:", ctx.command_path, *shown, "[FLAGS]"])
        formatter.write(textwrap.fill(usage, width, subsequent_indent="       ", break_on_hyphens=False) + "\n\n")
        for paragraph in (self.help or "").split("\n\n"):
            is_example = paragraph.startswith(" ")
            shown_as = paragraph.rstrip() if is_example else textwrap.fill(" ".join(paragraph.split()), width)
            formatter.write(shown_as + "\n\n")
        groups: dict[str, list[Any]] = {"Arguments": arguments} if arguments else {}
        for parameter in self.params:
            if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Output", []).append(parameter)
        groups["Output"] = groups.pop("Output", [])  # what every command has stands last
        for name, parameters in groups.items():
            if parameters:
                formatter.write(typer.style(name, bold=True) + "\n")
                for parameter in parameters:
                    formatter.write(entry(names(parameter), _about(parameter), width))
                formatter.write("\n")


def _about(parameter: Any) -> str:
    return getattr(parameter, "help", "") or ""


def _is_needed(parameter: Any) -> bool:
    return _about(parameter).endswith(NEEDED)


def names(parameter: Any) -> str:
    """How a parameter is typed: its names and, for a flag with a value, what it takes."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper() + (" ..." if parameter.nargs < 0 else "")
    is_off = _about(parameter).endswith("(default: off)")
    shown = ", ".join(parameter.opts) + ("" if is_off else "".join(f" / {name}" for name in parameter.secondary_opts))
    return f"{shown} {parameter.metavar or ''}".rstrip()


def _width() -> int:
    return max(60, min(110, shutil.get_terminal_size((100, 24)).columns))


def entry(left: str, text: str, width: int, names_width: int = _NAMES_WIDTH) -> str:
    """One flag or command: its help beside it if it fits, below it otherwise."""
    margin = " " * (_INDENT + names_width + 2)
    lines = textwrap.wrap(text, width - len(margin)) or [""]
    first = " " * _INDENT + left
    if len(left) <= names_width:
        first += " " * (names_width - len(left) + 2) + lines.pop(0)
    return "\n".join([first.rstrip(), *(margin + line for line in lines)]) + "\n"
