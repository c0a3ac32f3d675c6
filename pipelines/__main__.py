"""The entry point for Spark's own launchers: ``spark-submit .../pipelines/__main__.py PIPELINE.yml --once``.

``python -m headrace.pipelines`` also works. It prints the run as JSON on stdout; the `headrace` command has richer
output.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A script's own folder comes first in the module path, where this package's modules would hide others of the same name.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import argparse  # noqa: E402 - after the path has been fixed
import json  # noqa: E402 - as above
import logging  # noqa: E402 - as above

from headrace.pipelines.errors import QualityError  # noqa: E402 - as above
from headrace.pipelines.runner import run  # noqa: E402 - as above
from headrace.storage.errors import HeadraceError  # noqa: E402 - as above

_FAILED = 1
_QUALITY = 3
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a pipeline and return the exit code: 0 done, 1 failed, 3 bad quality, 130 stopped by a signal."""
    parser = argparse.ArgumentParser(prog="headrace.pipelines", description="Run a Headrace pipeline under Spark.")
    parser.add_argument("pipeline", help="the pipeline file")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--once", action="store_true", help="load the waiting files, then end")
    mode.add_argument("--follow", action="store_true", help="keep loading files as they arrive, until stopped")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    try:
        result = run(given.pipeline, follow=given.follow)
    except HeadraceError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _QUALITY if isinstance(error, QualityError) else _FAILED
    sys.stdout.write(json.dumps(result.as_dict()) + "\n")
    return 0 if result.signal is None else _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
