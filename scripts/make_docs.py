"""Write the generated part of the documentation: figures, and one page of flags per command, from the configs.

python scripts/make_docs.py            # write docs/config/*.md and docs/figures/*.svg
python scripts/make_docs.py --check    # exit 1 if docs/config is not what the configs say
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

from pydantic.fields import FieldInfo

from peagle.cli.main import COMMANDS, find
from peagle.config import LAST_PANELS, StageConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIG_DOCS = ROOT / "docs" / "config"


def values(annotation: object) -> str:
    """What a field takes, as readers say it: `one of a, b`, `integer`, `several paths`."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return " or ".join(dict.fromkeys(values(member) for member in members))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (tuple, list):
        inner = values(typing.get_args(annotation)[0])
        return f"several: {inner}"
    names = {int: "integer", float: "number", bool: "yes or no", str: "text", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))  # type: ignore[call-overload]


def default(field: FieldInfo) -> str:
    """A field's default as it would be typed."""
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is None or value == () or value == []:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        return f"`{' '.join(map(str, value))}`"
    return f"`{value}`"


def flag(key: str, field: FieldInfo) -> str:
    """How a field is written on the command line."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    if extra.get("positional"):
        return f"`{key.upper()}`"
    if key == "extra_args":
        return "`-- ...`"
    name = key.replace("_", "-")
    aliases = extra.get("aliases")
    others = "".join(f", `{alias}`" for alias in aliases) if isinstance(aliases, list) else ""
    return (f"`--{name}` / `--no-{name}`" if field.annotation is bool else f"`--{name}`") + others


def page(command: str, config_type: type[StageConfig], text: str) -> str:
    """The Markdown page of one command."""
    groups: dict[str, list[str]] = {}
    for key, field in config_type.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        panel = "Arguments" if extra.get("positional") else str(extra.get("panel", "Options"))
        meaning = re.sub(r"(?<![`\w-])(--[a-z][\w-]*)", r"`\1`", " ".join((field.description or "").split()))
        meaning = meaning.replace("|", "\\|")
        cells = (flag(key, field), values(field.annotation).replace("|", "\\|"), default(field), meaning)
        groups.setdefault(panel, []).append("| " + " | ".join(cells) + " |")
    out = [f"# peagle {command}", "", text, ""]
    out += [
        "<!-- Made by scripts/make_docs.py from the config of this command; edit the field's docstring there. -->",
        "",
    ]
    needed = [name for name, lines in groups.items() if any("| needed |" in line for line in lines)]
    place = list(groups).index
    order = sorted(groups, key=lambda n: (n != "Arguments", n not in needed, n in LAST_PANELS, place(n)))
    for name in order:
        out += [f"## {name}", "", "| flag | takes | default | meaning |", "|---|---|---|---|", *groups[name], ""]
    out += [
        "Every command also takes `--config FILE` (YAML with these settings, `_` for `-`; flags win over it),",
        "`--quiet` (warnings and errors only) and `--verbose`.",
        "",
    ]
    return "\n".join(out)


def index() -> str:
    """The page that lists the commands."""
    out = ["# Commands and their flags", "", "Made from the configs: `peagle COMMAND --help` says the same.", ""]
    panels: dict[str, list[str]] = {}
    for command, known in COMMANDS.items():
        first = (inspect.getdoc(find(known.config)) or "").split("\n\n")[0].replace("\n", " ")
        panels.setdefault(known.panel, []).append(f"| [`peagle {command}`]({command}.md) | {first} |")
    for panel, lines in panels.items():
        out += [f"## {panel}", "", "| command | does |", "|---|---|", *lines, ""]
    out += [
        "## Everywhere",
        "",
        "`--config FILE` reads settings from YAML (a run's own `run.yaml` too; flags win over it), `--quiet` prints "
        "only warnings and errors, `--verbose` adds the traceback of an error. Without a terminal, progress is a plain "
        "line now and then. `peagle --install-completion` completes commands and flags in your shell.",
        "",
        "## Exit status",
        "",
        "| status | means |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | a measurement failed its bar (a checkpoint that `check` refuses, answers that differ), or a bug |",
        "| 2 | something that you can fix; one line says what and how |",
        "| 130 | interrupted; the same command continues where it stopped |",
        "| 143 | `train` after SIGTERM: a checkpoint was saved |",
        "",
    ]
    return "\n".join(out)


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    found = {"index.md": index()}
    for command, known in COMMANDS.items():
        config_type = find(known.config)
        found[f"{command}.md"] = page(command, config_type, inspect.getdoc(config_type) or "")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    wanted = pages()
    if args.check:
        there = {path.name: path.read_text(encoding="utf-8") for path in CONFIG_DOCS.glob("*.md")}
        stale = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
        print(f"docs/config: {', '.join(stale) or 'nothing'} to be made again")
        return 1 if stale else 0
    CONFIG_DOCS.mkdir(parents=True, exist_ok=True)
    for path in CONFIG_DOCS.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (CONFIG_DOCS / name).write_text(text, encoding="utf-8")
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_figures.py"), str(ROOT / "docs" / "figures")], check=True
    )
    print(f"docs/config: {len(wanted)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
