"""`peagle check`."""

from peagle.serve.config import CheckConfig

CONFIG = CheckConfig


def run(config: CheckConfig) -> int:
    """Say whether a checkpoint can be served, and what vLLM would refuse or misread.

    Exit status 0: it can be served as trained; 1: it cannot; 2: there is no such checkpoint.
    """
    from peagle.serve.check import check

    return check(config)
