"""The network, its config.json, and checkpoints in the format that vLLM loads.

In: verifier facts and states. Out: states that the head reads, and checkpoint folders. Always: the state dict's names
are the checkpoint's, loading is strict, and one pass serves training, the engine and (as an oracle) vLLM.
"""

from peagle.drafter.checkpoint import find, load, load_weights, save
from peagle.drafter.config import DrafterConfig, config_for
from peagle.drafter.network import Drafter

__all__ = ["Drafter", "DrafterConfig", "config_for", "find", "load", "load_weights", "save"]
