"""Keeps ``torch.export`` from talking: it logs, warns and prints half a graph before it raises what says it all."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO


class _Muted(io.TextIOBase):
    """Drops what the thread that made it writes; other threads (progress lines) get through."""

    def __init__(self, behind: TextIO) -> None:
        self._behind, self._thread = behind, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._behind.write(text)

    def flush(self) -> None:
        self._behind.flush()

    def isatty(self) -> bool:
        return self._behind.isatty()

    def fileno(self) -> int:
        return self._behind.fileno()

    @property
    def encoding(self) -> str:
        return self._behind.encoding


@contextmanager
def quiet_torch() -> Iterator[None]:
    """No warnings, log lines and prints of this thread to stderr while the block runs."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(_Muted(sys.stderr)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
