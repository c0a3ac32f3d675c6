"""Memory groups of Linux, versions 1 and 2: a limit on what a process holds, the page cache that it fills included."""

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
    """A group of its own for one process. Making it needs the right to write below `/sys/fs/cgroup`."""

    def __init__(self, folder, version):
        self._folder = folder
        self._files = FILES[version]

    @classmethod
    def create(cls, name):
        """Return a new group, or None where the system grants none."""
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
        """Charge what a process asks for from now on."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def limit(self, nbytes):
        """Set how much the group may hold."""
        (self._folder / self._files["limit"]).write_text(str(nbytes))

    @property
    def peak(self):
        """The most bytes that the group held; the present ones where the system does not keep the most."""
        file = self._folder / self._files["peak"]
        return int((file if file.exists() else self._folder / self._files["used"]).read_text())

    def remove(self):
        """Remove the group; what its process started and left behind is ended."""
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
