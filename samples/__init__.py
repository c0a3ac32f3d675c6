"""Location of the sample data: paths and known facts about the data set. Loads no data into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["NYCFLIGHTS13", "NYCFLIGHTS13_FACTS", "Facts", "Sample"]


@dataclass(frozen=True)
class Sample:
    """The files of a star schema: a stream of facts in files, and the dimensions that the facts reference.

    Parameters
    ----------
    folder
        Folder of the files.
    """

    folder: Path

    @property
    def flights(self) -> Path:
        """Folder of Parquet files, one per week, named by the first day of the week."""
        return self.folder / "flights"

    @property
    def planes(self) -> Path:
        """Parquet file of the planes, natural key ``tailnum``."""
        return self.folder / "planes.parquet"

    @property
    def airports(self) -> Path:
        """Parquet file of the airports, natural key ``faa``."""
        return self.folder / "airports.parquet"

    @property
    def airlines(self) -> Path:
        """Parquet file of the airlines, natural key ``carrier``."""
        return self.folder / "airlines.parquet"

    @property
    def pipeline(self) -> Path:
        """Pipeline file that loads the flights; `headrace demo` runs it."""
        return self.folder / "pipeline.yml"


@dataclass(frozen=True)
class Facts:
    """Known results of a load of the full year, for verification."""

    flights: int
    flights_without_plane: int
    flights_not_in_planes: int
    destinations_not_in_airports: int


NYCFLIGHTS13 = Sample(Path(__file__).parent / "nycflights13")
NYCFLIGHTS13_FACTS = Facts(
    flights=336_776,
    flights_without_plane=2_512,
    flights_not_in_planes=52_606,
    destinations_not_in_airports=4,
)
