"""What ships inside the package: a small real verifier and questions, so that everything runs with no download.

In: nothing. Out: paths. Anywhere a model or a data file is asked for, `embedded:verifier`, `embedded:train` and
`embedded:test` stand for them. The verifier never saw the test questions; no trained drafter is shipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peagle.errors import ConfigError

ROOT = Path(__file__).resolve().parent
VERIFIER = ROOT / "verifier"
TRAIN_QUESTIONS = ROOT / "questions" / "train.jsonl"
TEST_QUESTIONS = ROOT / "questions" / "test.jsonl"
NAMES = {"embedded:verifier": VERIFIER, "embedded:train": TRAIN_QUESTIONS, "embedded:test": TEST_QUESTIONS}

__all__ = ["NAMES", "ROOT", "TEST_QUESTIONS", "TRAIN_QUESTIONS", "VERIFIER", "resolve", "told"]


def resolve(value: Any) -> Any:
    """Replace the names above by paths, also in lists and behind `LABEL=`; anything else comes back as it was.

    Raises:
        ConfigError: a name that starts with `embedded:` but is none of the three.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(resolve(item) for item in value)
    if not isinstance(value, (str, Path)):
        return value
    label, sign, name = str(value).rpartition("=")
    if not name.startswith("embedded:"):
        return value
    if name not in NAMES:
        raise ConfigError(f"{name}: nothing of that name is shipped; there are {', '.join(NAMES)}")
    return label + sign + str(NAMES[name])


def told(path: str | Path) -> str:
    """A path as people typed it: of what is shipped its name above, else the path."""
    return next((name for name, shipped in NAMES.items() if Path(path) == shipped), str(path))
