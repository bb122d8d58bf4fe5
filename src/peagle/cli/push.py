"""`peagle push`."""

from __future__ import annotations

from peagle.evaluate.push_config import PushConfig

CONFIG = PushConfig


def run(config: PushConfig) -> None:
    """Push a checkpoint and its model card to the Hugging Face hub.

    Only what serving needs is pushed, never the training state. The card has the hub's metadata, how to serve the
    drafter, its acceptance table and how it was trained. `--dry-run` shows what would be pushed.
    """
    from peagle.evaluate.push import push

    push(config)
