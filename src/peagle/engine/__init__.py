"""Lossless speculative decoding with a Transformers verifier.

In: a model, a drafter (or none), prompts. Out: answers with a record of every verifier pass. Always: greedy ids are the
verifier's own, sampled ones have its distribution; counts are made before an end or a limit cuts them.
"""

from peagle.config import Sampling
from peagle.engine.acceptance import accept, common_prefix, probabilities
from peagle.engine.engine import Answer, Engine, Laps, Pass, Request

__all__ = ["Answer", "Engine", "Laps", "Pass", "Request", "Sampling", "accept", "common_prefix", "probabilities"]
