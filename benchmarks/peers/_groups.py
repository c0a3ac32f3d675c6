"""Linux memory cgroups, versions 1 and 2: a limit on the memory of a process, including its page cache."""

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["MemoryGroup"]

ROOT = Path("/sys/fs/cgroup")
FILES = {
    1: {"limit": "memory.limit_in_bytes", "peak": "memory.max_usage_in_bytes", "used": "memory.usage_in_bytes"},
    2: {"limit": "memory.max", "peak": "memory.peak", "used": "memory.current"},
}


class MemoryGroup:
    """A memory group for one process. Creation requires write access below `/sys/fs/cgroup`."""

    def __init__(self, folder, version):
        self._folder = folder
        self._files = FILES[version]

    @classmethod
    def create(cls, name):
        """Return a new group, or None if the system does not allow one."""
        version = 1 if (ROOT / "memory").is_dir() else 2
        parent = ROOT / "memory" if version == 1 else ROOT
        folder = parent / f"headrace-{os.getpid()}-{name}"
        try:
            if version == 2 and "memory" not in (ROOT / "cgroup.subtree_control").read_text().split():
                (ROOT / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
        except OSError:
            return None
        return cls(folder, version)

    def add(self, pid):
        """Charge future allocations of a process to the group."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def limit(self, nbytes):
        """Set the memory limit of the group."""
        (self._folder / self._files["limit"]).write_text(str(nbytes))

    @property
    def peak(self):
        """Peak memory of the group in bytes; current memory if the system does not record the peak."""
        file = self._folder / self._files["peak"]
        return int((file if file.exists() else self._folder / self._files["used"]).read_text())

    def remove(self):
        """Remove the group and end the remaining child processes."""
        while True:
            left = [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                self._folder.rmdir()
            except OSError:
                time.sleep(0.05)
            else:
                return
