"""`peagle prepare`."""

from peagle.data.config import PrepareConfig

CONFIG = PrepareConfig


def run(config: PrepareConfig) -> int:
    """Turn conversations into token rows for training, as the verifier's server would tokenize them.

    Every row that is read is kept, or listed in rejected.jsonl with its line and reason. Look at the result with
    `peagle inspect`. Prompts without replies go through `peagle regenerate` first.
    """
    from peagle.data.prepare import prepare

    return prepare(config)
