"""Checks that a pipeline's ledger and its fact table belong together.

The fact table carries the identity of each stream that it received, and the number of the stream's last batch as a
Delta transaction. A ledger that does not match would load files twice or not at all, so the run is refused with the
remedies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace.pipelines.delta.tables import has_table, stream_registry
from headrace.pipelines.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.pipelines.config.model import PipelineConfig
    from headrace.pipelines.delta.tables import DeltaHandle
    from headrace.pipelines.source.ledger import Ledger

__all__ = ["application", "check_identity", "replaced_stream", "source_of"]

_ADOPT: Final = "run `headrace source adopt PIPELINE` to take all files that are there now as loaded"
_COMMITS_SEARCHED: Final = 50


def source_of(config: PipelineConfig) -> str:
    """Return the name of a pipeline's source in its fact table, which does not change if the project is moved."""
    return config.source.located(config.sink.path)


def replaced_stream(config: PipelineConfig, ledger: Ledger, facts: DeltaHandle | None) -> str | None:
    """Return the stream in the facts that the ledger's stream is about to replace, or None."""
    if facts is None:
        return None
    entry = stream_registry(facts).get(config.name)
    return None if entry is None or entry["stream"] == ledger.stream else entry["stream"]


def check_identity(config: PipelineConfig, ledger: Ledger, facts: DeltaHandle | None, *, ran_before: bool) -> None:
    """Refuse a ledger that does not belong to the fact table.

    Parameters
    ----------
    config
        Configuration of the pipeline.
    ledger
        Ledger of the pipeline.
    facts
        Fact table at its newest version; None if it does not exist yet.
    ran_before
        Whether the run catalog has batches of the pipeline. Older releases did not register their streams.

    Raises
    ------
    LedgerError
        If a run would load records twice, or omit some. The message gives the remedies.
    """
    if facts is None:
        _check_last_batch(config, ledger, None)
        return
    loaded = facts.transaction(application(ledger.stream, "facts"))
    _check_registry(config, ledger, facts, ran_before=ran_before)
    _check_last_batch(config, ledger, loaded)
    if loaded is not None:
        _check_not_restored(config, ledger, facts)


def _check_registry(config: PipelineConfig, ledger: Ledger, facts: DeltaHandle, *, ran_before: bool) -> None:
    registry = {
        name: entry
        for name, entry in stream_registry(facts).items()
        if facts.transaction(application(entry["stream"], "facts"))
        is not None  # a stream that loaded nothing does not count
    }
    entry = registry.get(config.name)
    if entry is not None and entry["stream"] not in {ledger.stream, ledger.replaces}:
        raise LedgerError(_lost(config) if ledger.is_new else _foreign(config, ledger, entry["stream"]))
    if entry is not None or not ledger.is_new:
        return
    if ran_before and not registry and facts.table.file_uris():
        raise LedgerError(_lost(config))
    renamed = _same_source(registry, source_of(config))
    if renamed is not None:
        raise LedgerError(_renamed(config, renamed))


def _check_last_batch(config: PipelineConfig, ledger: Ledger, loaded: int | None) -> None:
    """Compare the stream's last batch in the facts with the last batch in the ledger."""
    last, pending = ledger.last_loaded(), ledger.pending()
    planned = last if pending is None else pending.number
    if last is not None and (loaded is None or loaded < last):
        raise LedgerError(
            f"{_ledger_of(config)} says that batch {last} was loaded, but {config.sink.path} "
            + (
                "has no batch of this stream"
                if loaded is None
                else f"has batch {loaded} of this stream as the last one"
            )
            + f": the fact table was replaced, or is an older copy. Restore the fact table; or, {_ways_on(config)}"
        )
    if loaded is not None and (planned is None or loaded > planned):
        raise LedgerError(
            f"{config.sink.path} has batch {loaded} of this stream, which {_ledger_of(config)} does not know: the "
            "checkpoint is an older copy, or a copy of it was used elsewhere. Restore the newest checkpoint; or, "
            f"{_ways_on(config)}"
        )


