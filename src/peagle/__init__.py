"""Train, measure and serve P-EAGLE drafters for speculative decoding."""

__version__ = "0.1.0"
