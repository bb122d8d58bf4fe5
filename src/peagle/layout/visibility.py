"""Who sees whom: the definition that every fast attention must equal; apart, because tests hold each against it."""

from __future__ import annotations

from torch import Tensor

from peagle.errors import LayoutError


def visible(
    query_anchor: Tensor, query_depth: Tensor, key_anchor: Tensor, key_depth: Tensor, document_ids: Tensor
) -> Tensor:
    """Tell which slots may attend to which.

    A slot sees the pair slots (depth 0) of its document up to its anchor, and its own chain up to its own depth. A pair
    slot is a chain's slot of depth 0, so for it this is ordinary causal attention.

    Args:
        query_anchor, query_depth: int64, [num_queries].
        key_anchor, key_depth: int64, [num_keys].
        document_ids: document of each pair slot, -1 for padding, int64, [num_pairs].

    Returns:
        True where attention is allowed, bool, [num_queries, num_keys]. Padding sees and shows nothing.

    Raises:
        LayoutError: an anchor lies outside [0, num_pairs), or a depth is negative.

    Source: P-EAGLE, arXiv 2602.01469, section 3. Differs: computed per sampled slot, not sliced from one full mask.
    """
    for anchor, depth in ((query_anchor, query_depth), (key_anchor, key_depth)):
        if anchor.numel() and (int(anchor.min()) < 0 or int(anchor.max()) >= document_ids.numel()):
            raise LayoutError(f"anchors must lie in [0, {document_ids.numel()})")
        if depth.numel() and int(depth.min()) < 0:
            raise LayoutError("depths must not be negative")
    query_document, key_document = document_ids[query_anchor][:, None], document_ids[key_anchor][None]
    same_document = (query_document == key_document) & (query_document >= 0)
    is_context = (key_depth[None] == 0) & (key_anchor[None] <= query_anchor[:, None])
    is_own_chain = (key_anchor[None] == query_anchor[:, None]) & (key_depth[None] <= query_depth[:, None])
    return same_document & (is_context | is_own_chain)
