"""NVIDIA's driver API in the shape the runtime needs: calls that raise, GPUs with their facts, and the primary context.

Everything goes through the primary context, the one that PyTorch and the CUDA runtime use: it is retained, made current
around each call and put away again, so that whoever shares the process finds its own context and streams as it left them.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any

from kogc.errors import BadInput, EnvironmentFailure

#: Chooses the GPU by its number, counted as CUDA counts (``CUDA_VISIBLE_DEVICES`` is respected).
GPU_VARIABLE = "KOGC_GPU"

_NO_GPU = "there is no NVIDIA GPU here (or CUDA_VISIBLE_DEVICES hides it)"

#: After these, every call in this process fails.
_FATAL = {
    "ASSERT", "CONTEXT_IS_DESTROYED", "CONTAINED", "ECC_UNCORRECTABLE", "EXTERNAL_DEVICE", "HARDWARE_STACK_ERROR", "ILLEGAL_ADDRESS",
    "ILLEGAL_INSTRUCTION", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "MISALIGNED_ADDRESS", "UNKNOWN",
}  # fmt: skip


class CudaError(EnvironmentFailure):
    """A driver call failed. ``name``: CUDA's name for it, without ``CUDA_ERROR_``."""

    def __init__(self, call: str, name: str, text: str) -> None:
        self.name = name
        advice = "; the GPU is lost to this process, start the program again" if name in _FATAL else ""
        super().__init__(f"the GPU's driver says CUDA_ERROR_{name} in {call} ({text}){advice}")


class Driver:
    """``cuda.bindings.driver``: functions by ``call``, constants as attributes."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def call(self, function: str, *arguments: Any) -> Any:
        """What ``function`` returns besides its status: nothing, one value or a tuple. Raises CudaError."""
        status, *values = getattr(self._bindings, function)(*arguments)
        if int(status):
            name = getattr(status, "name", str(status)).removeprefix("CUDA_ERROR_")
            raise CudaError(function, name, _text(self._bindings, status))
        return values[0] if len(values) == 1 else tuple(values)

    def try_call(self, function: str, *arguments: Any) -> None:
        """``call``, whatever comes of it."""
        try:
            self.call(function, *arguments)
        except CudaError:
            pass


@dataclass(frozen=True)
class Gpu:
    """A GPU's facts. ``shared_bytes``: shared memory a block may ask for; ``memory_bytes``: of the whole GPU."""

    ordinal: int
    name: str
    uuid: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    memory_bytes: int

    def __str__(self) -> str:
        return f"GPU {self.ordinal} ({self.name})"


@cache
def load_driver() -> Driver:
    """The driver, initialised. Raises EnvironmentFailure when there is none, or no GPU."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError:
        raise EnvironmentFailure("cuda-bindings is not installed; `pip install cuda-bindings`") from None
    driver = Driver(bindings)
    try:
        driver.call("cuInit", 0)
    except CudaError as error:
        if error.name == "NO_DEVICE":
            raise EnvironmentFailure(_NO_GPU) from None
        raise
    except (RuntimeError, OSError):  # the bindings did not find libcuda
        raise EnvironmentFailure("there is no NVIDIA driver on this machine") from None
    return driver


def driver_version(driver: Driver) -> tuple[int, int]:
    """The newest CUDA that the driver supports."""
    number = driver.call("cuDriverGetVersion")
    return number // 1000, number % 1000 // 10


def chosen_gpu(driver: Driver) -> Gpu:
    """The GPU that ``KOGC_GPU`` names, else the first. Raises BadInput for a number that is none."""
    count = driver.call("cuDeviceGetCount")
    if not count:
        raise EnvironmentFailure(_NO_GPU)
    chosen = os.environ.get(GPU_VARIABLE, "").strip() or "0"
    if not (chosen.isdecimal() and int(chosen) < count):
        raise BadInput(f"{GPU_VARIABLE} is {chosen!r}, expected the number of a GPU from 0 to {count - 1}")
    return _facts(driver, int(chosen))


def _facts(driver: Driver, ordinal: int) -> Gpu:
    device = driver.call("cuDeviceGet", ordinal)

    def ask(name: str) -> int:
        return driver.call("cuDeviceGetAttribute", getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)

    return Gpu(
        ordinal=ordinal,
        name=driver.call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace"),
        uuid=bytes(driver.call("cuDeviceGetUuid", device).bytes).hex(),
        capability=(ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")),
        multiprocessors=ask("MULTIPROCESSOR_COUNT"),
        shared_bytes=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        memory_bytes=driver.call("cuDeviceTotalMem", device),
    )


class Context:
    """A GPU's primary context, retained as long as this object lives. ``with context:`` makes it current in this thread."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        device = driver.call("cuDeviceGet", ordinal)
        try:
            self._handle = driver.call("cuDevicePrimaryCtxRetain", device)
        except CudaError as error:
            raise EnvironmentFailure(f"GPU {ordinal} cannot be used: {error}; another program may have all of it") from None
        # Not at the interpreter's end: the process ends with its context, and memory may still lie there.
        weakref.finalize(self, driver.try_call, "cuDevicePrimaryCtxRelease", device).atexit = False

    def __enter__(self) -> Driver:
        self.driver.call("cuCtxPushCurrent", self._handle)
        return self.driver

    def __exit__(self, *exception: object) -> None:
        self.driver.try_call("cuCtxPopCurrent")

    def give_back(self, *calls: tuple[Any, ...]) -> None:
        """Run ``calls`` (function, arguments …), whatever each of them says: a broken context has nothing left to give."""
        try:
            with self as driver:
                for call in calls:
                    driver.try_call(*call)
        except CudaError:
            pass


def _text(bindings: Any, status: Any) -> str:
    _, text = bindings.cuGetErrorString(status)
    return text.decode() if text else "no description"
