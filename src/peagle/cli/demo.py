"""`peagle demo`."""

from __future__ import annotations

from peagle.road.demo import DemoConfig

CONFIG = DemoConfig


def run(config: DemoConfig) -> int:
    """Walk the whole road on this machine in a few minutes: regenerate, prepare, extract, train, evaluate, report.

    Uses the small verifier and the questions that ship with the package; nothing is downloaded. Ends in the acceptance
    table, the speed against plain decoding, and the proof that every answer is the verifier's own.
    """
    from peagle.road.demo import demo

    return demo(config)
