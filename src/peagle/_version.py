"""The version, apart so that anything may read it: the package's own face imports much more."""

__version__ = "0.1.0"
