"""`peagle doctor`."""

from __future__ import annotations

from peagle.road.doctor import DoctorConfig

CONFIG = DoctorConfig


def run(config: DoctorConfig) -> int:
    """Look at the environment; with a model (and data) walk the whole road on a few rows and say what would go wrong.

    One line for each finding: ok, warn, or FAIL with what to do. Exits with 1 if anything failed, and leaves nothing
    behind.

        peagle doctor
        peagle doctor Qwen/Qwen3-8B --data sharegpt --max-samples 5000
        peagle doctor embedded:verifier --data embedded:train
    """
    from peagle.road.doctor import doctor

    return doctor(config)
