"""Hashes of members, one per 16 MB chunk, computed by all cores; and the memory of which files were found intact."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kogc.artifact_manifest import Member
from kogc.cache import cache_folder, content_key, write_atomically
from kogc.errors import ArtifactError, KogcError

CHUNK = 16 << 20

#: Hashing is bound by the cores; beyond these the page cache is.
_THREADS = min(8, os.cpu_count() or 1)


def digest(data: memoryview) -> tuple[int, Member]:
    """CRC-32 (for the zip directory) and chunk hashes of a member. Both run beside each other, without the GIL."""
    with ThreadPoolExecutor(_THREADS + 1) as pool:
        crc = pool.submit(_crc, data)
        hashes = tuple(pool.map(_hash, _chunks(data)))
        return crc.result(), Member(len(data), hashes)


def check(name: str, data: memoryview, expected: Member) -> None:
    """Raises ArtifactError, naming the member and the place, when ``data`` is not what the manifest says."""
    if len(data) != expected.bytes or len(expected.chunks) != -(-len(data) // CHUNK):
        raise ArtifactError(f"section {name} has {len(data)} bytes, the manifest says {expected.bytes}")
    with ThreadPoolExecutor(_THREADS) as pool:
        for index, found in enumerate(pool.map(_hash, _chunks(data))):
            if found != expected.chunks[index]:
                last = min(len(data), (index + 1) * CHUNK)
                raise ArtifactError(f"section {name} is damaged somewhere in its bytes {index * CHUNK} to {last}")


def known_intact(file: Path, manifest: bytes) -> bool:
    """Whether every hash of exactly this file was right before: same place, size, times, inode and manifest."""
    try:
        return _record(file, manifest).exists()
    except (OSError, KogcError):
        return False


def remember_intact(file: Path, manifest: bytes) -> None:
    """Make ``known_intact`` true until the file changes. A cache that cannot be written only costs another check."""
    try:
        write_atomically(_record(file, manifest), b"")
    except (OSError, KogcError):
        pass


def _record(file: Path, manifest: bytes) -> Path:
    status = file.stat()
    identity = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_dev} {status.st_ino}"
    return cache_folder("checked") / content_key(identity, manifest)


def _chunks(data: memoryview) -> Iterable[memoryview]:
    return (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))


def _hash(chunk: memoryview) -> str:
    # SHA-256 because processors have instructions for it: several times faster than BLAKE2 here.
    return hashlib.sha256(chunk).hexdigest()[:32]


def _crc(data: memoryview) -> int:
    crc = 0
    for chunk in _chunks(data):
        crc = zlib.crc32(chunk, crc)
    return crc
