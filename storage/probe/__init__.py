"""Fast probing for joins: leaves located and rows found for many keys at once, in memory.

In: keys of one word. Out: leaf numbers, rows in cached pages with the same key or the nearest one, and rows from a
hash table of rows that were read before.
"""

from headrace.storage.probe.leaf_ranges import LeafRanges
from headrace.storage.probe.page_descriptors import PageDescriptors
from headrace.storage.probe.row_hash import RowHash, SlotForm

__all__ = ["LeafRanges", "PageDescriptors", "RowHash", "SlotForm"]
