"""Reading of leaves: which bytes to read at once, how, and which pages stay in memory.

In: a snapshot and the leaves or keys that are wanted. Out: verified pages, or rows. Contains read plans by the measured
cost of the disk, the page reader, reads in flight, the page cache, snapshots that page their inner nodes, lookup and
scan.
"""

from headrace.storage.read.cache import (
    LRU,
    SPARSE_NBYTES,
    AgeingCounter,
    CachePolicy,
    PageCache,
    UtilityCounter,
    page_buffer,
)
from headrace.storage.read.device import DeviceModel, device_path, measure, save_device
from headrace.storage.read.frame_memory import FrameMemory
from headrace.storage.read.leaf_map import LeafMap, LeafNumbers, value_at, values_at
from headrace.storage.read.paged_snapshot import PagedSnapshot
from headrace.storage.read.plan import ReadPlan, plan_cost, plan_reads, plan_reads_greedily
from headrace.storage.read.read_queue import Reading, ReadQueue, Reads
from headrace.storage.read.reader import PageReader, ReadReport

__all__ = [
    "LRU",
    "SPARSE_NBYTES",
    "AgeingCounter",
    "CachePolicy",
    "DeviceModel",
    "FrameMemory",
    "LeafMap",
    "LeafNumbers",
    "PageCache",
    "PageReader",
    "PagedSnapshot",
    "ReadPlan",
    "ReadQueue",
    "ReadReport",
    "Reading",
    "Reads",
    "UtilityCounter",
    "device_path",
    "measure",
    "page_buffer",
    "plan_cost",
    "plan_reads",
    "plan_reads_greedily",
    "save_device",
    "value_at",
    "values_at",
]
