"""Three typical queries of a flight warehouse, with the names joined in, answered without Spark."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.samples import Facts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["QUESTIONS", "TABLES", "Answer", "ask", "find_facts"]

TABLES = ("fact_flights", "dim_plane", "dim_airport", "dim_carrier")

QUESTIONS = {
    "Which airlines arrived latest, on average?": """
        SELECT c.name AS airline, count(*) AS flights, round(avg(f.arr_delay), 1) AS "minutes late"
        FROM fact_flights f JOIN dim_carrier c USING (carrier_key)
        WHERE f.arr_delay IS NOT NULL
        GROUP BY ALL HAVING count(*) >= 1000 ORDER BY 3 DESC, 1 LIMIT 5
    """,
    "Which routes were flown most?": """
        SELECT o.name AS "from", coalesce(d.name, d.faa || ' (not in airports)') AS "to", count(*) AS flights,
               round(avg(f.air_time)) AS "minutes in the air"
        FROM fact_flights f
        JOIN dim_airport o ON o.airport_key = f.origin_key
        JOIN dim_airport d ON d.airport_key = f.dest_key
        GROUP BY ALL ORDER BY flights DESC, 1, 2 LIMIT 5
    """,
    "What do we know of the aircraft?": """
        SELECT CASE WHEN p.plane_key = -1 THEN '(no tail number)' WHEN p.is_inferred THEN '(not in planes: inferred)'
                    ELSE p.manufacturer END AS maker,
               count(DISTINCT p.tailnum) AS aircraft, count(*) AS flights
        FROM fact_flights f JOIN dim_plane p USING (plane_key)
        GROUP BY ALL ORDER BY flights DESC, 1 LIMIT 8
    """,
}


FACTS = """
    SELECT count(*), count(*) FILTER (plane_key = -1), count(*) FILTER (plane_key = -1 OR is_inferred),
           (SELECT count(*) FROM dim_airport WHERE is_inferred)
    FROM fact_flights JOIN dim_plane USING (plane_key)
"""


@dataclass(frozen=True)
class Answer:
    """The answer to a question, as rows."""

    question: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def ask(warehouse: Path) -> list[Answer]:
    """Return the answers from the Delta tables in a folder."""
    with _opened(warehouse) as connection:
        return [_answer(connection, question, sql) for question, sql in QUESTIONS.items()]


def find_facts(warehouse: Path) -> Facts:
    """Return the facts of the data set as the Delta tables in a folder have them."""
    with _opened(warehouse) as connection:
        return Facts(*connection.execute(FACTS).fetchone())


@contextmanager
def _opened(warehouse: Path) -> Iterator[Any]:
    import duckdb  # noqa: PLC0415 - heavy, and needed here alone

    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")  # standard output is for the answers
        connection.execute("SET TimeZone = 'UTC'")
        for name in TABLES:
            connection.register(name, _dataset(warehouse / name))
        yield connection


def _dataset(folder: Path) -> Any:
    """Return a Delta table as a dataset on Arrow's own file system; deltalake's can abort Python at exit."""
    from deltalake import DeltaTable  # noqa: PLC0415 - heavy
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem  # noqa: PLC0415 - as above

    files = SubTreeFileSystem(str(folder.absolute()), LocalFileSystem())
    return DeltaTable(folder).to_pyarrow_dataset(filesystem=files)


def _answer(connection: Any, question: str, sql: str) -> Answer:
    found = connection.execute(sql)
    columns = tuple(column[0] for column in found.description)
    return Answer(question, columns, tuple(map(tuple, found.fetchall())))
