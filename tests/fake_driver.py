"""A GPU made of Python: NVIDIA's driver API over host memory, and a kernel that is a function.

Streams do everything at once, except launches, which run in a thread of their own. Every call is recorded. Constants and
error codes are the real bindings' own.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver as real

from kogc.codegen.launch import Launch, State

OK = real.CUresult.CUDA_SUCCESS
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
}  # fmt: skip
TOTAL_BYTES = 1 << 30


def error(name: str) -> Any:
    return getattr(real.CUresult, f"CUDA_ERROR_{name}")


class FakeDriver:
    """Stands for the module ``cuda.bindings.driver``.

    ``kernel(launch, fake)`` is what a launch runs; its return value is how the launch ends. ``failures``: function → the
    error it returns from now on. ``calls``: (function, arguments) in order; ``launched``: the last launch. ``contexts``: of the
    running thread, top last.
    """

    def __init__(self, facts: tuple[int, ...], kernel: Callable[[Launch, FakeDriver], Any]) -> None:
        self.facts, self.kernel = facts, kernel
        self.attributes = dict(ATTRIBUTES)
        self.gpus, self.version = 1, 13000
        self.failures: dict[str, Any] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.gpu_memory: dict[int, ctypes.Array] = {}
        self.host_memory: dict[int, ctypes.Array] = {}
        self.alive: set[str] = set()
        self.launched: Launch | None = None
        self.retained = 0
        self._numbers = itertools.count(1000)
        self._threads = threading.local()
        self._work: dict[int, threading.Thread] = {}
        self._events: dict[int, threading.Thread | None] = {}
        self._broken = OK

    # ── what tests look at ──

    @property
    def contexts(self) -> list[Any]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        return self._threads.stack

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    # ── how a call goes ──

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name.startswith("cuda"):
            return getattr(real, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if name in self.failures:
                return (self.failures[name],)
            if self._needs_context(name) and not self.contexts:
                return (error("INVALID_CONTEXT"),)
            if self._broken != OK and name != "cuCtxPopCurrent":
                return (self._broken,)
            values = getattr(self, f"_{name}")(*arguments)
            if isinstance(values, real.CUresult):
                return (values,)
            return (OK, *(values if isinstance(values, tuple) else () if values is None else (values,)))

        return call

    def cuGetErrorString(self, status: Any) -> tuple[Any, bytes]:
        return OK, f"as {status.name} says".encode()

    @staticmethod
    def _needs_context(name: str) -> bool:
        return not name.startswith(("cuInit", "cuDriver", "cuDevice", "cuCtx"))

    # ── GPUs and contexts ──

    def _cuInit(self, flags: int) -> None: ...

    def _cuDriverGetVersion(self) -> int:
        return self.version

    def _cuDeviceGetCount(self) -> int:
        return self.gpus

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"Fake H200".ljust(length, b"\0")

    def _cuDeviceGetUuid(self, device: int) -> Any:
        return SimpleNamespace(bytes=bytes([id(self) & 255, device]) * 8)

    def _cuDeviceTotalMem(self, device: int) -> int:
        return TOTAL_BYTES

    def _cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        return self.attributes[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def _cuDevicePrimaryCtxRetain(self, device: int) -> str:
        self.retained += 1
        return f"context of GPU {device}"

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.retained -= 1

    def _cuCtxPushCurrent(self, context: Any) -> None:
        self.contexts.append(context)

    def _cuCtxPopCurrent(self) -> Any:
        return self.contexts.pop()

    # ── code ──

    def _cuModuleLoadData(self, binary: bytes) -> Any:
        if not binary.startswith(b"\x7fELF"):
            return error("INVALID_IMAGE")
        return self._new("module")

    def _cuModuleUnload(self, module: str) -> None:
        self.alive.remove(module)

    def _cuModuleGetFunction(self, module: str, name: bytes) -> Any:
        return name.decode() if name in (b"kogc_kernel", b"kogc_read") else error("NOT_FOUND")

    def _cuModuleGetGlobal(self, module: str, name: bytes) -> tuple[int, int]:
        self._global = (ctypes.c_int64 * len(self.facts))(*self.facts)
        return ctypes.addressof(self._global), ctypes.sizeof(self._global)

    def _cuFuncSetAttribute(self, function: str, attribute: Any, value: int) -> None: ...

    def _cuLaunchCooperativeKernel(self, function: str, *rest: Any) -> Any:
        *_, stream, parameters = rest
        launch = self.launched = Launch.from_buffer_copy(ctypes.string_at(ctypes.c_void_p.from_address(parameters).value, ctypes.sizeof(Launch)))
        if rest[0] > self.attributes["MULTIPROCESSOR_COUNT"]:
            return error("COOPERATIVE_LAUNCH_TOO_LARGE")
        self._work[stream] = threading.Thread(target=self._run, args=(launch,), name="fake-gpu", daemon=True)
        self._work[stream].start()
        return OK

    def _cuLaunchKernel(self, function: str, *rest: Any) -> None:
        """Of the other kernels nothing is asked but that they take a millisecond."""

    def _run(self, launch: Launch) -> None:
        self._broken = self.kernel(launch, self) or self._broken

    # ── memory ──

    def _cuMemAlloc(self, nbytes: int) -> Any:
        return self._take(self.gpu_memory, nbytes) if self._cuMemGetInfo()[0] >= nbytes else error("OUT_OF_MEMORY")

    def _cuMemFree(self, address: int) -> None:
        del self.gpu_memory[address]

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        return self._take(self.host_memory, nbytes)

    def _cuMemFreeHost(self, address: int) -> None:
        del self.host_memory[address]

    def _cuMemHostGetDevicePointer(self, address: int, flags: int) -> int:
        return address

    def _cuMemGetInfo(self) -> tuple[int, int]:
        return TOTAL_BYTES - sum(map(ctypes.sizeof, self.gpu_memory.values())), TOTAL_BYTES

    def _cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        ctypes.memset(address, value, nbytes)

    def _cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def _cuMemcpyDtoH(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def _take(self, memory: dict[int, ctypes.Array], nbytes: int) -> int:
        block = (ctypes.c_uint8 * nbytes)()
        ctypes.memset(block, 0xEE, nbytes)  # nobody promises zeros
        memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    # ── streams and events ──

    def _cuStreamCreate(self, flags: int) -> str:
        assert flags == real.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self._new("stream")

    def _cuStreamDestroy(self, stream: str) -> None:
        self.alive.remove(stream)

    def _cuStreamSynchronize(self, stream: str) -> None:
        if stream in self._work:
            self._work[stream].join()

    def _cuStreamWaitEvent(self, stream: str, event: str, flags: int) -> None: ...

    def _cuEventCreate(self, flags: int) -> str:
        return self._new("event")

    def _cuEventRecord(self, event: str, stream: str) -> None:
        self._events[event] = self._work.get(stream)

    def _cuEventSynchronize(self, event: str) -> Any:
        work = self._events.get(event)
        if work is not None:
            work.join()
        return self._broken

    def _cuEventElapsedTime(self, began: str, ended: str) -> float:
        return 1.0

    def _cuEventDestroy(self, event: str) -> None:
        self.alive.remove(event)

    def _new(self, kind: str) -> str:
        name = f"{kind} {next(self._numbers)}"
        self.alive.add(name)
        return name


def gpu_clock_ns() -> int:
    """A clock that shares nothing with the host's but its pace."""
    return time.monotonic_ns() + 7_000_000_000_000


