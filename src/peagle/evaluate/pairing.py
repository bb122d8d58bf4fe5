"""Do a drafter and a verifier belong together? Sizes, layers, and the tokens behind the ids."""

from __future__ import annotations

import logging
from typing import Any

from peagle.drafter import DrafterConfig
from peagle.errors import CheckpointError, PeagleError
from peagle.verifier.facts import VerifierFacts
from peagle.verifier.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def check_pair(config: DrafterConfig, facts: VerifierFacts, tokenizer: Any) -> str | None:
    """Refuse a drafter that was made for another verifier.

    Args:
        config: the drafter's.
        facts: the verifier that is to be used.
        tokenizer: its tokenizer.

    Returns:
        A warning where the two could not be compared fully, else None.

    Raises:
        CheckpointError: another vocabulary, width or depth, or other tokens behind the same ids.
    """
    for label, ours, theirs in (
        ("vocabulary", config.vocab_size, facts.vocab_size),
        ("hidden size", config.hidden_size, facts.hidden_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"the drafter is made for a verifier of {label} {ours}, {facts.name_or_path} has {theirs}; "
                f"it was trained for {config.verifier}"
            )
    if config.aux_layer_ids[-1] > facts.num_layers:
        raise CheckpointError(
            f"the drafter reads layer {config.aux_layer_ids[-1]}, {facts.name_or_path} has {facts.num_layers} layers"
        )
    if config.verifier == facts.name_or_path:
        return None
    try:
        trained_with = load_tokenizer(config.verifier, facts.trust_remote_code)
    except PeagleError:
        return f"the drafter was trained for {config.verifier}, which is not here: its tokens were not compared"
    difference = token_difference(trained_with, tokenizer)
    if difference is not None:
        raise CheckpointError(
            f"the drafter was trained for {config.verifier}, whose tokens are not those of {facts.name_or_path}: "
            f"{difference}"
        )
    return None


def token_difference(one: Any, other: Any) -> str | None:
    """The first id that stands for two different tokens, in words; None where all agree."""
    ours, theirs = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (one, other))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            return f"id {index} is {ours.get(index)!r} and {theirs.get(index)!r}"
    return None
