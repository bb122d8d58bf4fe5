"""What can go wrong for a user. `cli/` prints one line for each of these and exits with status 2.

A message says what and where, what was found against what was expected, and what to do.
"""

import re

# What is never shown: values of `config.Secret`, passwords inside addresses.
_secrets: set[str] = set()
_USER_INFO = re.compile(r"(\w+://)([^/@\s]+)@")
MASK = "***"


def keep_secret(value: str) -> None:
    """Have `masked` hide a value from now on, unless it is a word that texts have anyway ("token", "other")."""
    if len(value) >= 16 or (len(value) >= 6 and not value.isalpha()):
        _secrets.add(value)


def passwords(text: str) -> list[str]:
    """The passwords of addresses in a text: `http://user:password@host`, or `https://token@host`."""
    return [found.rpartition(":")[2] for _, found in _USER_INFO.findall(text) if not found.endswith(MASK)]


def masked(text: str) -> str:
    """A text fit for a screen or a file: keys, and passwords of addresses (`http://user:***@host`), are hidden."""
    for value in sorted(_secrets, key=len, reverse=True):
        text = text.replace(value, MASK)
    return _USER_INFO.sub(lambda found: found[1] + "".join(found[2].rpartition(":")[:2]) + MASK + "@", text)


def one_line(error: BaseException) -> str:
    """An error's text in one line of at most 300 characters, for the end of a message of our own."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class PeagleError(Exception):
    """A user's mistake, or a fault of their machine, that one clear line explains. Its text never holds a secret."""

    def __str__(self) -> str:
        return masked(super().__str__())


class ConfigError(PeagleError):
    """A flag, a configuration key or a value that cannot be used."""


class DataError(PeagleError):
    """Conversations or prepared rows that cannot be used."""


class TemplateError(DataError):
    """A chat template from which no loss mask can be derived."""


class VerifierError(PeagleError):
    """A verifier that cannot be loaded, or that lacks what a stage needs."""


class StoreError(PeagleError):
    """A hidden-state store that is damaged, incomplete or made for something else."""


class DiskError(PeagleError):
    """The disk is full, or a write failed; what was complete before is still there."""


class LayoutError(PeagleError):
    """Anchors, depths or documents that do not fit together."""


class CheckpointError(PeagleError):
    """A drafter checkpoint that cannot be loaded or served."""


class TrainingError(PeagleError):
    """Training cannot start or go on."""


class EndpointError(PeagleError):
    """A served model that is unreachable, not ready, or not the one that was meant."""
