"""One kernel at a time on a GPU, whoever of us launches it: a lock file, held while the kernel runs.

A monokernel needs every multiprocessor at once; two of them would each wait for places that the other one holds.
"""

from __future__ import annotations

import fcntl
import os
import weakref

from kogc.cache import cache_folder
from kogc.errors import EnvironmentFailure


class Turn:
    """The right to run on the GPU ``uuid``, for one kernel after the other of one owner: it excludes other owners, not itself.

    The system ends the turn of a process that dies. ``flock`` itself, because the thread that ends a turn is another one
    than the one that took it, and because two engines of one process must exclude each other, too. The file stays open between two
    turns: opening it would be most of what a turn costs.
    """

    def __init__(self, uuid: str) -> None:
        self._path = cache_folder("locks") / f"gpu-{uuid}.lock"
        self._file: int | None = None
        self._closing: weakref.finalize | None = None

    def take(self) -> None:
        """Wait for the turn; Ctrl-C ends the wait. Raises EnvironmentFailure when the file cannot be opened."""
        while True:
            file = self._opened()
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return
            self.close()  # somebody has emptied the cache folder, and others meet at a new file

    def end(self) -> None:
        """Let the next one run. Harmless when done twice."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """``end``, and let go of the file. Harmless when done twice."""
        self._file = None
        if self._closing is not None:
            self._closing()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *exception: object) -> None:
        self.end()

    def _opened(self) -> int:
        if self._file is None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise EnvironmentFailure(f"cannot open the GPU's lock {self._path}: {error.strerror}") from None
            self._closing = weakref.finalize(self, os.close, self._file)
        return self._file
