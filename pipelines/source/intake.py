"""Selection of the next batch: the source files that are not in the ledger."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from headrace.pipelines.errors import SourceFileError
from headrace.pipelines.source.discovery import Found, FoundFile, LeftOut, discover, examine, fingerprint, skip_command
from headrace.storage.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.pipelines.config.model import SourceConfig, TriggerConfig
    from headrace.pipelines.source.ledger import Change, Comparison, Ledger

__all__ = ["Intake"]

_NAMED: Final = 5
_EMPTY: Final = LeftOut("", "empty; it is loaded when it holds a byte")
_EMPTIED: Final = LeftOut("", "emptied after it was loaded; it is loaded again when it holds a byte")


class Intake:
    """The files that wait to be loaded.

    The folder is listed again only when no file of the last listing is waiting, so a backlog of a million files is not
    listed again for each batch. Each file's current state is checked again when the file is taken.

    Parameters
    ----------
    source, trigger
        Source configuration, and the limits of a batch.
    ledger
        Ledger of loaded files.
    clock
        Function that returns seconds, for the duration of a listing.
    listing
        Function that lists the source; None to list its folder.
    again
        Whether files that were loaded before are taken once more.

    Attributes
    ----------
    left_out
        Entries that the last listing skipped, with reasons.
    listing_seconds
        Duration of the last listing in seconds.
    """

    def __init__(
        self,
        source: SourceConfig,
        trigger: TriggerConfig,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
        listing: Callable[[], Found] | None = None,
        *,
        again: bool = False,
    ) -> None:
        self._source = source
        self._listing = listing
        self._again = again
        self._trigger = trigger
        self._most_bytes = None if trigger.max_bytes is None else parse_memory(trigger.max_bytes)
        self._ledger = ledger
        self._clock = clock
        self._waiting: deque[str] = deque()
        self.left_out: tuple[LeftOut, ...] = ()
        self.listing_seconds = 0.0

    @property
    def waiting(self) -> int:
        """Number of listed files that no batch has taken yet."""
        return len(self._waiting)

    def take(self) -> list[FoundFile]:
        """Return the files of the next batch in their current state; an empty list if there are no new files.

        Raises
        ------
        SourceFileError
            If a folder cannot be listed, or a file changed after it was loaded and `source.changed` is ``error``.
        """
        taken = self._take_waiting()
        if not taken:
            self._list()
            taken = self._take_waiting()
        return taken

    def _take_waiting(self) -> list[FoundFile]:
        taken: list[FoundFile] = []
        size = 0
        while self._waiting and len(taken) < self._trigger.max_files:
            file = examine(self._source.path, self._waiting[0])
            if file is not None and file.size > 0:
                if taken and self._most_bytes is not None and size + file.size > self._most_bytes:
                    break
                taken.append(file)
                size += file.size
            self._waiting.popleft()
        return taken

    def _list(self) -> None:
        began = self._clock()
        source = self._source
        if self._listing is None:
            found = discover(source.path, source.files, recursive=source.recursive, place=source.place)
        else:
            found = self._listing()
        compared = self._ledger.compare(found, lambda file: fingerprint(source.path, file))
        if compared.changed and source.changed == "error":
            raise SourceFileError(_told(compared.changed, source))
        self._waiting = deque(_in_order(compared, reload=source.changed == "reload"))
        if self._again:
            self._waiting, self._again = deque(_by_date(found)), False
        empty = [_EMPTY._replace(name=name) for name in compared.empty]
        changes = [left for change in compared.changed if (left := _left_out(change, source)) is not None]
        self.left_out = (*found.left_out, *empty, *changes)
        self.listing_seconds = self._clock() - began


def _left_out(change: Change, source: SourceConfig) -> LeftOut | None:
    """Return the reason why a changed file is not loaded again; None if it is loaded again."""
    if source.changed == "ignore":
        return LeftOut(change.file.name, f"changed after it was loaded; {source.place}.changed says to ignore that")
    return _EMPTIED._replace(name=change.file.name) if change.file.size == 0 else None


def _in_order(compared: Comparison, *, reload: bool) -> list[str]:
    """Return the names of the files to load, oldest first; files with the same date are sorted by name."""
    again = [change.file for change in compared.changed if change.file.size > 0] if reload else []
    if not again:
        return [compared.found.names[index] for index in compared.new]
    files = [*map(compared.found.file, compared.new.tolist()), *again]
    return [file.name for file in sorted(files, key=lambda file: (file.mtime_ns, file.name))]


def _told(changed: tuple[Change, ...], source: SourceConfig) -> str:
    """Return which files changed and how, with the remedy."""
    name, label = changed[0].file.name, source.label
    policies = "reload (all their records again) or ignore" if label is None else "ignore"
    named = "; ".join(map(_difference, changed[:_NAMED]))
    more = f"; and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
    return (
        f"files of {source.path} changed after they were loaded: {named}{more}; put each back as it was and deliver "
        f"its new records under a new name, or keep the change unloaded by `{skip_command(name, label)}`, or say in "
        f"{source.place}.changed what happens to such files: {policies}"
    )


def _difference(change: Change) -> str:
    before, now = change.loaded, change.file
    by = "when it was adopted" if before.batch is None else f"in batch {before.batch}"
    if before.size != now.size:
        return f"{now.name!r} had {before.size:,} bytes {by} and has {now.size:,} now"
    if before.fingerprint is None:  # the run ended before it had taken the fingerprint
        return f"{now.name!r} has another date than {by}, and what its content was then is not known"
    return f"{now.name!r} has other content than {by}"


def _by_date(found: Found) -> list[str]:
    """Return the names of all files, oldest first."""
    files = map(found.file, range(len(found.names)))
    return [file.name for file in sorted(files, key=lambda file: (file.mtime_ns, file.name))]
