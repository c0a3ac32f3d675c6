"""Memory for page frames: what it takes, and when in huge pages."""

import errno
import mmap
from pathlib import Path

from headrace.storage.read.frame_memory import FrameMemory

HUGE = 2 << 20


def advised(memory):
    """Bytes from the first on that may be in huge pages, and bytes that the kernel has backed, from /proc."""
    place, end = memory.buffer.ctypes.data, memory.buffer.ctypes.data + len(memory.buffer)
    huge = backed = 0
    with Path("/proc/self/smaps").open(encoding="ascii") as smaps:
        for line in smaps:
            first, *rest = line.split()
            if "-" in first:
                low, high = (int(bound, 16) for bound in first.split("-"))
            elif first == "Rss:" and place < high and low < end:
                backed += int(rest[0]) << 10
            elif first == "VmFlags:" and "hg" in rest and low <= place + huge < high:
                huge = min(high, end) - place
    return huge, backed


def test_only_what_may_be_used_is_in_huge_pages():
    memory = FrameMemory(8 * HUGE)
    assert advised(memory) == (0, 0)
    memory.allow(4 * HUGE, 0)
    memory.buffer[: 3 * HUGE // 2] = 1
    assert advised(memory)[0] == 4 * HUGE
    assert 3 * HUGE // 2 <= advised(memory)[1] <= 4 * HUGE
    memory.allow(3 * HUGE // 2, 3 * HUGE // 2)
    assert advised(memory) == (3 * HUGE // 2, 3 * HUGE // 2)
    assert memory.buffer[3 * HUGE // 2 - 1] == 1


def test_what_was_given_back_does_not_come_again():
    memory = FrameMemory(8 * HUGE)
    memory.allow(8 * HUGE, 0)
    memory.buffer[: 3 * HUGE] = 1
    memory.break_up(3 * HUGE)
    memory.give_back(HUGE // 2, HUGE)
    memory.allow(8 * HUGE, 3 * HUGE)
    assert advised(memory) == (0, 5 * HUGE // 2)
    assert not memory.buffer[HUGE // 2 : HUGE].any()
    assert memory.buffer[: HUGE // 2].all()


class WithoutHugePages(mmap.mmap):
    def madvise(self, option, *span):
        if option in {mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE}:
            raise OSError(errno.EINVAL, "Invalid argument")
        super().madvise(option, *span)


def test_a_system_may_be_without_huge_pages(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    memory = FrameMemory(2 * HUGE)
    memory.allow(2 * HUGE, 0)
    memory.buffer[:HUGE] = 1
    memory.break_up(HUGE)
    memory.give_back(0, HUGE // 2)
    assert memory.buffer.sum() == HUGE // 2
