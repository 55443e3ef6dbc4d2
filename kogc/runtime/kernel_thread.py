"""The thread behind a launch: it is there while the kernel is, and whoever joins it learns how the launch ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kogc.errors import EnvironmentFailure


class KernelThread:
    """A launch in progress. It keeps alive what the kernel writes to even if everybody else has let go."""

    def __init__(self, left: Callable[[], None]) -> None:
        """Start ``_work`` in a thread of its own; ``left`` is called there afterwards, however it ended."""
        self._left = left
        self._failure: EnvironmentFailure | None = None
        # A daemon: a program that ends while a kernel runs must not wait for max_tokens.
        self._thread = threading.Thread(target=self._run, name="kogc-kernel", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def cancel(self) -> None:
        """Tell the kernel to leave at its next step or wait. Returns at once."""
        raise NotImplementedError

    def join(self) -> None:
        """Return when the kernel has left, also when Ctrl-C comes meanwhile; it is raised afterwards.

        Raises EnvironmentFailure when the kernel could not be run.
        """
        interrupt = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as error:
                self.cancel()
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        """Return when the kernel has left. Raises EnvironmentFailure when it could not be run."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self._work()
        except EnvironmentFailure as error:
            self._failure = error
        finally:
            self._left()
