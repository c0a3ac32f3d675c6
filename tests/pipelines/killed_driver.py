"""A driver as a process of its own, which another writer disturbs at a step and which may be killed there.

`python killed_driver.py PIPELINE COMMAND STEP WRITER END` completes what an earlier driver left, puts the next files in
place, and then runs the command. `END` is `kill` (the driver, with SIGKILL), `executor` (an executor, soon after the
step), or `go` (nothing ends).
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headrace.pipelines.changes import apply_files, compact_dimension
from headrace.pipelines.config.model import load_pipeline
from headrace.pipelines.runner import run

EXECUTOR = b"CoarseGrainedExecutorBackend"


def put_next(folder):
    """Move the next file of changes and the next file of facts to where they are read."""
    for name in ("changes", "in"):
        waiting = sorted((folder / "next" / name).iterdir())
        if waiting:
            waiting[0].rename(folder / name / waiting[0].name)


def optimize(config):
    compact_dimension(config, "customer")
    if DeltaTable.is_deltatable(config.sink.path):
        _sql(f"OPTIMIZE delta.`{config.sink.path}`")


def append(config):
    """Append a fact by hand, with an order number that no file has."""
    if DeltaTable.is_deltatable(config.sink.path):
        names = [field.name for field in DeltaTable(config.sink.path).schema().fields]
        columns = ", ".join("-1" if name == "order" else f"`{name}`" for name in names)
        _sql(f"INSERT INTO delta.`{config.sink.path}` SELECT {columns} FROM delta.`{config.sink.path}` LIMIT 1")


def apply(config):
    """Apply changes to another dimension."""
    apply_files(config, "product", Path(config.source.path).parent / "products")


def merge(config):
    """Write rows of the dimension and of the facts again, as they are."""
    for path, key, column in (
        (config.dimensions["customer"].path, "customer_key", "city"),
        (config.sink.path, "order", "buyer_city"),
    ):
        even = f"SELECT DISTINCT `{key}` AS k FROM delta.`{path}` WHERE `{key}` % 2 = 0"
        _sql(
            f"MERGE INTO delta.`{path}` t USING ({even}) s ON "
            f"t.`{key}` = s.k WHEN MATCHED THEN UPDATE SET `{column}` = t.`{column}`"
        )


WRITERS = {"none": lambda _config: None, "optimize": optimize, "append": append, "apply": apply, "merge": merge}


def _sql(statement):
    SparkSession.active().sql(statement)


def _kill_an_executor(delay):
    """Kill one executor of this process's Spark with SIGKILL after some time."""
    time.sleep(delay)
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command, parents = (place / "cmdline").read_bytes(), _ancestors(int(place.name))
        except (OSError, ValueError):
            continue
        if EXECUTOR in command and os.getpid() in parents:
            os.kill(int(place.name), signal.SIGKILL)
            return


def _ancestors(process):
    found = []
    while process > 1:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(process)
    return found


def disturbing(config, step, writer, end):
    """Return a hook that acts when a step is reached first."""
    acted = []

    def hook(name):
        if name != step or acted:
            return
        acted.append(name)
        WRITERS[writer](config)
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif end == "executor":
            threading.Thread(target=_kill_an_executor, args=(0.3,), daemon=True).start()

    return hook, acted


def main(pipeline, command, step, writer, end):
    config = load_pipeline(pipeline)
    folder = Path(config.source.path).parent
    if command != "local":
        run(pipeline)
    put_next(folder)
    hook, acted = disturbing(config, step, writer, end)
    if command == "run":
        run(pipeline, hook=hook)
    else:
        engine = "local" if command == "local" else "spark"
        apply_files(config, "customer", folder / "changes", engine=engine, hook=hook)
    return 0 if acted else 7


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
