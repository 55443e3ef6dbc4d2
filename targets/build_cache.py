"""What compilers made: every build once, found again by its key, and never used by halves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kogc.cache import cache_folder, content_key, locked, write_atomically

#: Suffix → content of the files one build leaves.
Files = Mapping[str, bytes]


def built(key: str, suffixes: tuple[str, ...], make: Callable[[Path], Files]) -> Path:
    """The first of the files ``KEY + suffix`` in the cache; ``make`` makes them in a scratch folder unless all are whole.

    Raises what ``make`` raises, and EnvironmentFailure when the cache cannot be written.
    """
    stem = cache_folder("kernels") / key
    result = stem.with_suffix(suffixes[0])
    if _whole(stem, suffixes):
        return result
    with locked(result):
        if not _whole(stem, suffixes):
            with tempfile.TemporaryDirectory(dir=stem.parent, prefix="build-") as folder:
                files = make(Path(folder))
            write_atomically(stem.with_suffix(".sum"), _checksum(files[suffix] for suffix in suffixes))
            for suffix in reversed(suffixes):
                write_atomically(stem.with_suffix(suffix), files[suffix])
    return result


def _whole(stem: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether all files are there as they were built: loading half a library kills the process."""
    try:
        return stem.with_suffix(".sum").read_bytes() == _checksum(stem.with_suffix(suffix).read_bytes() for suffix in suffixes)
    except OSError:
        return False


def _checksum(contents: Iterable[bytes]) -> bytes:
    return content_key(*contents).encode()
