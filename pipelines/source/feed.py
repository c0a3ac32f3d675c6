"""What a loop of batches takes its files from: the waiting files of one source, and the ledger of the batches.

`headrace.pipelines.correlate.ledgers` is the same for several sources.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headrace.pipelines.source.discovery import FoundFile, examine, fingerprint, skip_command
from headrace.pipelines.source.intake import Intake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from headrace.pipelines.config.model import SourceConfig, TriggerConfig
    from headrace.pipelines.source.discovery import LeftOut
    from headrace.pipelines.source.ledger import Ledger

__all__ = ["Feed", "MissingFile", "SourceFeed", "share_of"]


class MissingFile(NamedTuple):
    """A planned file that was removed: its folder, its name, and the command that continues without it."""

    folder: str
    name: str
    skip: str


def share_of(taken: int, waiting: int) -> str:
    """Return how many of all new files a batch takes.

    Examples
    --------
    >>> share_of(2, 3), share_of(1, 0)
    ('2 of 5 files', '1 file')
    """
    if waiting:
        return f"{taken:,} of {taken + waiting:,} files"
    return f"{taken:,} file{'' if taken == 1 else 's'}"


class Feed(Protocol):
    """Files that wait to be loaded, and the ledgers that say which were."""

    @property
    def ledger(self) -> Ledger:
        """Ledger of the batches."""

    @property
    def listing_seconds(self) -> float:
        """Duration of the last listing in seconds."""

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Entries that the last listing skipped, with reasons."""

    def take(self) -> Any:
        """Return the files of the next batch; a false value if there are none."""

    def share(self, files: Any) -> str:
        """Return how many of the listed files these are, such as ``2 of 5 files``."""

    def plan(self, number: int, attempt: str, files: Any) -> None:
        """Record a batch before any part of it is written."""

    def fingerprints(self, files: Any) -> AbstractContextManager[Callable[[], Any]]:
        """Compute the fingerprints of files in the block, and yield the function that returns them for `done`."""

    def done(self, number: int, prints: Any = None) -> None:
        """Mark the pending batch as loaded; fingerprints that are not given are computed."""

    def forget(self, number: int) -> None:
        """Delete the plan of a batch that was not loaded."""

    def missing(self) -> list[MissingFile]:
        """Return the files of the pending batch that were removed."""


class SourceFeed:
    """The files of one source.

    Parameters
    ----------
    source, trigger
        Source configuration, and the limits of a batch.
    ledger
        Ledger of the batches and of the files.

    Attributes
    ----------
    ledger
        The ledger.
    """

    def __init__(self, source: SourceConfig, trigger: TriggerConfig, ledger: Ledger) -> None:
        self.ledger = ledger
        self._source = source
        self._intake = Intake(source, trigger, ledger)

    @property
    def listing_seconds(self) -> float:  # noqa: D102 - as in the protocol
        return self._intake.listing_seconds

    @property
    def waiting(self) -> int:
        """Number of listed files that no batch has taken yet."""
        return self._intake.waiting

    @property
    def left_out(self) -> tuple[LeftOut, ...]:  # noqa: D102 - as in the protocol
        return self._intake.left_out

    def take(self) -> list[FoundFile]:  # noqa: D102 - as in the protocol
        return self._intake.take()

    def share(self, files: Sequence[FoundFile]) -> str:  # noqa: D102 - as in the protocol
        return share_of(len(files), self.waiting)

    def plan(self, number: int, attempt: str, files: Sequence[FoundFile]) -> None:  # noqa: D102 - as in the protocol
        self.ledger.plan(number, attempt, files)

    @contextmanager
    def fingerprints(self, files: Sequence[FoundFile]) -> Iterator[Callable[[], dict[str, str | None]]]:
        """Compute the fingerprints of files in the block; give up if the block fails."""
        given_up = threading.Event()

        def take() -> dict[str, str | None]:
            return {file.name: self._fingerprint(file) for file in files if not given_up.is_set()}

        with ThreadPoolExecutor(1, "headrace-fingerprint") as pool:
            taken = pool.submit(take)
            try:
                yield taken.result
            finally:
                given_up.set()

    def done(self, number: int, prints: Mapping[str, str | None] | None = None) -> None:  # noqa: D102 - as above
        if prints is None:
            plan = self.ledger.pending()
            prints = {} if plan is None else {file.name: self._fingerprint(file) for file in plan.files}
        self.ledger.done(number, prints)

    def forget(self, number: int) -> None:  # noqa: D102 - as in the protocol
        self.ledger.forget(number)

    def missing(self) -> list[MissingFile]:  # noqa: D102 - as in the protocol
        plan, folder, label = self.ledger.pending(), self._source.path, self._source.label
        planned = [] if plan is None else [file.name for file in plan.files if file.name not in plan.skipped]
        return [
            MissingFile(folder, name, skip_command(name, label)) for name in planned if examine(folder, name) is None
        ]

    def _fingerprint(self, file: FoundFile) -> str | None:
        return fingerprint(self._source.path, file)
