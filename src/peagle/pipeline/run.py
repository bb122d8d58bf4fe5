"""`peagle run`: run a recipe's stages in order, skip what is done, go on where a killed run stopped."""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import yaml
from rich.console import Console

from peagle import log
from peagle.config import ServerSettings
from peagle.errors import ConfigError, EndpointError
from peagle.files import whole_file, write_json
from peagle.pipeline import plan as plans
from peagle.pipeline.config import RunConfig
from peagle.pipeline.recipe import RECIPES, Recipe, Stage, find, read, server_config
from peagle.processes import ServerCommand, run_process, start, stop, take_lock, wait_ready

logger = logging.getLogger(__name__)

_STOP_WAIT_S = 60.0  # launch-vllm takes up to 40 to stop its own server


def run(config: RunConfig) -> int:
    """List recipes, print a plan, or run a recipe; 0, or the exit status of the stage that failed."""
    if config.list_recipes or not config.recipe:
        for path in sorted(RECIPES.glob("*.yaml")):
            print(f"{path.stem:<22} {read(path, None, ()).description}")
        if not config.list_recipes:
            advice = "name a recipe file, or one of the shipped recipes above"
            raise ConfigError(f"{advice}: `peagle run qwen3-8b --dry-run`")
        return 0
    recipe = read(find(config.recipe), config.output, config.changes)
    if config.dry_run:
        steps = plans.estimated(recipe, plans.plan(recipe, config.until))
        if config.json_output:
            print(json.dumps(plans.as_json(recipe, steps), indent=2))
        else:
            console = Console()
            console.print(plans.table(recipe, steps, console.width))
        return 0
    status = run_recipe(recipe, config.until, {})
    if status:
        logger.error("the same command goes on from there")
    else:
        logger.info("%s: everything is in %s", recipe.name, recipe.output)
    return status


def run_recipe(recipe: Recipe, until: str | None, num_threads: Mapping[str, int]) -> int:
    """Run what is to be done of a recipe, each stage as its own process, so that its memory is free when it ends.

    `num_threads` is of a stage's process on a CPU; the environment decides about stages that are not named. Returns 0,
    or the exit status of the stage that failed, as the shell would give it.
    """
    todo = plans.stages_until(recipe, until)
    prints, state = plans.Fingerprints(recipe.output), plans.read_state(recipe.output)
    began_s, num_run = time.monotonic(), 0
    launch = server_config(recipe)
    lock = take_lock(recipe.output)
    server = None
    try:
        for index, stage in enumerate(todo):
            # 1. What is to be done about it?
            step = plans.decide(stage, (), state, prints)
            about = f"[{index + 1}/{len(todo)}] {stage.name}"
            if step.action == "skip":
                logger.info("%s: nothing to do (%s)", about, step.why)
                continue
            logger.info("%s: %s (%s)", about, Recipe.model_fields[stage.name].description, step.why)
            if step.action == "run":
                _move_aside(stage, state.get(stage.name, {}).get("key"))
            # 2. The server, while a stage needs it.
            if stage.uses_server and launch is not None and server is None:
                settings = _write_settings(recipe, "launch-vllm", launch.model_dump(mode="json", exclude_defaults=True))
                launching = (sys.executable, "-m", "peagle", "launch-vllm", "--config", str(settings))
                server = start(ServerCommand(launching, {}), None)
                try:
                    wait_ready(server, recipe.server_url, launch.ready_timeout_s)
                except EndpointError as error:
                    logger.error("%s", error)
                    return _stopped("launch-vllm", server.poll() or 1)
            elif server is not None and not any(later.uses_server for later in todo[index:]):
                stop(server, _STOP_WAIT_S)
                server = None
            # 3. The stage itself, and what the next run must know about it.
            state[stage.name] = {"key": step.key, "status": "started"}
            write_json(recipe.output / plans.STATE, state)
            stage_began_s = time.monotonic()
            command = stage_command(recipe, stage, _write_settings(recipe, stage.name, stage.settings))
            variables = {"OMP_NUM_THREADS": str(num_threads[stage.name])} if stage.name in num_threads else {}
            if isinstance(stage.config, ServerSettings):
                variables |= stage.config.child_environment()
            status = run_process(command, lock, variables)
            if status:
                return _stopped(stage.name, status)
            seconds = round(time.monotonic() - stage_began_s, 1)
            state[stage.name] |= {"status": "done", "made": prints.of(stage.output), "seconds": seconds}
            write_json(recipe.output / plans.STATE, state)
            prints.save()
            num_run += 1
    finally:
        if server is not None:
            stop(server, _STOP_WAIT_S)
        prints.save()
        os.close(lock)
    spent = log.duration(time.monotonic() - began_s)
    logger.info("%s: %d stages run, %d up to date, %s", recipe.name, num_run, len(todo) - num_run, spent)
    return 0


def stage_command(recipe: Recipe, stage: Stage, settings_file: Path) -> list[str]:
    """The command line of one stage: the same command that a user would type."""
    python = [sys.executable, "-m"]
    if stage.name == "train" and recipe.processes > 1:
        python += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(recipe.processes), "-m"]
    quiet = [] if logger.isEnabledFor(logging.INFO) else ["--quiet"]
    return [*python, "peagle", stage.name, "--config", str(settings_file), *quiet]


def _write_settings(recipe: Recipe, command: str, settings: dict[str, object]) -> Path:
    path = recipe.output / "settings" / f"{command}.yaml"
    with whole_file(path) as temporary:
        temporary.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def _stopped(stage: str, status: int) -> int:
    logger.error("stage `%s` stopped with status %d", stage, status)
    return 128 - status if status < 0 else status


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
