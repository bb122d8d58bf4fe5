"""Which of the verifier's layers a drafter reads.

Layer id j means the residual stream entering layer j: 0 is the embedding output, j the stream after j layers, and
`num_layers` the state after the last layer, before the final norm. vLLM counts the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from peagle.errors import VerifierError


def resolve_aux_layer_ids(num_layers: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """The auxiliary layer ids: those asked for, or the default 2, L // 2, L - 3.

    Args:
        num_layers: L, layers of the verifier.
        asked: ids in any order (states are always laid out in ascending order, as in vLLM), or None.

    Returns:
        Distinct ids in 0 .. L, ascending.

    Raises:
        VerifierError: an id is out of range or given twice, or the default collides in a shallow verifier.

    Example:
        36 layers give (2, 18, 33); 8 give (2, 4, 5); 6 would give 2, 3, 3 and are refused.
    """
    if asked:
        ids = [int(i) for i in asked]
        outside = [i for i in ids if not 0 <= i <= num_layers]
        if outside:
            raise VerifierError(
                f"layer id {outside[0]} does not exist: the verifier has {num_layers} layers, so ids are 0 (embedding "
                f"output) to {num_layers} (after the last layer). Set --target-layer-ids."
            )
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise VerifierError(f"layer id {twice[0]} is given twice in {ids}: --target-layer-ids must be distinct")
        return tuple(sorted(ids))
    default = (2, num_layers // 2, num_layers - 3)
    if not (default[0] < default[1] < default[2]):
        raise VerifierError(
            f"the default layer ids (2, L // 2, L - 3) collide for a verifier of {num_layers} layers: {default}. "
            f"Choose three distinct ids from 0 to {num_layers} with --target-layer-ids."
        )
    return default
