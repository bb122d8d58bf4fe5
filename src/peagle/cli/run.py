"""`peagle run`."""

from __future__ import annotations

from peagle.road.run import RunConfig

CONFIG = RunConfig


def run(config: RunConfig) -> int:
    """Walk the whole road from one recipe: regenerate, prepare, extract, train, check, evaluate, report.

    A stage whose settings and inputs have not changed is skipped (contents are compared, not times). After a kill the
    same command goes on where it stopped. `--dry-run` prints the plan with disk, memory and expected time.

        peagle run qwen3-8b --dry-run
        peagle run qwen3-8b --set train.epochs=3
    """
    from peagle.road.run import show_or_walk

    return show_or_walk(config)
