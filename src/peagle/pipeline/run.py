"""`peagle run`: walk a recipe, skipping what is done, going on where a killed run stopped."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from peagle import log
from peagle.errors import ConfigError, PeagleError
from peagle.files import whole_file, write_json
from peagle.pipeline import plan as show_plan
from peagle.pipeline.config import RunConfig
from peagle.pipeline.recipe import RECIPES, Fingerprints, Recipe, Stage, Step, find, key_of, read, stages
from peagle.processes import Server, run_process, take_lock

logger = logging.getLogger(__name__)

STATE = "road.json"


def main(config: RunConfig) -> int:
    """What `peagle run` does: list recipes, print a plan, or walk the road."""
    if config.list_recipes or not config.recipe:
        for path in sorted(RECIPES.glob("*.yaml")):
            print(f"{path.stem:<22} {read(path, None, ()).description}")
        return 0 if config.list_recipes else need_recipe()
    if not config.dry_run:
        return walk(config)
    recipe = read(find(config.recipe), config.output, config.changes)
    steps = plan(recipe, config.until)
    found, rows = show_plan.estimates(recipe, steps)
    if config.json_output:
        print(json.dumps(show_plan.as_json(recipe, steps, found, rows), indent=2))
    else:
        console = Console()
        console.print(show_plan.table(recipe, steps, found, rows, console.width))
    return 0


def need_recipe() -> int:
    """Refuse to run nothing."""
    raise ConfigError("name a recipe file, or one of the shipped recipes above: `peagle run qwen3-8b --dry-run`")


def walk(config: RunConfig) -> int:
    """Run a recipe's stages in order.

    Returns:
        0, or the exit status of the stage that failed.
    """
    path = find(config.recipe)
    recipe = read(path, config.output, config.changes)
    todo = _until(stages(recipe), config.until)
    prints = Fingerprints(recipe.output / ".hashes.json")
    state = read_state(recipe.output)
    began_s = time.monotonic()
    ran = 0
    lock = take_lock(recipe.output)
    server = Server(recipe.verifier, recipe.output, recipe.server)
    try:
        for index, stage in enumerate(todo):
            step = plan_step(stage, todo[:index], state, prints, {})
            if step.action == "skip":
                logger.info("[%d/%d] %s: nothing to do (%s)", index + 1, len(todo), stage.name, step.why)
                continue
            logger.info("[%d/%d] %s: %s", index + 1, len(todo), stage.name, step.why)
            if step.action == "run":
                _move_aside(stage, state.get(stage.name, {}).get("key"))
            if stage.uses_server:
                status = server.start()
                if status:
                    return _stopped("launch-vllm", status)
            elif not any(later.uses_server for later in todo[index:]):
                server.stop()
            state[stage.name] = {"key": step.key, "status": "started"}
            write_json(recipe.output / STATE, state)
            stage_began_s = time.monotonic()
            status = _run_stage(recipe, stage, lock)
            if status:
                return _stopped(stage.name, status)
            state[stage.name] = {
                "key": step.key,
                "status": "done",
                "made": prints.of(stage.output),
                "seconds": round(time.monotonic() - stage_began_s, 1),
            }
            write_json(recipe.output / STATE, state)
            prints.save()
            ran += 1
    finally:
        server.stop()
        prints.save()
        os.close(lock)
    spent = log.duration(time.monotonic() - began_s)
    done = f"{ran} stages run, {len(todo) - ran} up to date"
    logger.info("%s: %s, %s; everything is in %s", recipe.name, done, spent, recipe.output)
    return 0


def plan(recipe: Recipe, until: str | None) -> list[Step]:
    """What a run would do now, nothing changed."""
    todo = _until(stages(recipe), until)
    prints = Fingerprints(recipe.output / ".hashes.json")
    state = read_state(recipe.output)
    actions: dict[str, str] = {}
    found = []
    for index, stage in enumerate(todo):
        step = plan_step(stage, todo[:index], state, prints, actions)
        actions[stage.name] = step.action
        found.append(step)
    return found


def plan_step(
    stage: Stage, earlier: Sequence[Stage], state: dict[str, Any], prints: Fingerprints, actions: dict[str, str]
) -> Step:
    """Decide about one stage.

    Args:
        stage: the stage.
        earlier: the stages before it.
        state: `road.json`.
        prints: hashes of files.
        actions: what is planned for the earlier stages; empty when they have run already.
    """
    pending = [s.name for s in earlier if actions.get(s.name, "skip") != "skip" and _reads(stage, s)]
    if pending:
        return Step(stage, None, "run", "after " + ("all of them" if stage.name == "report" else " and ".join(pending)))
    inputs = {}
    for name in stage.inputs:
        digest = prints.of(Path(name))
        inputs[name] = digest if digest is not None else "by name"
    key = key_of(stage.name, stage.settings, inputs, stage.root)
    known = state.get(stage.name, {})
    if not known:
        return Step(stage, key, "run", "not done yet")
    if known.get("key") != key:
        return Step(stage, key, "run", "its settings or what it reads have changed")
    if known.get("status") != "done":
        return Step(stage, key, "resume", "goes on where it stopped")
    made = prints.of(stage.output)
    if made is None:
        return Step(stage, key, "run", f"{stage.output} is gone")
    if made != known.get("made"):
        return Step(stage, key, "run", f"{stage.output} was changed since")
    return Step(stage, key, "skip", "up to date")


def read_state(output: Path) -> dict[str, Any]:
    """What earlier runs did; empty if there was none."""
    try:
        state = json.loads((output / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def stage_command(recipe: Recipe, stage: Stage, settings_file: Path) -> list[str]:
    """The command line of one stage: the same command that a user would type."""
    python = [sys.executable, "-m"]
    if stage.name == "train" and recipe.processes > 1:
        python += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(recipe.processes), "-m"]
    quiet = [] if logger.isEnabledFor(logging.INFO) else ["--quiet"]
    return [*python, "peagle", stage.name, "--config", str(settings_file), *quiet]


def _run_stage(recipe: Recipe, stage: Stage, lock: int) -> int:
    """Run a stage as its own process, so that its memory is free when it ends."""
    settings_file = recipe.output / "settings" / f"{stage.name}.yaml"
    with whole_file(settings_file) as temporary:
        temporary.write_text(yaml.safe_dump(stage.settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return run_process(stage_command(recipe, stage, settings_file), lock)


def _stopped(stage: str, status: int) -> int:
    """Say which stage stopped the road; its own message stands above. The shell's number for a signal."""
    logger.error("stage `%s` stopped with status %d; the same command goes on from here", stage, status)
    return 128 - status if status < 0 else status


def _until(found: list[Stage], until: str | None) -> list[Stage]:
    if until is None:
        return found
    names = [stage.name for stage in found]
    if until not in names:
        raise PeagleError(f"--until {until}: the recipe has no such stage; it has {', '.join(names)}")
    return found[: names.index(until) + 1]


def _reads(stage: Stage, earlier: Stage) -> bool:
    """Whether a stage reads what an earlier one makes (a report reads everything)."""
    made = earlier.output.resolve()
    return stage.name == "report" or any(made in (Path(i).resolve(), *Path(i).resolve().parents) for i in stage.inputs)


def _move_aside(stage: Stage, old_key: str | None) -> None:
    """Keep what an earlier, different run of a stage made, out of the way: its own resuming must not mix the two."""
    if stage.name in ("check", "report") or not stage.output.exists():
        return
    base = stage.output.parent / "old" / f"{stage.output.name}-{(old_key or 'unknown')[:8]}"
    target, number = base, 1
    while target.exists():
        number += 1
        target = base.with_name(f"{base.name}-{number}")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(str(stage.output), str(target))
    logger.info("%s: what was there before is now in %s", stage.name, target)
