"""COD sampling and who may see whom: integers and booleans, no module, no file, no clock.

In: which pair slots are supervised, document ids, a generator. Out: a `CodLayout`: the slots of depth 1 and more.
Always: nested (a chain has no gap), nothing crosses a document, and the same generator gives the same layout.
"""

from peagle.layout.cod import CodLayout, full, sample
from peagle.layout.visibility import visible

__all__ = ["CodLayout", "full", "sample", "visible"]
