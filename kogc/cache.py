"""The cache folder: content-addressed files that may be deleted at any time."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from kogc.errors import EnvironmentFailure

#: Overrides the folder; the platform's own (``~/.cache/kogc`` on Linux) is the default.
CACHE_VARIABLE = "KOGC_CACHE_DIR"


def cache_folder(section: str) -> Path:
    """The folder of one kind of cached things (``kernels``, ``checked`` …), made when missing.

    Raises EnvironmentFailure when it cannot be made or written.
    """
    folder = Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("kogc", appauthor=False)) / section
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot make the cache folder {folder}: {error.strerror}; set {CACHE_VARIABLE} to a folder that can be written"
        ) from None
    return folder


def content_key(*parts: str | bytes) -> str:
    """A key for everything that determines a cached file: 32 hex digits over the parts, boundaries included."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary name beside ``path`` and rename it, so that readers see all of it or nothing.

    Raises EnvironmentFailure naming the folder when it cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextmanager
def locked(path: Path, timeout_s: float = 600) -> Iterator[None]:
    """Hold the lock that belongs to ``path``; one process at a time makes it.

    Raises EnvironmentFailure after ``timeout_s`` seconds of waiting.
    """
    lock = path.with_name(path.name + ".lock")
    held = FileLock(lock, timeout=timeout_s)
    try:
        held.acquire()
    except Timeout:
        raise EnvironmentFailure(
            f"another process has held {lock} for {timeout_s:g} s; if none is running, delete that file"
        ) from None
    except OSError as error:
        raise _unwritable(lock, error) from None
    try:
        yield
    finally:
        held.release()


def _unwritable(path: Path, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"cannot write {path.name} to the cache folder {path.parent}: {error.strerror}; "
        f"free some space or set {CACHE_VARIABLE}"
    )
