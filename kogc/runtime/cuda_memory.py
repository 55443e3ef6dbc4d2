"""Memory of a GPU, and memory of the host that a GPU can reach."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kogc.errors import EnvironmentFailure
from kogc.runtime.cuda_driver import Context, CudaError
from kogc.runtime.host_memory import HostMemory

#: Pinned memory up to this size is kept for the next launch: taking it anew costs more than a token.
_KEPT_BYTES = 1 << 20
_SMALLEST_BYTES = 1 << 12

#: Weights go up in pieces of this size, filled by this many threads (a page that is not in memory stops one of them only).
STAGING_BYTES = 32 << 20
_FILLERS = 8


class Memory:
    """Everything one device has taken. Nothing is given back while its kernel runs: the kernel may still write there."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.RLock()  # the garbage collector may come by while it is held
        self._running = False
        self._closed = False
        self._given_up: list[Callable[[], None]] = []
        self._spare: dict[int, list[int]] = {}
        self._kernel_addresses: dict[int, int] = {}

    def begin_launch(self) -> None:
        """A kernel is about to run."""
        with self._lock:
            self._running = True

    def end_launch(self) -> None:
        """The kernel has left: what was given up meanwhile goes now."""
        with self._lock:
            self._running = False
            given_up, self._given_up = self._given_up, []
        for give_back in given_up:
            give_back()

    def take(self, nbytes: int, what: str) -> int:
        """The address of ``nbytes`` on the GPU. Raises EnvironmentFailure naming ``what``."""
        return self._taken(nbytes, what, "GPU", lambda driver: int(driver.call("cuMemAlloc", nbytes)))

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """What lies there on the GPU, uint8 [nbytes]."""
        data = np.empty(nbytes, np.uint8)
        with self._context as driver:
            driver.call("cuMemcpyDtoH", data.ctypes.data, address, nbytes)
        return data

    def give_up(self, address: int) -> None:
        """Give memory of the GPU back, at the latest when the kernel has left."""
        self._when_idle(lambda: self._context.give_back(("cuMemFree", address)))

    def pinned(self, nbytes: int, what: str) -> ctypes.Array:
        """Zeroed memory of the host, given back when nobody refers to it any more. Raises EnvironmentFailure naming ``what``."""
        size = max(_SMALLEST_BYTES, 1 << (max(nbytes, 1) - 1).bit_length()) if nbytes <= _KEPT_BYTES else nbytes
        with self._lock:
            spare = self._spare.get(size)
            address = spare.pop() if spare else None
        if address is None:
            address = self._taken(size, what, "host", self._pin(size))
        memory = (ctypes.c_uint8 * size).from_address(address)
        ctypes.memset(address, 0, size)
        weakref.finalize(memory, self._when_idle, lambda: self._keep(address, size)).atexit = False
        return memory

    def kernel_address(self, memory: ctypes.Array) -> int:
        """Where the GPU sees pinned ``memory``."""
        address = ctypes.addressof(memory)
        if address not in self._kernel_addresses:
            with self._context as driver:
                self._kernel_addresses[address] = int(driver.call("cuMemHostGetDevicePointer", address, 0))
        return self._kernel_addresses[address]

    def close(self) -> None:
        """Give back what is spare, and keep nothing from now on. What is still in use goes when its last user does."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, {}
        self._context.give_back(*(("cuMemFreeHost", address) for addresses in spare.values() for address in addresses))

    def _pin(self, size: int) -> Callable[[Any], int]:
        return lambda driver: int(driver.call("cuMemHostAlloc", size, driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP))

    def _taken(self, nbytes: int, what: str, where: str, take: Callable[[Any], int]) -> int:
        with self._context as driver:
            try:
                return take(driver)
            except CudaError as error:
                if error.name != "OUT_OF_MEMORY":
                    raise
                free, total = driver.call("cuMemGetInfo")
        have = f"{free} of the GPU's {total} bytes are free" if where == "GPU" else "the system has no more pinned memory to give"
        advice = "end other programs on the GPU, or compile with a smaller --max-context" if where == "GPU" else "end other programs"
        raise EnvironmentFailure(f"no {where} memory for {what}: {nbytes} bytes are needed, {have}; {advice}")

    def _when_idle(self, give_back: Callable[[], None]) -> None:
        with self._lock:
            if self._running:
                self._given_up.append(give_back)
                return
        give_back()

    def _keep(self, address: int, size: int) -> None:
        with self._lock:
            keep = size <= _KEPT_BYTES and not self._closed
            if keep:
                self._spare.setdefault(size, []).append(address)
            else:
                self._kernel_addresses.pop(address, None)
        if not keep:
            self._context.give_back(("cuMemFreeHost", address))


class GpuBlock:
    """Zeroed memory of the GPU."""

    def __init__(self, memory: Memory, nbytes: int, what: str, clear: Callable[[int, int], None]) -> None:
        """``clear(address, bytes)`` zeroes memory before the next launch begins."""
        self.nbytes = nbytes
        self._memory, self._clear = memory, clear
        self.address = memory.take(max(nbytes, 1), what)
        self._finalizer = weakref.finalize(self, memory.give_up, self.address)
        self._finalizer.atexit = False
        self.clear()

    def view(self, dtype: type | np.dtype) -> np.ndarray:
        """There is none: the host cannot look into the GPU's memory."""
        raise TypeError("memory of the GPU has no view; allocate it with host=True")

    def read(self, dtype: type | np.dtype) -> np.ndarray:
        """A copy for the host."""
        return self._memory.read(self.address, self.nbytes).view(dtype)

    def clear(self) -> None:
        """Fill with zeros before the next launch."""
        if self.nbytes:
            self._clear(self.address, self.nbytes)

    def free(self) -> None:
        """Give the memory back."""
        self._finalizer()


