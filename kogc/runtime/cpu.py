"""The CPU as a device: memory is memory, and a launch is a call that one Python thread makes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kogc.codegen.launch import Launch, State
from kogc.errors import EnvironmentFailure
from kogc.runtime.cpu_library import Library, open_library
from kogc.runtime.device import Needs
from kogc.runtime.facts import Fact
from kogc.runtime.host_memory import HostMemory
from kogc.runtime.kernel_thread import KernelThread

if TYPE_CHECKING:
    from kogc.artifact import Artifact

#: The longest the host sleeps in the kernel's library: Python serves Ctrl-C between two sleeps.
_SLICE_NS = 50_000_000

#: What ``kogc_run`` returns when it could not run.
_REFUSALS = {1: "it speaks another launch version", 2: "there is no memory for its workers", 3: "the system gave it too few threads"}


class CpuBlock(HostMemory):
    """Anonymous memory: zeroed, page-aligned, and backed by pages only where it is touched."""

    def __init__(self, nbytes: int, what: str) -> None:
        try:
            array = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
        except (OSError, OverflowError, ValueError) as error:
            raise EnvironmentFailure(f"no memory for {what} ({nbytes} bytes): {error}") from None
        super().__init__(array, nbytes, array.ctypes.data)


class CpuRun(KernelThread):
    """A launch in progress: the thread is the one that calls the kernel."""

    def __init__(self, library: Library, launch: Launch, left: Callable[[], None]) -> None:
        self._library, self._launch = library, launch
        self._state = State.from_address(launch.state)
        super().__init__(left)

    def _work(self) -> None:
        code = self._library.run(ctypes.byref(self._launch))
        if code:
            raise EnvironmentFailure(f"the kernel could not run: {_REFUSALS.get(code, f'code {code}')}")

    def wait(self, seen: int) -> bool:
        """Return when more than ``seen`` tokens are there, or with False when the kernel has left."""
        while not self._library.wait(ctypes.byref(self._state), seen, _SLICE_NS):
            if not self.running:
                return False
        return not self._state.finished

    def cancel(self) -> None:
        """Set the flag that workers look at in every wait and step."""
        self._state.cancel = 1


class CpuDevice:
    """The kernel of an artifact, loaded into this process. Weights are used where they are mapped."""

    crowded = "the machine is busy with other programs; end some, or raise stall_timeout"

    def __init__(self, artifact: Artifact, defines: tuple[str, ...] = ()) -> None:
        self._library = open_library(artifact, defines)
        self._uploads: list[np.ndarray] = []
        facts = self._library.facts
        self.columns = facts[Fact.MAX_COLUMNS]
        self.needs = Needs(facts[Fact.EXCHANGE_BYTES], facts[Fact.KV_BYTES], 4 * facts[Fact.PROBE_FLOATS])

    @staticmethod
    def obstacle() -> None:
        """There is always a CPU."""

    @staticmethod
    def model() -> str:
        """The machine itself is the device."""
        return ""

    def alloc(self, nbytes: int, what: str, host: bool = False) -> CpuBlock:
        """Zeroed memory; all of it is the host's, too."""
        return CpuBlock(nbytes, what)

    def upload(self, data: np.ndarray, what: str, progress: Callable[[int], None]) -> int:
        """The address of ``data`` itself."""
        self._uploads.append(data)
        return data.ctypes.data

    def start(self, launch: Launch, left: Callable[[], None]) -> CpuRun:
        """Begin a launch in a thread of its own."""
        return CpuRun(self._library, launch, left)

    def use_kernel(self, artifact: Artifact, defines: tuple[str, ...] = ()) -> None:
        """Run the kernel of ``artifact`` from the next launch on."""
        self._library = open_library(artifact, defines)

    def close(self) -> None:
        """Let go of the weights. The library stays loaded: its code may be shared by other engines."""
        self._uploads.clear()
