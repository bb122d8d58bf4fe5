"""How large a store will be, said and checked before anything is run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from peagle.errors import DiskError
from peagle.files import free_bytes
from peagle.states.shards import RowEntry
from peagle.states.store import StoreSpec

logger = logging.getLogger(__name__)
_SPARE_BYTES = 64 << 20  # left free on the disk


def check_disk(
    spec: StoreSpec, entries: Sequence[RowEntry], missing: AbstractSet[str], folder: Path, max_disk_gb: float | None
) -> int:
    """Estimate the store's size before anything is run.

    Returns:
        Estimated bytes of the whole store.

    Raises:
        DiskError: what is missing does not fit the disk, or the whole is above `max_disk_gb`.
    """
    whole = sum(spec.row_bytes(entry) for entry in entries)
    needed = sum(spec.row_bytes(entry) for entry in entries if entry.row_id in missing)
    free = free_bytes(folder)
    advice = "Use --max-samples, a shorter --seq-length at prepare, or fewer --target-layer-ids"
    if max_disk_gb is not None and whole > max_disk_gb * 10**9:
        raise DiskError(
            f"{folder}: the store would take {_size(whole)}, --max-disk-gb allows {max_disk_gb:g}. {advice}."
        )
    if missing and needed + _SPARE_BYTES > free:
        raise DiskError(
            f"{folder}: {len(missing)} rows need {_size(needed)}, the disk has {_size(free)} free. {advice}, or "
            "another --output."
        )
    if missing:
        logger.info("%d rows to extract: about %s, %s free on the disk", len(missing), _size(needed), _size(free))
    return whole


def _size(num_bytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"
