"""Reading of leaves: which bytes to read at once, how, and which pages stay in memory.

In: a snapshot and the leaves or keys that are wanted. Out: verified pages, or rows. Contains read plans by the measured
cost of the disk, the page reader, reads in flight, the page cache, and lookup and scan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.storage.read.cache import LRU, AgeingCounter, CachePolicy, PageCache, UtilityCounter, page_buffer
    from headrace.storage.read.device import DeviceModel, device_path, load_device, measure, save_device
    from headrace.storage.read.frame_memory import FrameMemory
    from headrace.storage.read.lookup import lookup, scan
    from headrace.storage.read.plan import ReadPlan, plan_cost, plan_reads, plan_reads_greedily
    from headrace.storage.read.read_queue import Reading, ReadQueue, Reads
    from headrace.storage.read.reader import PageReader, ReadReport

__all__ = [
    "LRU",
    "AgeingCounter",
    "CachePolicy",
    "DeviceModel",
    "FrameMemory",
    "PageCache",
    "PageReader",
    "ReadPlan",
    "ReadQueue",
    "ReadReport",
    "Reading",
    "Reads",
    "UtilityCounter",
    "device_path",
    "load_device",
    "lookup",
    "measure",
    "page_buffer",
    "plan_cost",
    "plan_reads",
    "plan_reads_greedily",
    "save_device",
    "scan",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "plan": ("ReadPlan", "plan_cost", "plan_reads", "plan_reads_greedily"),
        "reader": ("PageReader", "ReadReport"),
        "read_queue": ("ReadQueue", "Reading", "Reads"),
        "device": ("DeviceModel", "device_path", "load_device", "measure", "save_device"),
        "cache": ("LRU", "AgeingCounter", "CachePolicy", "PageCache", "UtilityCounter", "page_buffer"),
        "lookup": ("lookup", "scan"),
        "frame_memory": ("FrameMemory",),
    },
)
