"""Where the command line writes: results to stdout, everything about how it goes to stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: Steps shorter than this many seconds are not worth a line.
PATIENCE_S = 2.0



class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Called while the error is handled: leave it to ``kogc.cli.report`` instead of ending the process here."""
        raise


out = _Console(highlight=False, soft_wrap=True)
err = _Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout, on one line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


class Steps:
    """Shows the steps of a long job on stderr: ``steps("packing", done, total)``.

    A step shows once it has taken ``PATIENCE_S``: on a terminal as one live line, elsewhere as one plain line.
    """

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
        self._live = Progress(*columns, console=err, transient=True) if err.is_terminal else None
        self._task: Any = None
        self._step = ""
        self._timer: threading.Timer | None = None

    def __call__(self, step: str, done: float = 0, total: float = 0) -> None:
        if step != self._step:
            self._step = step
            self._restart_timer()
        if self._task is not None:
            self._live.update(self._task, description=step, completed=done, total=total or None)

    def close(self) -> None:
        """Take the line off the terminal."""
        if self._timer:
            self._timer.cancel()
        if self._live:
            self._live.stop()

    def _restart_timer(self) -> None:
        # A timer and not a look at the clock in the next call: one call may itself take minutes.
        if self._timer:
            self._timer.cancel()
        self._timer = threading.Timer(PATIENCE_S, self._tell, (self._step,))
        self._timer.daemon = True
        self._timer.start()

    def _tell(self, step: str) -> None:
        if self._live is None:
            err.print(f"kogc: {step} …", markup=False)
        elif self._task is None:
            self._live.start()
            self._task = self._live.add_task(step, total=None)


@contextmanager
def steps() -> Iterator[Steps]:
    """A ``Steps`` that is off the terminal again when the block ends, however it ends."""
    shown = Steps()
    try:
        yield shown
    finally:
        shown.close()
