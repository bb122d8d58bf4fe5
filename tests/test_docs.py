"""What README and docs say is true of the code: commands parse, links lead somewhere, flag tables equal the configs."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from peagle.cli.flags import add_command, many_valued, split_extra, spread
from peagle.cli.main import COMMANDS, find

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if "config" not in page.relative_to(ROOT).parts[:2]]


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.S | re.M)


def commands(page: Path) -> list[str]:
    """The shell commands of a page, continued lines joined, comments dropped."""
    found = []
    for block in blocks(page.read_text(encoding="utf-8"), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append(shlex.join(words))
    return found


def parse(arguments: list[str]) -> None:
    """Parse a `peagle` command line and build its config, as the program would, without running it."""
    name = arguments[0]
    assert name in COMMANDS, f"no such command: {name}"
    config_type = find(COMMANDS[name].config)
    built = []
    arguments, extra = split_extra(arguments, config_type)
    app = typer.Typer()
    app.callback()(lambda: None)
    add_command(app, name, config_type, lambda config: built.append(config), "x", extra)
    app(args=spread(arguments, {name: many_valued(config_type)}), standalone_mode=False)
    assert built


def peagle_arguments(command: str) -> list[str] | None:
    """What follows `peagle` in a command, under torchrun too; None for other programs."""
    words = shlex.split(command)
    if words[0] == "peagle":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1] == "peagle":
        return words[words.index("-m") + 2 :]
    return None


EXAMPLES = [(page, command) for page in WRITTEN for command in commands(page) if peagle_arguments(command)]


@pytest.mark.parametrize(("page", "command"), EXAMPLES, ids=[f"{p.relative_to(ROOT)}:{c[:60]}" for p, c in EXAMPLES])
def test_every_command_in_the_docs_parses(page, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text("verifier_name_or_path: a/b\ndata_path: x\nsave_path: y\n")
    parse(peagle_arguments(command))


@pytest.mark.parametrize("page", [p for p in WRITTEN if "docs" in p.parts], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_of_the_site_is_read_whole(page):
    """A code block of the site shows 82 columns; only a remark after a command may be cut off."""
    lines = [line for block in blocks(page.read_text(encoding="utf-8"), "bash") for line in block.splitlines()]
    assert not [line for line in lines if len(line.split("  #")[0].rstrip()) > 82]


def test_every_make_target_in_the_docs_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = {c.split()[1] for page in WRITTEN for c in commands(page) if c.startswith("make ")}
    assert named
    assert named <= targets


def test_flag_tables_equal_the_configs():
    made = load_script("make_docs")
    there = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "config").glob("*.md")}
    stale = sorted(n for n in made.pages().keys() | there.keys() if made.pages().get(n) != there.get(n))
    assert not stale, f"run `python scripts/make_docs.py`: {', '.join(stale)}"


def headings(page: Path) -> set[str]:
    """The anchors that a Markdown page offers."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    found = set()
    for title in re.findall(r"^#+\s+(.*)$", text, flags=re.M):
        plain = re.sub(r"[`*_]|\[(.*?)\]\(.*?\)", lambda m: m.group(1) or "", title).strip().lower()
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            assert re.match(r"https://[\w.-]+(/|$)", target), target
            continue
        name, _, anchor = target.partition("#")
        anchor = "" if anchor.startswith("only-") else anchor
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in headings(path), f"{target}: no such heading"


NAMED = re.compile(r"`([\w./-]+\.(?:py|sh|c)|[\w./]+/)`|`(peagle(?:\.\w+)+)`")
OF_OTHERS = ("vllm/utils/", "old/")  # a file of vLLM's, a folder of runs


@pytest.mark.parametrize(
    "page",
    [p for p in WRITTEN if p.name not in ("coming-from.md", "CHANGELOG.md")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_source_file_and_module_that_a_page_names_exists(page):
    """Files are named from the root, from src/peagle or, in notes about training, from its package."""
    source = ROOT / "src" / "peagle"
    bases = (ROOT, source, source / "train", ROOT / "benchmarks")
    missing = []
    for file, module in NAMED.findall(page.read_text(encoding="utf-8")):
        if module:  # a module, or a name in one
            parts = module.split(".")[1:]
            paths = [source.joinpath(*parts), source.joinpath(*parts[:-1])]
            if not any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths):
                missing.append(module)
        elif not file.startswith(OF_OTHERS) and not any((base / file).exists() for base in bases):
            missing.append(file)
    assert not missing


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    """Flag pages are linked from their index, design notes where they matter."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    entries = set(re.findall(r":\s+([\w./-]+\.md)$", text[text.index("nav:") :], flags=re.M))
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert entries <= pages
    assert {p for p in pages - entries if not p.startswith(("config/", "design/"))} == set()


def test_recipes_shown_in_the_docs_fit_the_configs(tmp_path):
    from peagle.pipeline.recipe import read, stages

    found = 0
    for page in WRITTEN:
        for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
            if "verifier:" in block and "output:" in block:
                (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(block)))
                stages(read(tmp_path / "recipe.yaml", None, ()))
                found += 1
    assert found


OURS = re.compile(r"`?(--[a-z0-9][a-z0-9-]*)")


def test_flags_on_our_side_of_the_migration_tables_exist():
    """Second column: ours. "the same" means that the flags of the first column exist here."""
    flags = set()
    for command in COMMANDS.values():
        fields = find(command.config).model_fields
        for key, field in fields.items():
            flags |= {f"--{key.replace('_', '-')}", f"--no-{key.replace('_', '-')}"}
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            flags |= set(extra.get("aliases", ()))
    wrong = []
    for line in (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if (
            not line.startswith("|")
            or len(cells) < 2
            or cells[0].startswith(("-", "Speculators", "SpecForge", "their"))
        ):
            continue
        text = cells[0] if cells[1].startswith("the same") else cells[1]
        wrong += [flag for flag in OURS.findall(text) if flag not in flags]
    assert not wrong
