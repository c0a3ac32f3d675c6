"""Manifests: the runs that are the state after a batch, and what else the next batch must know.

A manifest is a file of its own for each attempt at a batch. It names the manifest that it follows by its digest. The
commit of the results names the manifest of the batch and its digest, so exactly one attempt counts. Files that the
current manifest does not name are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.pipelines.config.join_plan import definition_changes
from headrace.pipelines.correlate.runs import RunRef
from headrace.pipelines.durable import create_whole, sync_folder, write_new
from headrace.pipelines.errors import PipelineFileError, StateDamagedError
from headrace.storage.errors import StorageIOError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["RESULTS", "Manifest", "ManifestRef", "StateFolder"]

RESULTS: Final = "results"
"""Subfolder with the results of a batch that go through steps; no later batch needs them."""

_VERSION: Final = 1
_SUFFIX: Final = ".manifest"
_FRAME: Final = b"\n"
_OWNER: Final = "owner.json"
_UUID: Final = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_WRITTEN: Final = re.compile(rf"\d{{10}}-([0-9a-f]{{8}}-[0-9a-f]{{32}}\.run|{_UUID}\.manifest)|{_UUID}\.host")
_UNFINISHED: Final = re.compile(rf"\.{_UUID}\.tmp")
_RESULT: Final = re.compile(rf"part-{_UUID}\.snappy\.parquet")
_RECENT: Final = 64


@dataclass(frozen=True)
class Manifest:
    """State after a batch.

    Parameters
    ----------
    batch, attempt
        Number of the batch, -1 before the first one, and id of the attempt.
    definition
        Text that is the same for all pipelines that can use the state, see `JoinPlan.definition`.
    runs
        Runs of the state.
    newest
        For each source with a time, the greatest time so far in ticks.
    watermarks
        For each source with a time, the time below which its rows are late.
    previous
        Digest of the manifest of the batch before; empty for the first.
    recent
        Attempts that loaded the latest batches, this one included, by number of the batch.
    files
        For each source, the last batch that had files of it.
    """

    batch: int
    attempt: str
    definition: str
    runs: tuple[RunRef, ...] = ()
    newest: Mapping[str, int] = field(default_factory=dict)
    watermarks: Mapping[str, int] = field(default_factory=dict)
    previous: str = ""
    recent: Mapping[int, str] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def first(cls, definition: str) -> Manifest:
        """Return the state before the first batch."""
        return cls(-1, "", definition)

    def text(self) -> bytes:
        """Return the content of the file, without its digest."""
        document = {
            "version": _VERSION, "batch": self.batch, "attempt": self.attempt, "definition": self.definition,
            "newest": dict(self.newest), "watermarks": dict(self.watermarks), "previous": self.previous,
            "recent": {str(number): attempt for number, attempt in self.recent.items()},
            "files": dict(self.files), "runs": [run.document() for run in self.runs],
        }  # fmt: skip
        return json.dumps(document).encode()

    def digest(self) -> str:
        """Return the digest of the content."""
        return hashlib.sha256(self.text()).hexdigest()

    @property
    def file(self) -> str:
        """Name of the file."""
        return ManifestRef(self.batch, self.attempt).file

    def size(self) -> dict[str, int]:
        """Return the number of runs, of their rows and of their bytes."""
        rows, nbytes = (sum(getattr(run, name) for run in self.runs) for name in ("rows", "nbytes"))
        return {"runs": len(self.runs), "rows": rows, "bytes": nbytes}

    def after(
        self,
        batch: int,
        attempt: str,
        runs: tuple[RunRef, ...],
        newest: Mapping[str, int],
        marks: Mapping[str, int],
        sources: Iterable[str] = (),
    ) -> Manifest:
        """Return the manifest of the batch that follows, which has files of `sources`."""
        previous = "" if self.batch < 0 else self.digest()
        recent = {**{number: each for number, each in self.recent.items() if number > batch - _RECENT}, batch: attempt}
        return replace(
            self, batch=batch, attempt=attempt, runs=runs, newest=newest, watermarks=marks, previous=previous,
            recent=recent, files={**self.files, **dict.fromkeys(sources, batch)},
        )  # fmt: skip


@dataclass(frozen=True)
class ManifestRef:
    """What the commit of the results says about the manifest of its batch."""

    batch: int
    attempt: str
    digest: str | None = None

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{self.batch:010d}-{self.attempt}{_SUFFIX}"


class StateFolder:
    """The folder of a correlation's state.

    Parameters
    ----------
    folder
        The folder.
    stream, pipeline
        Identity of the stream whose state it is, and name of its pipeline.
    remedy
        What to do if the state is damaged, for messages.
    """

    def __init__(self, folder: str, stream: str, pipeline: str, remedy: str) -> None:
        self.path = Path(folder)
        self._owner = {"stream": stream, "pipeline": pipeline}
        self._remedy = remedy

    def claim(self) -> None:
        """Create the folder if it does not exist, and note durably that it is this stream's.

        Raises
        ------
        PipelineFileError
            If it is another stream's.
        StateDamagedError
            If it holds state, but does not say whose.
        StorageIOError
            If it cannot be written.
        """
        if self.require_own():
            return
        with self._written():
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileExistsError):  # another run was faster; perhaps that of another pipeline
                create_whole(self.path / _OWNER, json.dumps(self._owner).encode() + _FRAME)
        self._require_claimed()

    def require_own(self) -> bool:
        """Return whether the folder is this stream's; False if no one has claimed it. This function writes nothing.

        Raises
        ------
        PipelineFileError, StateDamagedError
            As in `claim`.
        """
        place = self.path / _OWNER
        try:
            text = place.read_bytes()
        except FileNotFoundError:
            if self.path.is_dir() and any(_WRITTEN.fullmatch(entry.name) for entry in self.path.iterdir()):
                raise self._damaged(f"{place} is missing, which says whose state it is") from None
            return False
        except OSError as error:
            raise self._damaged(f"{place} is not a readable file: {error}") from error
        try:
            owner = json.loads(text)
            stream, pipeline = owner["stream"], owner["pipeline"]
        except (ValueError, KeyError, TypeError) as error:
            raise PipelineFileError(
                f"correlate.state: {place} does not say whose state the folder holds; remove this file if the folder "
                "holds no runs and manifests, otherwise restore the folder from a backup"
            ) from error
        if stream != self._owner["stream"]:
            raise PipelineFileError(
                f"correlate.state: {self.path} holds the state of pipeline {pipeline} (stream {stream}), but this is "
                f"pipeline {self._owner['pipeline']} (stream {self._owner['stream']}); name another folder, or, if "
                "that stream no longer exists, remove the folder"
            )
        return True

    def _require_claimed(self) -> None:
        if not self.require_own():
            raise self._damaged(f"{self.path / _OWNER} is missing, which says whose state it is")

    def write(self, manifest: Manifest) -> None:
        """Write a manifest durably, after checking that all its runs are there.

        Raises
        ------
        StateDamagedError
            If a run is missing or has another size.
        """
        self._require_claimed()
        self._require_runs(manifest)
        text, digest = manifest.text(), manifest.digest()
        with self._written():
            write_new(self.path / manifest.file, text + _FRAME + digest.encode() + _FRAME)
            sync_folder(self.path)

    def read(self, ref: ManifestRef, definition: str) -> Manifest:
        """Return the manifest of a batch, all of whose runs are there.

        Raises
        ------
        StateDamagedError
            If the manifest or a run is missing or damaged.
        PipelineFileError
            If the pipeline had other sources or conditions.
        """
        place = self.path / ref.file
        try:
            text, digest, rest = place.read_bytes().split(_FRAME)
        except FileNotFoundError as error:
            raise self._damaged(f"{place} is missing") from error
        except OSError as error:
            raise self._damaged(f"{place} is not a readable file: {error}") from error
        except ValueError as error:
            raise self._damaged(f"{place} is cut off") from error
        found = hashlib.sha256(text).hexdigest()
        if rest or found != digest.decode(errors="replace") or ref.digest not in {None, found}:
            raise self._damaged(f"{place} is not what was written")
        manifest = self._parsed(json.loads(text), place)
        if manifest.definition != definition:
            raise PipelineFileError(
                f"the pipeline file declares other sources, columns or conditions than batch {ref.batch} had "
                f"({definition_changes(manifest.definition, definition)}), so the state in {self.path} cannot be "
                "continued; restore them, or declare the new join as another pipeline with its own name and table, "
                "which begins with all files"
            )
        self._require_runs(manifest)
        return manifest

    def clean(self, manifest: Manifest) -> list[str]:
        """Remove the files of this stream that a manifest does not name, and all results; return their names.

        No task may be at work. Files with names that no pipeline gives, and folders, stay.
        """
        self._require_claimed()
        named = {run.file for run in manifest.runs} | {manifest.file}
        results, removed = self.path / RESULTS, []
        with self._written():
            patterns = (_WRITTEN, _UNFINISHED)
            entries = [entry for entry in self.path.iterdir() if any(each.fullmatch(entry.name) for each in patterns)]
            if results.is_dir():
                entries += [entry for entry in results.iterdir() if _RESULT.fullmatch(entry.name)]
            for entry in sorted(entries):
                if entry.name not in named and entry.is_file():
                    entry.unlink(missing_ok=True)
                    removed.append(entry.name)
        return removed

    @contextmanager
    def shown(self, token: str) -> Iterator[Path]:
        """Create a file by which tasks can see that their host has the folder; remove it at the end."""
        place = self.path / f"{token}.host"
        with self._written():
            place.touch()
        try:
            yield place
        finally:
            with suppress(OSError):  # `clean` removes it, too
                place.unlink(missing_ok=True)

    def _parsed(self, document: Mapping[str, Any], place: Path) -> Manifest:
        if document["version"] > _VERSION:
            raise StateDamagedError(
                f"{place} was written by a newer release (its version is {document['version']}, this release knows "
                f"{_VERSION}); upgrade headrace"
            )
        names = ("batch", "attempt", "definition", "newest", "watermarks", "previous")
        runs = tuple(RunRef.of(run) for run in document["runs"])
        recent = {int(number): attempt for number, attempt in document["recent"].items()}
        files = document.get("files", {})  # earlier releases did not note them
        return Manifest(**{name: document[name] for name in names}, runs=runs, recent=recent, files=files)

    def _require_runs(self, manifest: Manifest) -> None:
        for run in manifest.runs:
            place = self.path / run.file
            try:
                size = place.stat().st_size
            except FileNotFoundError as error:
                raise self._damaged(f"{place} is missing") from error
            if size != run.nbytes:
                raise self._damaged(f"{place} has {size:,} bytes, but {run.nbytes:,} were written")

    def _damaged(self, cause: str) -> StateDamagedError:
        return StateDamagedError(f"the state cannot be read: {cause}; {self._remedy}")

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageIOError(
                f"the state folder {self.path} cannot be written: {error}; correct the cause and run again, nothing is "
                "lost"
            ) from error
