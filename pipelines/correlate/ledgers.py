"""The ledgers of a correlation: one for the batches and the identity of the stream, one for the files of each source.

A batch is planned in the ledger of the stream first and marked there last, so a batch that any ledger still plans is
pending there too.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

from headrace.pipelines.errors import LedgerError
from headrace.pipelines.source.discovery import FoundFile
from headrace.pipelines.source.feed import SourceFeed, share_of
from headrace.pipelines.source.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.pipelines.config.correlation import CorrelationConfig
    from headrace.pipelines.source.discovery import LeftOut
    from headrace.pipelines.source.feed import MissingFile

__all__ = ["SourceLedgers", "Waiting"]

Waiting = dict[str, list[FoundFile]]
Prints = dict[str, dict[str, str | None]]


class SourceLedgers:
    """The feed of a correlation: the files of its sources; a context manager that closes the ledgers.

    Methods without a description are those of `headrace.pipelines.source.feed.Feed`.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    clock
        Function that returns seconds since 1970.

    Attributes
    ----------
    ledger
        Ledger of the batches.
    """

    def __init__(self, config: CorrelationConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._stack = ExitStack()
        try:
            self.ledger = self._stack.enter_context(Ledger(str(config.checkpoint), clock))
            self._sources = {
                name: SourceFeed(
                    source,
                    config.trigger,
                    self._stack.enter_context(Ledger(str(config.of_source(name).checkpoint), clock)),
                )
                for name, source in config.sources.items()
            }
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def last_loaded(self) -> tuple[int, str] | None:
        """Return number and attempt of the last loaded batch, or None."""
        number = self.ledger.last_loaded()
        attempt = None if number is None else self.ledger.attempt_of(number)
        return None if number is None or attempt is None else (number, attempt)

    def require(self, loaded: Mapping[str, int]) -> None:
        """Refuse ledgers that do not have batches which were loaded: their files would be loaded again.

        Parameters
        ----------
        loaded
            For each source, the last batch that had files of it.

        Raises
        ------
        LedgerError
            If the ledger of a source was removed, or replaced by an older copy.
        """
        config = self._config
        for name, number in loaded.items():
            ledger = self._sources[name].ledger
            last = ledger.last_loaded()
            if last is None or last < number:
                raise LedgerError(
                    f"the ledger {ledger.path} of source {name!r} does not have batch {number}, which was loaded: it "
                    "was removed, or is an older copy, so a run would load files again. Restore the folder "
                    f"{config.checkpoint} from a backup of the last batch; or, to load every file again, remove "
                    f"{config.sink.path}, {config.errors_path} and {config.checkpoint}, and the state if it is "
                    "elsewhere"
                )

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Entries that the last listings skipped, with the name of the source in front."""
        return tuple(
            left._replace(name=f"{name}/{left.name}")
            for name, source in self._sources.items()
            for left in source.left_out
        )

    @property
    def listing_seconds(self) -> float:
        """Duration of the last listings in seconds."""
        return sum(source.listing_seconds for source in self._sources.values())

    def take(self) -> Waiting:
        """Return the files of the next batch by source; empty if no source has new files."""
        taken = {name: source.take() for name, source in self._sources.items()}
        return {name: files for name, files in taken.items() if files}

    def share(self, files: Mapping[str, Sequence[FoundFile]]) -> str:
        """Return how many of the listed files these are."""
        return share_of(sum(map(len, files.values())), sum(source.waiting for source in self._sources.values()))

    def plan(self, number: int, attempt: str, files: Mapping[str, Sequence[FoundFile]]) -> None:
        """Record a batch before any part of it is written."""
        self.ledger.plan(number, attempt, ())
        for name, each in files.items():
            self._sources[name].plan(number, attempt, each)

    @contextmanager
    def fingerprints(self, files: Mapping[str, Sequence[FoundFile]]) -> Iterator[Callable[[], Prints]]:
        """Compute the fingerprints of the files of each source in the block."""
        with ExitStack() as stack:
            taken = {name: stack.enter_context(self._sources[name].fingerprints(each)) for name, each in files.items()}
            yield lambda: {name: prints() for name, prints in taken.items()}

    def done(self, number: int, prints: Prints | None = None) -> None:
        """Mark the pending batch as loaded."""
        for name, source in self._sources.items():
            if source.ledger.pending() is not None:
                source.done(number, None if prints is None else prints.get(name))
        self.ledger.done(number)

    def forget(self, number: int) -> None:
        """Delete the plan of a batch that was not loaded."""
        for source in self._sources.values():
            source.forget(number)
        self.ledger.forget(number)

    def missing(self) -> list[MissingFile]:
        """Return the files of the pending batch that were removed."""
        return [file for source in self._sources.values() for file in source.missing()]
