"""The ledgers of a correlation: one for the batches and the identity of the stream, one for the files of each source.

A batch is planned in the ledger of the stream first and marked there last, so a batch that any ledger still plans is
pending there too.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from headrace.pipelines.source.discovery import FoundFile, fingerprint
from headrace.pipelines.source.intake import Intake
from headrace.pipelines.source.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.pipelines.config.correlation import CorrelationConfig
    from headrace.pipelines.source.discovery import LeftOut

__all__ = ["SourceLedgers", "Waiting"]

Waiting = dict[str, list[FoundFile]]


@dataclass(frozen=True)
class _Source:
    folder: str
    ledger: Ledger
    intake: Intake


class SourceLedgers:
    """The ledgers of a correlation; a context manager that closes them.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    clock
        Function that returns seconds since 1970.

    Attributes
    ----------
    stream
        Ledger of the batches.
    """

    def __init__(self, config: CorrelationConfig, clock: Callable[[], float]) -> None:
        self._stack = ExitStack()
        try:
            self.stream = self._stack.enter_context(Ledger(str(config.checkpoint), clock))
            self._sources: dict[str, _Source] = {}
            for name, source in config.sources.items():
                ledger = self._stack.enter_context(Ledger(str(config.of_source(name).checkpoint), clock))
                intake = Intake(source, config.trigger, ledger)
                self._sources[name] = _Source(source.path, ledger, intake)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Entries that the last listings skipped, with the name of the source in front."""
        return tuple(
            left._replace(name=f"{name}/{left.name}")
            for name, source in self._sources.items()
            for left in source.intake.left_out
        )

    @property
    def listing_seconds(self) -> float:
        """Duration of the last listings in seconds."""
        return sum(source.intake.listing_seconds for source in self._sources.values())

    @property
    def folders(self) -> dict[str, str]:
        """Folder of each source."""
        return {name: source.folder for name, source in self._sources.items()}

    def take(self) -> Waiting:
        """Return the files of the next batch by source; empty if no source has new files."""
        taken = {name: source.intake.take() for name, source in self._sources.items()}
        return {name: files for name, files in taken.items() if files}

    def plan(self, number: int, attempt: str, files: Mapping[str, Sequence[FoundFile]]) -> None:
        """Record a batch before any part of it is written."""
        self.stream.plan(number, attempt, ())
        for name, each in files.items():
            self._sources[name].ledger.plan(number, attempt, each)

    def planned(self) -> dict[str, tuple[str, tuple[FoundFile, ...], frozenset[str]]]:
        """Return folder, files and skipped files of each source in the pending batch."""
        found = {}
        for name, source in self._sources.items():
            plan = source.ledger.pending()
            if plan is not None:
                found[name] = source.folder, plan.files, plan.skipped
        return found

    def done(self, number: int, prints: Mapping[str, Mapping[str, str | None]] | None = None) -> None:
        """Mark the pending batch as loaded.

        Parameters
        ----------
        number
            Number of the batch.
        prints
            Fingerprints of the files of each source; None to compute them.
        """
        for name, source in self._sources.items():
            plan = source.ledger.pending()
            if plan is not None:
                known = None if prints is None else prints.get(name)
                found = {file.name: fingerprint(source.folder, file) for file in plan.files} if known is None else known
                source.ledger.done(number, found)
        self.stream.done(number)

    def forget(self, number: int) -> None:
        """Delete the plan of a batch that was not loaded."""
        for source in self._sources.values():
            source.ledger.forget(number)
        self.stream.forget(number)
