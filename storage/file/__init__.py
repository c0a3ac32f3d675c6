"""Access to files: the seam through which every byte of a table passes.

In: paths, offsets and buffers. Out: bytes, durability, and errors that name the file and the remedy. Contains the
storage backend, asynchronous direct reads, and temporary files whose owner may die. Knows nothing about pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.storage._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.storage.file.async_reads import KernelQueue, open_kernel_queue
    from headrace.storage.file.backend import Buffer, FileBackend, Mode, StorageBackend, path_text, sync_folder
    from headrace.storage.file.temporary_files import claimed, remove_remains

__all__ = [
    "Buffer",
    "FileBackend",
    "KernelQueue",
    "Mode",
    "StorageBackend",
    "claimed",
    "open_kernel_queue",
    "path_text",
    "remove_remains",
    "sync_folder",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "backend": ("Buffer", "FileBackend", "Mode", "StorageBackend", "path_text", "sync_folder"),
        "async_reads": ("KernelQueue", "open_kernel_queue"),
        "temporary_files": ("claimed", "remove_remains"),
    },
)