def _restored_before(stream: str, facts: DeltaHandle) -> int | None:
    """Return the version of a stream's last batch if the facts were restored to a version before it, or None.

    RESTORE keeps the transaction of the batch, but not its rows.
    """
    restore, last = _restore_and_last_batch(facts, application(stream, "facts"), _COMMITS_SEARCHED)
    if restore is not None and last is None:
        restore, last = _restore_and_last_batch(facts, application(stream, "facts"), None)
    if restore is not None and last is not None and _restored_version(restore) < int(last["version"]):
        return int(last["version"])
    return None


def _check_not_restored(config: PipelineConfig, ledger: Ledger, facts: DeltaHandle) -> None:
    """Refuse facts that were restored to a version before the last batch."""
    version = _restored_before(ledger.stream, facts)
    if version is not None:
        raise LedgerError(
            f"{config.sink.path} was restored to a version before the last batch that {_ledger_of(config)} calls "
            f"loaded. Restore the table to its version {version}; or, {_ways_on(config)}"
        )


def _restore_and_last_batch(
    facts: DeltaHandle, name: str, limit: int | None
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the last RESTORE after an application's last commit, and that commit; None for each that was not found."""
    restore = None
    for commit in facts.commits(limit):
        if name in str(commit.get("userMetadata", "")):
            return restore, commit
        if restore is None and commit.get("operation") == "RESTORE":
            restore = commit
    return restore, None


def _restored_version(commit: Mapping[str, Any]) -> int:
    """Return the version that a RESTORE restored; -1 if it was given as a timestamp."""
    parameters = commit.get("operationParameters")
    version = parameters.get("version") if isinstance(parameters, dict) else None
    return int(version) if version is not None and str(version).isdigit() else -1


def _same_source(registry: Mapping[str, Mapping[str, str]], source: str) -> str | None:
    return next((name for name, entry in registry.items() if entry["source"] == source), None)


def _ledger_of(config: PipelineConfig) -> str:
    return f"the ledger in {config.checkpoint}"


def _lost(config: PipelineConfig) -> str:
    return (
        f"{config.sink.path} holds facts that pipeline {config.name} loaded, but its checkpoint {config.checkpoint} is "
        "new: it was removed, or the project was copied without it; a run would load every file again. Restore the "
        f"checkpoint; or, {_ways_on(config)}"
    )


def _foreign(config: PipelineConfig, ledger: Ledger, stream: str) -> str:
    return (
        f"{config.sink.path} holds facts that pipeline {config.name} loaded as stream {stream}, but the checkpoint "
        f"{config.checkpoint} is that of stream {ledger.stream}; a run would load files again. Restore the checkpoint "
        f"of that stream; or, {_ways_on(config)}"
    )


def _renamed(config: PipelineConfig, other: str) -> str:
    adopt = f"or {_ADOPT}; " if config.source.is_folder else ""
    return (
        f"{config.sink.path} holds facts that pipeline {other} loaded from the same {config.source.named}; if "
        f"{config.name} is its new name, a run would load every file again. Give the pipeline its old name; "
        f"{adopt}or name another fact table"
    )


def _ways_on(config: PipelineConfig) -> str:
    """Return how to go on with the facts that are there, or without them."""
    tables = (config.sink.path, config.errors_path, config.resolutions_path, config.duplicates_path)
    removed = [*filter(has_table, tables), str(config.checkpoint)]
    again = f"to load every file again, remove {', '.join(removed[:-1])} and {removed[-1]}"
    if not config.source.is_folder:
        return f"{again}, and the state if it is elsewhere"
    return f"to go on with the facts it has, {_ADOPT}; or, {again}"


def application(stream: str, part: str) -> str:
    """Return the application id of Delta's transactions for a stream and its part in a table."""
    return f"headrace:{stream}:{part}"
