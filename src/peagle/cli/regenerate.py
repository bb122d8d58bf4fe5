"""`peagle regenerate`."""

from peagle.verifier.regenerate_config import RegenerateConfig

CONFIG = RegenerateConfig


def run(config: RegenerateConfig) -> int:
    """Let the verifier answer the prompts of any data set: a drafter learns to predict its own verifier.

    The output is ready for `peagle prepare --data`. Kill it at any time: the same command goes on where it stopped.
    """
    from peagle.verifier.regenerate import regenerate

    return regenerate(config)
