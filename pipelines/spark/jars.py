"""Delta's jars: Spark's own resolver downloads them once, and Headrace then uses them offline from the cache.

This module defines the location of the cache and fills it. `sessions` starts a session with the jars.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.pipelines.errors import JarsUnavailableError, JavaNotFoundError, SparkStartError
from headrace.pipelines.paths import home_expanded

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cache_folder", "delta_coordinates", "delta_jars", "jars_are_cached", "require_java", "require_user"]

_ARTIFACT = re.compile(r"(?:[^_]+_)?(.+?)-\d[^-]*(?:-\d+)?\.jar")
_RESOLVE_SECONDS = 900
JAVA_REMEDY = "install a Java runtime, version 17 or 21, and put it on PATH or name its folder in JAVA_HOME"


def cache_folder() -> Path:
    """Return the cache folder, for files that Headrace can download or build again.

    The folder is HEADRACE_CACHE if it is set, else `headrace` in the user's cache. If there is no home folder, or the
    cache is not writable, it is a per-user folder in the temporary directory.

    Raises
    ------
    PipelineFileError
        If HEADRACE_CACHE starts with ``~`` and there is no home folder.
    JarsUnavailableError
        If the folder in the temporary directory belongs to another user.
    """
    chosen = os.environ.get("HEADRACE_CACHE")
    if chosen:
        return home_expanded(chosen).absolute()
    folder = _usual_cache()
    return folder if folder is not None else _temporary_cache()


def _usual_cache() -> Path | None:
    """Return the `headrace` folder in the user's cache; None if there is no home folder or it is not writable."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if folder.is_absolute() and os.access(folder, os.W_OK) else None


def _temporary_cache() -> Path:
    """Return the per-user temporary folder. Code is loaded from it, so no other user may have write access."""
    folder = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        seen = folder.lstat()
    except OSError as error:
        raise JarsUnavailableError(
            f"there is no folder for Delta's jars and replicas: {error}; name one in HEADRACE_CACHE"
        ) from error
    if seen.st_uid != os.getuid() or not stat.S_ISDIR(seen.st_mode) or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise JarsUnavailableError(
            f"{folder} is not a folder that this user alone can write to; remove it, or name a folder in HEADRACE_CACHE"
        )
    return folder


def require_java() -> None:
    """Raise `JavaNotFoundError` if Java is not installed."""
    home = os.environ.get("JAVA_HOME")
    if home and not os.access(Path(home) / "bin" / "java", os.X_OK):
        raise JavaNotFoundError(f"JAVA_HOME is {home}, but there is no bin/java in it; {JAVA_REMEDY}")
    if not home and shutil.which("java") is None:
        raise JavaNotFoundError(f"no Java was found, and Spark needs one; {JAVA_REMEDY}")


def require_user() -> None:
    """Raise `SparkStartError` if the user has no name, as in a container that runs under a numeric id."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError as error:
        raise SparkStartError(
            f"user id {os.getuid()} has no entry in the system's list of users, and Hadoop, which Spark needs, refuses "
            "to start without one; run as a user that has an entry, or add one in the image: "
            f"echo 'headrace:x:{os.getuid()}:{os.getgid()}::/tmp:/bin/sh' >> /etc/passwd"
        ) from error


def delta_coordinates() -> str:
    """Return the Maven coordinates of the Delta release that fits the installed Spark."""
    from delta import configure_spark_with_delta_pip  # noqa: PLC0415 - pyspark is heavy
    from pyspark.sql import SparkSession  # noqa: PLC0415 - as above

    builder = configure_spark_with_delta_pip(SparkSession.Builder())
    return str(builder._options["spark.jars.packages"])  # noqa: SLF001 - there is no public way to read the helper's choice


def delta_jars() -> list[Path]:
    """Return Delta's jars, and download them if they are not in the cache.

    Raises
    ------
    JarsUnavailableError
        If the jars are not in the cache and cannot be downloaded. The message gives the remedy.
    JavaNotFoundError
        If the jars must be downloaded and Java is not installed.
    """
    coordinates = delta_coordinates()
    folder = _jars_folder(coordinates)
    found = _listed(folder)
    if found is None:
        require_java()
        require_user()
        with _locked(folder):
            found = _listed(folder) or _fetch(coordinates, folder)
    return found


def jars_are_cached() -> bool:
    """Return whether the cache holds Delta's jars, so that Spark can start without a download."""
    return _listed(_jars_folder(delta_coordinates())) is not None


