"""Spark sessions with Delta: started by Headrace, or an existing one under spark-submit. No batch logic.

If Headrace starts the JVM, its output goes to a log file, and a failure to start becomes a one-line error with its
remedy.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.pipelines.errors import JavaNotFoundError, SparkStartError
from headrace.pipelines.spark.jars import (
    JAVA_REMEDY,
    cache_folder,
    delta_coordinates,
    delta_jars,
    require_java,
    require_user,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from headrace.pipelines.config.correlation import CorrelationConfig
    from headrace.pipelines.config.model import PipelineConfig

__all__ = ["SparkSettings", "session", "spark_log", "spark_settings", "stop"]

_LOG = logging.getLogger(__name__)
_LOGS_KEPT = 20
_TAIL_LINES = 8
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]+")
_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"

# Options for every session, whether Headrace started it or not. Spark measures an Arrow batch after each row unless its
# size is unlimited, and the measurement dominates the run time; the row limit bounds the batch well enough. Persisted
# frames are read once, so compression does not pay. Many readers of Delta tables take Spark's INT96 timestamps as
# nanoseconds, which do not reach beyond the years 1677 to 2262.
_RUNTIME_CONF = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.validateSchema.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.databricks.delta.snapshotPartitions": "2",
}
# Headrace plans stages explicitly. Adaptive execution would start several jobs for each of them.
_START_CONF = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.extensions": _EXTENSION,
    "spark.sql.catalog.spark_catalog": _CATALOG,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
}
_LOCAL_CONF = {
    "spark.driver.host": "localhost",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
}


@dataclass(frozen=True)
class SparkSettings:
    """Settings that start Spark.

    Parameters
    ----------
    master
        Spark's master URL; None for the one that spark-submit sets, else every core of this machine with four attempts
        a task (`local[*,4]`), so that a killed worker does not end the run.
    app_name
        Application name that Spark shows.
    shuffle_partitions
        Default number of shuffle partitions.
    conf
        Additional Spark options, which override the defaults here.
    """

    master: str | None = None
    app_name: str = "headrace"
    shuffle_partitions: int = 4
    conf: Mapping[str, str] = field(default_factory=dict)


def spark_settings(config: PipelineConfig | CorrelationConfig) -> SparkSettings:
    """Return the settings that a pipeline file has for Spark."""
    conf = {name: _option_text(value) for name, value in config.spark.conf.items()}
    return SparkSettings(master=config.spark.master, app_name=f"headrace {config.name}", conf=conf)


def _option_text(value: str | float) -> str:
    """Return an option value as Spark writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def session(settings: SparkSettings | None = None) -> SparkSession:
    """Return a Spark session that reads and writes Delta tables.

    An existing session or JVM (spark-submit, a notebook) is reused, and receives Delta's jars if it does not have them.

    Raises
    ------
    JavaNotFoundError, JarsUnavailableError, SparkStartError
        If Spark cannot start. The message is one line with the remedy.
    """
    settings = settings or SparkSettings()
    from pyspark import SparkContext  # noqa: PLC0415 - pyspark is heavy

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if SparkContext._active_spark_context is not None:  # noqa: SLF001 - there is no public way to ask
        return _configured(_active_session(), settings)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    conf = _start_conf(settings, submitted=submitted)
    if submitted:
        _join_jvm(conf)
    elif SparkContext._gateway is None:  # noqa: SLF001 - as above
        _start_jvm(conf)
    return _configured(_create(conf), settings)


def stop(spark: SparkSession) -> None:
    """Stop the session. Its JVM ends with this process."""
    spark.stop()


def _active_session() -> SparkSession:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

    spark = SparkSession.builder.getOrCreate()
    if _EXTENSION not in (spark.sparkContext.getConf().get("spark.sql.extensions") or ""):
        raise SparkStartError(
            f"the running Spark session does not know Delta: start it with --packages {delta_coordinates()} "
            f"--conf spark.sql.extensions={_EXTENSION} --conf spark.sql.catalog.spark_catalog={_CATALOG}, or "
            "stop it first"
        )
    return spark


def _configured(spark: SparkSession, settings: SparkSettings) -> SparkSession:
    for key, value in _RUNTIME_CONF.items():
        spark.conf.set(key, settings.conf.get(key, value))
    return spark


def _start_conf(settings: SparkSettings, *, submitted: bool) -> dict[str, str]:
    """Return all options of a new context; under spark-submit, keep the master and memory that it set."""
    conf = dict(_START_CONF)
    conf["spark.sql.shuffle.partitions"] = str(settings.shuffle_partitions)
    conf["spark.app.name"] = settings.app_name
    if not submitted:
        master = settings.master or "local[*,4]"
        conf["spark.master"] = master
        if master.startswith("local"):
            conf |= _LOCAL_CONF
    conf |= _RUNTIME_CONF
    conf |= dict(settings.conf)
    return conf


