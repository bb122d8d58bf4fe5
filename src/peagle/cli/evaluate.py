"""`peagle evaluate`."""

from __future__ import annotations

from peagle.evaluate.config import EvaluateConfig

CONFIG = EvaluateConfig


def run(config: EvaluateConfig) -> int:
    """Measure a drafter: acceptance by position, speed beside plain decoding, and that answers are unchanged.

    Counts as vLLM does. With `--endpoint` the counters of a running vLLM are read instead of decoding here.
    """
    from peagle.evaluate.run import evaluate

    return evaluate(config)
