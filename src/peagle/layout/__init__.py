"""What is supervised, COD sampling, and who may see whom: integers and booleans, no module, no file, no clock.

In: loss masks, document ids, a generator. Out: the positions that are targets, and a `CodLayout`: the slots of depth 1
and more. Always: nested (a chain has no gap), nothing crosses a document, the same generator gives the same layout.
"""

from peagle.layout.cod import CodLayout, full, sample, visible
from peagle.layout.supervision import extent, label_positions

__all__ = ["CodLayout", "extent", "full", "label_positions", "sample", "visible"]