def summing_kernel(special: Mapping[int, Callable[[Launch, State, FakeDriver], Any]], vocab: int, eos: int, context: int) -> Callable[[Launch, FakeDriver], Any]:
    """The next token is the sum of all before, modulo ``vocab``; first tokens in ``special`` misbehave."""

    def kernel(launch: Launch, fake: FakeDriver) -> Any:
        state = State.from_address(launch.state)
        prompt = (ctypes.c_int32 * launch.n_prompt).from_address(launch.prompt)
        stops = set((ctypes.c_int32 * launch.n_stop).from_address(launch.stop_ids))
        if prompt[0] in special:
            return special[prompt[0]](launch, state, fake)
        kv = (ctypes.c_int32 * context).from_address(launch.kv)
        state.start_ns = gpu_clock_ns()
        kv[launch.start_position : launch.start_position + launch.n_prompt] = list(prompt)
        length = launch.start_position + launch.n_prompt
        if launch.mode == 1:
            logits = (ctypes.c_float * (vocab * launch.n_prompt)).from_address(launch.logits)
            for row in range(launch.n_prompt):
                logits[vocab * row + sum(kv[: launch.start_position + row + 1]) % vocab] = 1.0
            state.produced, state.finished = launch.n_prompt, 2
            return OK
        ring = (ctypes.c_int32 * launch.max_tokens).from_address(launch.ring)
        while True:
            ring[state.produced] = token = sum(kv[:length]) % vocab
            state.end_ns = gpu_clock_ns()
            state.first_token_ns = state.first_token_ns or state.end_ns
            state.produced += 1
            reason = 1 if token in stops else 2 if state.produced == launch.max_tokens else 3 if length == context else 0
            if reason:
                state.finished = reason
                return OK
            kv[length] = token
            length += 1

    return kernel


def cancelled(launch: Launch) -> bool:
    return bool(ctypes.c_uint32.from_address(launch.control).value)