class HostBlock(HostMemory):
    """Zeroed pinned memory that both sides see."""

    def __init__(self, memory: Memory, nbytes: int, what: str) -> None:
        pinned = memory.pinned(nbytes, what)
        super().__init__(np.frombuffer(pinned, np.uint8), nbytes, memory.kernel_address(pinned))
        #: Where the host sees it.
        self.address_here = ctypes.addressof(pinned)


def upload(context: Context, memory: Memory, stream: Any, data: np.ndarray, address: int, progress: Callable[[int], None]) -> None:
    """Copy ``data`` (uint8) to ``address`` on the GPU, piece by piece through two pinned buffers: one fills while the other flies."""
    size = min(STAGING_BYTES, data.nbytes)
    with ThreadPoolExecutor(_FILLERS) as fillers, context as driver:
        buffers = [np.frombuffer(memory.pinned(size, "a staging buffer"), np.uint8)[:size] for _ in range(2)]
        flown = [driver.call("cuEventCreate", int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)) for _ in range(2)]
        try:
            for number, start in enumerate(range(0, data.nbytes, size or 1)):
                buffer, event, piece = buffers[number % 2], flown[number % 2], data[start : start + size]
                driver.call("cuEventSynchronize", event)
                _fill(fillers, buffer, piece)
                driver.call("cuMemcpyHtoDAsync", address + start, buffer.ctypes.data, piece.nbytes, stream)
                driver.call("cuEventRecord", event, stream)
                progress(start + piece.nbytes)
        finally:
            driver.try_call("cuStreamSynchronize", stream)
            for event in flown:
                driver.try_call("cuEventDestroy", event)


def _fill(fillers: ThreadPoolExecutor, buffer: np.ndarray, piece: np.ndarray) -> None:
    """Copy ``piece`` to the front of ``buffer``, every thread a part of it."""
    part = -(-piece.nbytes // _FILLERS)

    def copy(start: int) -> None:
        end = min(start + part, piece.nbytes)
        buffer[start:end] = piece[start:end]

    list(fillers.map(copy, range(0, piece.nbytes, part)))
