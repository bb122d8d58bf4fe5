"""`peagle extract`."""

from peagle.states.config import ExtractConfig

CONFIG = ExtractConfig


def run(config: ExtractConfig) -> int:
    """Run the verifier over prepared rows and store the hidden states that training reads.

    Kill it at any time: the same command goes on where it stopped. A damaged or missing shard is found and re-made.
    """
    from peagle.states.extract import extract

    return extract(config)
