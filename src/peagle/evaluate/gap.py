"""Whether a server accepts as much as was measured offline, and where to look if it does not."""

from __future__ import annotations

from collections.abc import Sequence

_ALLOWED = 0.05
"""Difference in the share of accepted drafts that prompts and rounding explain."""


def explain_gap(offline: Sequence[float], served: Sequence[float]) -> str | None:
    """Compare acceptance per position, offline against served.

    Args:
        offline: share of passes in which each position was accepted, from `--mode decode` or `--mode replay`.
        served: the same from a server's counters, on the same prompts.

    Returns:
        None where they agree; else one line with the likely causes, the likeliest first.

    Example:
        (0.70, 0.48, 0.31) against (0.23, 0.07, 0.02): every position falls, the first one most.
    """
    pairs = list(zip(offline, served))
    worst = max((a - b for a, b in pairs), default=0.0)
    if worst <= _ALLOWED:
        return None
    first = pairs[0][0] - pairs[0][1]
    if first > _ALLOWED:
        causes = (
            "the server uses another head or embedding than the checkpoint's (is lm_head loaded, d2t applied?), other "
            "auxiliary layers (eagle_aux_hidden_state_layer_ids), a norm applied twice or never (norm_before_residual, "
            "norm_before_fc), or another verifier"
        )
    else:
        causes = (
            "the first position agrees, deeper ones do not: mask_token_id, mask_hidden, or another number of tokens"
        )
    figures = ", ".join(f"{a:.2f} -> {b:.2f}" for a, b in pairs)
    return f"served acceptance is below the offline one ({figures}); likely: {causes}. Run `peagle check`."
