"""Access to files: the seam through which every byte of a table passes.

In: paths, offsets and buffers. Out: bytes, durability, and errors that name the file and the remedy. Contains the
storage backend, asynchronous direct reads, and temporary files whose owner may die. Knows nothing about pages.
"""

from headrace.storage.file.backend import Buffer, FileBackend, StorageBackend
from headrace.storage.file.read_ahead import read_ahead
from headrace.storage.file.temporary_files import claimed, remove_remains, removed

__all__ = ["Buffer", "FileBackend", "StorageBackend", "claimed", "read_ahead", "remove_remains", "removed"]
