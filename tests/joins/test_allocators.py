"""Freed memory is asked for when the process has grown beyond its limit, and again with each further MiB."""

import mmap
import subprocess
import sys

import pytest

from headrace.joins.memory import allocators
from headrace.joins.memory.allocators import ProcessMemory

MIB = 2**20


@pytest.fixture
def process(monkeypatch):
    """A process whose resident memory is set by hand. `returns` is what its allocators give back when asked."""

    class Process:
        resident = 100 * MIB
        returns = 0
        asked = 0

        def release(self):
            self.asked += 1
            self.resident -= self.returns

    process = Process()
    monkeypatch.setattr(allocators, "anonymous_nbytes", lambda: process.resident)
    monkeypatch.setattr(allocators, "release_freed_memory", process.release)
    return process


def test_allocators_may_keep_4_mib_beyond_the_limit(process):
    memory = ProcessMemory(10 * MIB)
    process.resident += 14 * MIB
    memory.settle()
    assert process.asked == 0
    process.resident += 1
    memory.settle()
    assert process.asked == 1


def test_memory_in_use_beyond_the_limit_is_asked_for_again_after_growth_by_1_mib(process):
    memory = ProcessMemory(10 * MIB)
    process.resident += 20 * MIB
    process.returns = 2 * MIB
    memory.settle()
    process.resident += MIB
    memory.settle()
    assert process.asked == 1
    process.resident += 1
    memory.settle()
    assert process.asked == 2


def test_after_memory_was_given_back_growth_counts_from_what_was_left(process):
    """What was in use beyond the limit before is no longer: it may not be kept once it is freed."""
    memory = ProcessMemory(10 * MIB)
    process.resident += 20 * MIB
    memory.settle()
    process.returns = 15 * MIB
    memory.give_back()
    process.resident, process.returns = 114 * MIB, 0
    memory.settle()
    assert process.asked == 2
    process.resident += 1
    memory.settle()
    assert process.asked == 3


def test_a_process_that_shrinks_is_measured_from_its_least_size(process):
    memory = ProcessMemory(10 * MIB)
    process.resident -= 50 * MIB
    memory.settle()
    process.resident += 15 * MIB
    memory.settle()
    assert process.asked == 1


def test_pages_of_mapped_files_are_not_memory_that_allocators_keep(tmp_path):
    path = tmp_path / "stream"
    path.write_bytes(bytes(32 * MIB))
    before = allocators.anonymous_nbytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        assert allocators.anonymous_nbytes() - before < 4 * MIB
    block = bytearray(b"x" * (32 * MIB))
    assert allocators.anonymous_nbytes() - before >= len(block)


FORKED = """
import os
from headrace.joins.memory.allocators import anonymous_nbytes

before = anonymous_nbytes()
child = os.fork()
if child == 0:
    block = bytearray(os.urandom(64 << 20))
    os._exit(not 60 << 20 < anonymous_nbytes() - before)
assert os.waitpid(child, 0)[1] == 0, "the child does not see its own memory"
assert anonymous_nbytes() - before < 8 << 20
"""


def test_a_forked_process_sees_its_own_memory():
    subprocess.run([sys.executable, "-c", FORKED], check=True)