def _jars_folder(coordinates: str) -> Path:
    return cache_folder() / "jars" / re.sub(r"[^\w.-]", "_", coordinates)


def _listed(folder: Path) -> list[Path] | None:
    """Return the jars of a completed download; None if there was no such download or a jar was removed."""
    try:
        names = (folder / "complete.txt").read_text().split()
    except (FileNotFoundError, NotADirectoryError):
        return None
    jars = [folder / "jars" / name for name in names]
    return jars if all(jar.is_file() for jar in jars) else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise JarsUnavailableError(
            f"the cache for Delta's jars cannot be written: {error}; name another folder in HEADRACE_CACHE"
        ) from error


def _fetch(coordinates: str, folder: Path) -> list[Path]:
    log = folder / "resolver.log"
    code = _run_resolver(coordinates, folder, log)
    fetched = sorted((folder / "jars").glob("*.jar"))
    if code != 0 or not fetched:
        raise JarsUnavailableError(
            f"Delta's jars ({coordinates}) are not in the cache and could not be fetched: {_cause(log)}; connect to "
            f"the network (or point spark.jars.ivySettings at your mirror) and run again; details in {log}"
        )
    jars = [jar for jar in fetched if _artifact(jar) not in _spark_artifacts()]
    partial = folder / "complete.tmp"
    partial.write_text("\n".join(jar.name for jar in jars))
    partial.replace(folder / "complete.txt")
    return jars


def _run_resolver(coordinates: str, folder: Path, log: Path) -> int:
    """Start Spark once with an empty program, so that its resolver downloads the packages into `folder`/jars."""
    from pyspark.find_spark_home import _find_spark_home  # noqa: PLC0415 - pyspark is heavy

    program = folder / "nothing.py"
    program.write_text("")
    command = [
        str(Path(_find_spark_home()) / "bin" / "spark-submit"),
        *("--master", "local[1]", "--packages", coordinates, "--conf", f"spark.jars.ivy={folder}", str(program)),
    ]
    environment = {k: v for k, v in os.environ.items() if k not in {"PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT"}}
    with log.open("wb") as sink:
        try:
            done = subprocess.run(  # noqa: S603 - Spark's own launcher
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                timeout=_RESOLVE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1
    return done.returncode


def _cause(log: Path) -> str:
    """Return the line of the resolver's log that best explains the failure."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for telling in ("unresolved dependency", "UnknownHost", "not found", "Connection", "Exception"):
        for line in lines:
            if telling in line:
                return line.lstrip(": ")
    return lines[-1] if lines else "the resolver said nothing"


def _artifact(jar: Path) -> str:
    """Return the artifact name of a jar, without organization and version.

    Examples
    --------
    >>> _artifact(Path("org.slf4j_slf4j-api-2.0.13.jar")), _artifact(Path("zstd-jni-1.5.7-3.jar"))
    ('slf4j-api', 'zstd-jni')
    """
    match = _ARTIFACT.fullmatch(jar.name)
    return match[1] if match else jar.stem


def _spark_artifacts() -> frozenset[str]:
    """Return the artifacts that Spark includes. Spark's versions take precedence, so Delta's copies are not loaded."""
    from pyspark.find_spark_home import _find_spark_home  # noqa: PLC0415 - pyspark is heavy

    return frozenset(re.sub(r"-\d.*\.jar$", "", jar.name) for jar in (Path(_find_spark_home()) / "jars").glob("*.jar"))