def _create(conf: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is heavy

    builder = SparkSession.builder
    for key, value in conf.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SparkStartError(f"Spark did not start: {first}; check the master {conf.get('spark.master')}") from error


def _start_jvm(conf: dict[str, str]) -> None:
    """Start the JVM with a log file for output, in a separate process session, so that Ctrl-C reaches only Python."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - pyspark is heavy
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415 - as above

    require_java()
    require_user()
    conf["spark.jars"] = _joined(conf.get("spark.jars"), delta_jars())
    spark_conf = SparkConf(loadDefaults=False)
    for key, value in conf.items():
        spark_conf.set(key, value)
    log = _log_file()
    with log.open("wb") as sink:
        options = {"stdout": sink, "stderr": sink, "start_new_session": True}
        _leave_removed_folder()
        try:
            with _plain_locale():
                gateway = launch_gateway(spark_conf, popen_kwargs=options)
        except Exception as error:
            raise _start_error(log) from error
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 - the hook that accepts a gateway
    _LOG.debug("Spark's log is %s", log)


def _join_jvm(conf: dict[str, str]) -> None:
    """Connect to the JVM of spark-submit, and add Delta's jars if it started without them."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - pyspark is heavy

    SparkContext._ensure_initialized(conf=SparkConf())  # noqa: SLF001 - connects without starting a context
    jvm: Any = SparkContext._jvm  # noqa: SLF001 - as above
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    if loader.getResource(_EXTENSION.replace(".", "/") + ".class") is not None:
        return
    jars = delta_jars()
    for jar in _plainly_named(jars):
        loader.addURL(jvm.java.io.File(str(jar)).toURI().toURL())
    conf["spark.jars"] = _joined(SparkConf().get("spark.jars", ""), jars)


def _joined(given: str | None, jars: list[Path]) -> str:
    return ",".join([*filter(None, [given]), *(jar.as_uri() for jar in _plainly_named(jars))])


def _plainly_named(jars: list[Path]) -> list[Path]:
    """Return jar paths that Spark reads literally: it decodes percent signs twice, and * is a pattern."""
    if all(_PLAIN_PATH.fullmatch(str(jar)) for jar in jars):
        return jars
    folder = Path(tempfile.mkdtemp(prefix="headrace-jars-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    links = [folder / jar.name for jar in jars]
    for link, jar in zip(links, jars, strict=True):
        link.symlink_to(jar)
    return links


@contextmanager
def _plain_locale() -> Iterator[None]:
    """Give the JVM a locale with UTF-8 paths and standard lowercase rules.

    In the C locale, Java writes non-ASCII characters in paths as question marks. The Turkish locale lowercases I to a
    dotless i.
    """
    before = os.environ.get("LC_ALL")
    if sys.platform == "linux":
        os.environ["LC_ALL"] = "C.UTF-8"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("LC_ALL", None)
        else:
            os.environ["LC_ALL"] = before


def _leave_removed_folder() -> None:
    """Change to the root folder if the current folder was removed: Java and Spark's scripts cannot start there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def _log_file() -> Path:
    """Return the path of a new log file, and delete the oldest existing ones."""
    folder = cache_folder() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SparkStartError(f"Spark's log cannot be written: {error}; name a folder in HEADRACE_CACHE") from error
    for old in sorted(folder.glob("spark-*.log"))[: -_LOGS_KEPT + 1]:
        old.unlink(missing_ok=True)
    return folder / f"spark-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"


def spark_log(host: str, pid: int) -> str | None:
    """Return the path of a driver's Spark log; None if the driver ran on another host or the log was removed."""
    if host != socket.gethostname():
        return None
    found = sorted((cache_folder() / "logs").glob(f"spark-*-{pid}.log"))
    return str(found[-1]) if found else None


def _start_error(log: Path) -> SparkStartError:
    text = log.read_text(errors="replace") if log.exists() else ""
    if "UnsupportedClassVersionError" in text or "Unrecognized option: --" in text:
        return JavaNotFoundError(f"the Java that was found is too old for Spark; {JAVA_REMEDY}; details in {log}")
    if "JAVA_HOME is not set" in text or "java: not found" in text or "java: No such file" in text:
        return JavaNotFoundError(f"no Java was found, and Spark needs one; {JAVA_REMEDY}; details in {log}")
    return SparkStartError(f"Spark's JVM did not start: {_telling(text)}; details in {log}")


def _telling(text: str) -> str:
    """Return the lines of a log that explain the failure, without the stack trace."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    spoken = [line for line in lines if not line.startswith(("at ", "... "))]
    errors = [line for line in spoken if "Exception" in line or "Error" in line]
    return " | ".join(errors[:1] or spoken[-_TAIL_LINES:]) or "it said nothing"
