"""How fast a GPU reads memory at best, over an artifact's own bytes: what its speeds are judged by.

The bytes go to the GPU once and are then read round after round by a kernel that does nothing else (targets/h200/ceiling.cu).
What fits into the GPU's cache is therefore held against the cache.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from kogc.errors import BadInput
from kogc.runtime import cuda_driver
from kogc.runtime.cuda_driver import Context
from kogc.runtime.cuda_memory import Memory, upload
from kogc.runtime.cuda_turn import Turn
from kogc.targets.h200 import toolchain

#: One copy, and copies under way on a multiprocessor: 128 KB, of which half would do.
CHUNK_BYTES, SLOTS = 16384, 8

#: Of an artifact's bytes at most so many are read: the rest is read no faster.
MOST_BYTES = 8_000_000_000

#: A round reads at least so many bytes, so that its launch does not count, but goes over them no more often than that.
ROUND_BYTES, MOST_REPEATS = 8_000_000_000, 100_000

_ROUNDS = 5
_GRAIN = 16  # bulk copies are multiples of it


def read_ceiling(data: np.ndarray, workers: int) -> float:
    """Bytes per second at which the GPU reads ``data`` (uint8 [n]), best of a few rounds. All multiprocessors read,
    however many ``workers`` an artifact has.

    Raises EnvironmentFailure without a GPU or room on it, ToolchainError without a compiler.
    """
    with Reader(data) as reader:
        return max(reader.rounds(_ROUNDS))


class Reader:
    """Some bytes on the GPU that can be read for the time it takes. A context manager: ``close`` frees them.

    Raises as ``read_ceiling``; BadInput for fewer bytes than one copy can have.
    """

    def __init__(self, data: np.ndarray) -> None:
        data = data[:MOST_BYTES]
        self._bytes = data.nbytes // _GRAIN * _GRAIN
        if not self._bytes:
            raise BadInput(f"{data.nbytes} bytes are too few to measure reading with")
        driver = cuda_driver.load_driver()
        self._gpu = cuda_driver.chosen_gpu(driver)
        self._context = Context(driver, self._gpu.ordinal)
        self._memory = Memory(self._context)
        self._turn = Turn(self._gpu.uuid)
        self._given: list[tuple[Any, ...]] = []
        try:
            self._load(data)
        except BaseException:
            self.close()
            raise

    def rounds(self, count: int) -> list[float]:
        """Bytes per second of each of ``count`` rounds. Waits while one of our kernels runs."""
        with self._turn:
            self._round()  # wakes the clocks up
            return [self._round() for _ in range(count)]

    def close(self) -> None:
        """Free everything."""
        given, self._given = self._given, []
        self._context.give_back(*reversed(given))
        self._memory.close()
        self._turn.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _load(self, data: np.ndarray) -> None:
        source = (Path(toolchain.__file__).parent / "ceiling.cu").read_text()
        cubin = toolchain.build(source, (f"CHUNK_BYTES={CHUNK_BYTES}", f"SLOTS={SLOTS}")).read_bytes()
        with self._context as driver:
            self._stream = self._own("cuStreamDestroy", driver.call("cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
            self._events = [self._own("cuEventDestroy", driver.call("cuEventCreate", 0)) for _ in range(2)]
            module = self._own("cuModuleUnload", driver.call("cuModuleLoadData", cubin))
            self._function = driver.call("cuModuleGetFunction", module, b"kogc_read")
            dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.call("cuFuncSetAttribute", self._function, dynamic, CHUNK_BYTES * SLOTS)
        self._address = self._own("cuMemFree", self._memory.take(data.nbytes, "the bytes to measure reading with"))
        upload(self._context, self._memory, self._stream, data, self._address, lambda done: None)

    def _own(self, give_back: str, thing: Any) -> Any:
        """``thing``, which ``give_back`` frees at the end."""
        self._given.append((give_back, thing))
        return thing

    def _round(self) -> float:
        """Bytes per second of one launch, by the GPU's own events."""
        repeats = min(-(-ROUND_BYTES // self._bytes), MOST_REPEATS)
        arguments = (ctypes.c_uint64(self._address), ctypes.c_int64(self._bytes), ctypes.c_int32(repeats))
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        began, ended = self._events
        with self._context as driver:
            driver.call("cuEventRecord", began, self._stream)
            grid, block = (self._gpu.multiprocessors, 1, 1), (32, 1, 1)
            driver.call("cuLaunchKernel", self._function, *grid, *block, CHUNK_BYTES * SLOTS, self._stream, ctypes.addressof(pointers), 0)
            driver.call("cuEventRecord", ended, self._stream)
            driver.call("cuEventSynchronize", ended)
            milliseconds = driver.call("cuEventElapsedTime", began, ended)
        return self._bytes * repeats / (milliseconds * 1e-3)
