"""Write an artifact: members one after the other into a temporary file, renamed when all is in place."""

from __future__ import annotations

import dataclasses
import errno
import io
import mmap
import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kogc.artifact import MANIFEST, TABLES, Artifact
from kogc.artifact_container import Entry, directory, local_header, place
from kogc.artifact_hashes import CHUNK, digest, remember_intact
from kogc.artifact_manifest import Manifest, Member
from kogc.errors import OutputFailure

#: Room kept for the manifest, which comes first in the file and is known last: texts and tables, and one line per chunk.
_MANIFEST_BYTES = 128 << 10
_BYTES_PER_CHUNK = 48

#: How often the pages of a mapped member are handed back to the page cache, in seconds.
_RELEASE_EVERY_S = 0.5


class ArtifactWriter:
    """``with ArtifactWriter(path, total) as writer:`` add members, ``seal`` with a manifest; the end of the block renames.

    ``total``: bytes of all members together, for the check of free space and the room reserved for the manifest.
    Leaving by an exception (Ctrl-C included) or without ``seal`` deletes the temporary file. Every method raises
    OutputFailure, one line with the folder and what is needed and free, when the folder is missing, read-only or full.
    """

    def __init__(self, path: str | Path, total: int) -> None:
        self.path = Path(path)
        #: Where the file goes: a link stays, and what it points to is replaced.
        self._place = self.path.resolve() if self.path.is_symlink() else self.path
        self._folder = self._place.parent
        self._total = total + _MANIFEST_BYTES
        self._temporary = self._folder / f".{self._place.name}.{uuid.uuid4().hex[:12]}.part"
        self._entries: list[Entry] = []
        self._members: dict[str, Member] = {}
        self._manifest: Manifest | None = None
        self._file = -1

    def __enter__(self) -> ArtifactWriter:
        with self._speaking_of_disk():
            if self.path.is_dir():
                raise OutputFailure(f"cannot write {self.path}: it is a folder; give a file name")
            if self.path.exists() and not self.path.is_file():
                raise OutputFailure(f"cannot write {self.path}: it is a device or a pipe; give a file name")
            free = shutil.disk_usage(self._folder).free
            if free < self._total:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
            reserved = _MANIFEST_BYTES + _BYTES_PER_CHUNK * (self._total // CHUNK)
            self._entries.append(place(MANIFEST, reserved, 0, 0))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            os.close(self._file)
            if kind is None and self._manifest is not None:
                with self._speaking_of_disk():
                    os.replace(self._temporary, self._place)
                # The hashes were made from what was written a moment ago: the first start need not repeat that.
                remember_intact(self.path, self._manifest_bytes())
        finally:
            self._temporary.unlink(missing_ok=True)

    def add(self, name: str, data: bytes | str) -> None:
        """Add a small member; text is stored as UTF-8."""
        data = data.encode() if isinstance(data, str) else data
        crc, self._members[name] = digest(memoryview(data))
        entry = place(name, len(data), crc, self._entries[-1].end)
        self._write(entry.header, local_header(entry) + data)
        self._entries.append(entry)

    def add_tables(self, tables: Mapping[str, np.ndarray]) -> None:
        """Add the numeric tables of the graph, which ``ir.json`` names and ``Artifact.ir`` needs."""
        packed = io.BytesIO()
        np.savez(packed, allow_pickle=False, **tables)
        self.add(TABLES, packed.getvalue())

    @contextmanager
    def region(self, name: str, size: int) -> Iterator[np.ndarray]:
        """A large member as a writable uint8 [size] mapping of the file (zeros at first), filled in any order.

        The disk space is taken before the mapping is handed out, and pages written are given back to the page cache
        while filling: the process holds neither the member nor a copy of it.
        """
        entry = place(name, size, 0, self._entries[-1].end)
        with self._speaking_of_disk():
            self._take_space(entry.end)
            mapping = mmap.mmap(self._file, entry.end)
        data = memoryview(mapping)[entry.data : entry.end]
        with _releasing(mapping):
            yield np.frombuffer(data, np.uint8)
            crc, self._members[name] = digest(data)
        entry = dataclasses.replace(entry, crc=crc)
        self._write(entry.header, local_header(entry))
        self._entries.append(entry)

    def seal(self, manifest: Manifest) -> None:
        """Write manifest (``members`` is filled in here) and directory: the temporary file is now a complete artifact."""
        self._manifest = dataclasses.replace(manifest, members=dict(self._members))
        text = self._manifest_bytes()
        crc, _ = digest(memoryview(text))
        self._entries[0] = dataclasses.replace(self._entries[0], crc=crc)
        self._write(0, local_header(self._entries[0]) + text)
        self._write(self._entries[-1].end, directory(self._entries))

    def amend(self, **changes: Any) -> None:
        """Replace manifest fields (``gate=…``) of the sealed file."""
        if self._manifest is None:
            raise ValueError("amend comes after seal")
        self.seal(dataclasses.replace(self._manifest, **changes))

    def preview(self) -> Artifact:
        """The sealed, not yet renamed artifact, e.g. to run the accuracy gate on it. Close it before the block ends."""
        if self._manifest is None:
            raise ValueError("preview comes after seal")
        return Artifact(self._temporary, intact=True)

    def _manifest_bytes(self) -> bytes:
        """The manifest, blanks appended up to the room reserved for it."""
        assert self._manifest is not None
        text = self._manifest.to_json().encode()
        room = self._entries[0].size
        if len(text) >= room:
            raise OutputFailure(f"the manifest takes {len(text)} bytes and {room} are reserved; shorten the chat template")
        return text.ljust(room - 1) + b"\n"

    def _take_space(self, end: int) -> None:
        """Make the file ``end`` bytes long with blocks behind them: writing to a mapping on a full disk kills the process."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, end)
        else:
            os.ftruncate(self._file, end)

    def _write(self, offset: int, data: bytes) -> None:
        rest = memoryview(data)
        with self._speaking_of_disk():
            os.lseek(self._file, offset, os.SEEK_SET)
            while rest:
                rest = rest[os.write(self._file, rest) :]

    @contextmanager
    def _speaking_of_disk(self) -> Iterator[None]:
        """Turn errors of the file system into one line that says what to do."""
        try:
            yield
        except OSError as error:
            raise OutputFailure(f"cannot write {self.path}: {self._reason(error)}") from None

    def _reason(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self._folder).free
            return f"the folder {self._folder} is full ({self._total} bytes needed, {free} free); free some space or choose another with -o"
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return f"the folder {self._folder} is read-only; choose another with -o"
        if error.errno == errno.ENOENT:
            return f"the folder {self._folder} does not exist; make it or choose another with -o"
        return f"{error.strerror} (folder {self._folder})"


@contextmanager
def _releasing(mapping: mmap.mmap) -> Iterator[None]:
    """Unmap touched pages now and then (they stay in the page cache), so that they do not count as this process's memory."""
    done = threading.Event()

    def release() -> None:
        while not done.wait(_RELEASE_EVERY_S):
            mapping.madvise(mmap.MADV_DONTNEED)

    # Only Linux promises that the pages of a shared mapping survive this.
    if not hasattr(mmap, "MADV_DONTNEED") or os.uname().sysname != "Linux":
        yield
        return
    helper = threading.Thread(target=release, name="kogc-release", daemon=True)
    helper.start()
    try:
        yield
    finally:
        done.set()
        helper.join()
