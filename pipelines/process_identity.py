"""Identity of processes: which process holds a lease or a run, and whether it is still alive."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessIdentity", "worker_name"]


def worker_name() -> str:
    """Return host and id of this process, as notes of tasks name it."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class ProcessIdentity:
    """A process on a machine.

    Parameters
    ----------
    machine
        Host name, boot id and process namespace; equal for two processes that can see each other's process ids.
    pid
        Id of the process.
    process
        Start time of the process in kernel ticks, which distinguishes a reused id; empty if the system does not report
        it.
    """

    machine: str
    pid: int
    process: str

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return the identity of this process."""
        return cls(_machine(), os.getpid(), _started(os.getpid()) or "")

    @property
    def host(self) -> str:
        """Name of the host."""
        return self.machine.split(" ", 1)[0]

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended; False for a process that this process cannot see."""
        if self.machine != _machine() or not self.process:
            return False
        started = _started(self.pid)
        if started is None:
            return not _exists(self.pid)
        return started != self.process


def _machine() -> str:
    boot = _text(Path("/proc/sys/kernel/random/boot_id")) or ""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {boot} {namespace}"


def _started(pid: int) -> str | None:
    """Return the start time of a process; None if it has ended, or if the system hides it."""
    stat = _text(Path(f"/proc/{pid}/stat"))
    if stat is None:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in {"Z", "X"} else fields[18]


def _exists(pid: int) -> bool:
    """Return whether another user's process exists that the system hides, as with /proc mounted `hidepid=2`."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
