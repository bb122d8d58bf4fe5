"""A head start: the drafter's layers begin as the verifier's last ones, and `fc` lets the verifier's own state through.

A drafter continues from the verifier's hidden state, which is what the verifier's last layers do; random layers spend
most of a short run on learning that again. Measured in docs/recipe.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.drafter import Drafter
from peagle.errors import VerifierError
from peagle.verifier.facts import VerifierFacts
from peagle.verifier.tensor_files import TensorFiles

# Families whose layers are a drafter's own kind: same tensors, same norms, no biases, one dense MLP.
SAME_LAYERS = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
# Shares of the last and the last but one auxiliary state in what `fc` passes on at first; the rest is small noise.
_LAST, _BEFORE, _NOISE = 0.7, 0.3, 0.2


def start_from_verifier(drafter: Drafter, facts: VerifierFacts) -> str | None:
    """Copy the verifier's last layers into a new drafter, in place.

    Layer 0 reads [embedding, state]: the state's half takes the verifier's projections, the embedding's half stays
    random.

    Args:
        drafter: new, float32, on the CPU.
        facts: of its verifier.

    Returns:
        None if done; else why not, in a few words, and nothing is changed.
    """
    config = drafter.config
    if SAME_LAYERS.get(facts.model_type) != config.layer_type or config.attention_bias:
        return f"{facts.model_type} layers are of another kind than the drafter's ({config.layer_type})"
    if facts.quantization is not None:
        return f"the verifier is quantised ({facts.quantization})"
    if config.num_layers > facts.num_layers:
        return f"the verifier has {facts.num_layers} layers only"
    try:
        found = _layers(drafter, facts)
    except VerifierError as error:
        return str(error)
    if isinstance(found, str):
        return found
    hidden = config.hidden_size
    with torch.no_grad():
        own = drafter.state_dict()
        for name, weight in found.items():
            target = own[name]
            if target.shape == weight.shape:
                target.copy_(weight)
            else:
                target[:, hidden:].copy_(weight)
        drafter.fc.weight.mul_(_NOISE)
        passed = torch.eye(hidden)
        drafter.fc.weight[:, -hidden:].add_(passed * (_LAST if len(config.aux_layer_ids) > 1 else 1.0))
        if len(config.aux_layer_ids) > 1:
            drafter.fc.weight[:, -2 * hidden : -hidden].add_(passed * _BEFORE)
    return None


def _layers(drafter: Drafter, facts: VerifierFacts) -> dict[str, Tensor] | str:
    """The verifier's tensors under the drafter's names, or what does not fit."""
    files = TensorFiles.open(facts.name_or_path)
    first = facts.num_layers - drafter.config.num_layers
    prefix = next((p for p in _PREFIXES if f"{p}layers.{first}.input_layernorm.weight" in files.names), None)
    if prefix is None:
        return "no tensors under the usual layer names"
    found: dict[str, Tensor] = {}
    for name, target in drafter.state_dict().items():
        if not name.startswith("layers."):
            continue
        _, index, leaf = name.split(".", 2)
        is_first = index == "0"
        if is_first and leaf == "input_layernorm.weight":
            continue  # of the embedding; the state's norm is `hidden_norm`
        theirs = "input_layernorm.weight" if is_first and leaf == "hidden_norm.weight" else leaf
        source = f"{prefix}layers.{first + int(index)}.{theirs}"
        if source not in files.names:
            return f"no tensor {source}"
        weight = files.read(source).float()
        halves = is_first and weight.dim() == 2 and target.shape == (weight.shape[0], 2 * weight.shape[1])
        if weight.shape != target.shape and not halves:
            return f"{source} is {list(weight.shape)}, the drafter's is {list(target.shape)}"
        found[name] = weight
    return found
