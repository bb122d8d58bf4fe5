"""What ships inside the package: a small real verifier and questions, so that everything runs with no download.

In: nothing. Out: paths. Anywhere a model or a data file is asked for, `embedded:verifier`, `embedded:train` and
`embedded:test` stand for them. The verifier never saw the test questions; no trained drafter is shipped.
"""

from pathlib import Path
from typing import Any

from peagle.errors import ConfigError

_ROOT = Path(__file__).resolve().parent
VERIFIER = _ROOT / "verifier"
TRAIN_QUESTIONS = _ROOT / "questions" / "train.jsonl"
TEST_QUESTIONS = _ROOT / "questions" / "test.jsonl"
NAMES = {"embedded:verifier": VERIFIER, "embedded:train": TRAIN_QUESTIONS, "embedded:test": TEST_QUESTIONS}

__all__ = ["NAMES", "TEST_QUESTIONS", "TRAIN_QUESTIONS", "VERIFIER", "name_of", "resolve"]


def resolve(value: Any) -> Any:
    """Replace the names above with paths, in lists and after `LABEL=` too; return anything else unchanged.

    Raises:
        ConfigError: a name that starts with `embedded:` but is not one of the three.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(resolve(item) for item in value)
    if not isinstance(value, (str, Path)):
        return value
    label, sign, name = str(value).rpartition("=")
    if not name.startswith("embedded:"):
        return value
    if name not in NAMES:
        raise ConfigError(f"{name}: no such name; peagle ships {', '.join(NAMES)}")
    return label + sign + str(NAMES[name])


def name_of(path: str | Path) -> str:
    """A path as people typed it: the name above if it is shipped, else the path itself."""
    return next((name for name, shipped in NAMES.items() if Path(path) == shipped), str(path))
