"""One kernel at a time on a GPU, whoever of us launches it: a lock file, held while the kernel runs.

A monokernel needs every multiprocessor at once; two of them would each wait for places that the other one holds.
"""

from __future__ import annotations

import fcntl
import os

from kogc.cache import cache_folder
from kogc.errors import EnvironmentFailure


class Turn:
    """The right to run on the GPU ``uuid``: taken by the constructor, which waits (Ctrl-C ends the wait), until ``end``.

    The system ends the turn of a process that dies. ``flock`` itself, because the thread that ends a turn is another one
    than the one that took it, and because two engines of one process must exclude each other, too.
    """

    def __init__(self, uuid: str) -> None:
        path = cache_folder("locks") / f"gpu-{uuid}.lock"
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise EnvironmentFailure(f"cannot open the GPU's lock {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Let the next one run. Harmless when done twice."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
