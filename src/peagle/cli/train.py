"""`peagle train`."""

from __future__ import annotations

from peagle.train.config import TrainConfig

CONFIG = TrainConfig


def run(config: TrainConfig) -> int:
    """Train a drafter, P-EAGLE or EAGLE-3, on prepared rows and their hidden states.

    Every checkpoint folder is servable as it is: `peagle serve SAVE_PATH/checkpoint_best`. The same command goes on
    after SIGTERM, Ctrl-C or a crash. For several GPUs:
    `torchrun --standalone --nproc_per_node 2 -m peagle train ...`.
    """
    from peagle.train.run import train

    result = train(config)
    return 0 if result.signal_number is None else 128 + result.signal_number  # as shells count: not done yet
