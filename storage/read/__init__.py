"""Reading of leaves: which bytes to read at once, how, and which pages stay in memory.

In: a snapshot and the leaves or keys that are wanted. Out: verified pages, or rows. Contains read plans by the measured
cost of the disk, the page reader, reads in flight, the page cache, and lookup and scan.
"""

from headrace.storage.read.cache import LRU, AgeingCounter, CachePolicy, PageCache, UtilityCounter, page_buffer
from headrace.storage.read.device import DeviceModel, device_path, measure, save_device
from headrace.storage.read.plan import ReadPlan, plan_cost, plan_reads, plan_reads_greedily
from headrace.storage.read.read_queue import Reading, ReadQueue, Reads
from headrace.storage.read.reader import PageReader, ReadReport

__all__ = [
    "LRU",
    "AgeingCounter",
    "CachePolicy",
    "DeviceModel",
    "PageCache",
    "PageReader",
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
]
