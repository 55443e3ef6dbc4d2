"""An NVIDIA GPU as a device: one cooperative launch per generation, watched through pinned memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kogc.codegen.launch import Launch, State
from kogc.errors import BadInput, EnvironmentFailure, MachineMismatch
from kogc.runtime import cuda_driver
from kogc.runtime.cuda_driver import Context, CudaError
from kogc.runtime.cuda_inputs import Inputs
from kogc.runtime.cuda_memory import GpuBlock, HostBlock, Memory, upload
from kogc.runtime.cuda_module import CAPABILITY, Kernel, check_gpu
from kogc.runtime.cuda_turn import Turn
from kogc.runtime.device import Needs
from kogc.runtime.facts import Fact, GpuFact
from kogc.runtime.kernel_thread import KernelThread

if TYPE_CHECKING:
    from kogc.artifact import Artifact

#: Sleeps between two looks at the ring, in seconds: short after a token, longer while none comes.
_SHORTEST_S, _LONGEST_S, _GROWTH = 20e-6, 1e-3, 1.5

#: The host watches for the kernel's start this long without sleeping, to learn how the two clocks relate.
_START_NS = 2_000_000


class CudaDevice:
    """The kernel of an artifact and its weights on one GPU."""

    crowded = "another program occupies the GPU (`nvidia-smi` lists them); end it, or try again later"

    def __init__(self, artifact: Artifact, defines: tuple[str, ...] = ()) -> None:
        driver = cuda_driver.load_driver()
        self._gpu = cuda_driver.chosen_gpu(driver)
        check_gpu(driver, self._gpu, artifact)
        self._context = Context(driver, self._gpu.ordinal)
        self._memory = Memory(self._context)
        self._queue = Queue(self._context)
        self._turn = Turn(self._gpu.uuid)
        self._blocks: list[GpuBlock] = []
        try:
            self._kernel = Kernel(self._context, self._gpu, artifact, defines)
            self._inputs = Inputs(self._pair)
        except BaseException:
            self.close()
            raise
        facts = self._kernel.facts
        self.columns = facts[Fact.MAX_COLUMNS]
        self.needs = Needs(facts[Fact.EXCHANGE_BYTES], facts[Fact.KV_BYTES], 4 * facts[Fact.PROBE_FLOATS])

    @staticmethod
    def obstacle() -> str | None:
        """Why no kernel can run here, in a few words; None when one can."""
        try:
            gpu = cuda_driver.chosen_gpu(cuda_driver.load_driver())
        except (BadInput, EnvironmentFailure) as error:
            return str(error)
        if gpu.capability != CAPABILITY:
            return f"{gpu} has compute capability {'.'.join(map(str, gpu.capability))}, not {'.'.join(map(str, CAPABILITY))}"
        return None

    @staticmethod
    def model() -> str:
        """The name of the chosen GPU; empty where there is none."""
        try:
            return cuda_driver.chosen_gpu(cuda_driver.load_driver()).name
        except (BadInput, EnvironmentFailure):
            return ""

    def alloc(self, nbytes: int, what: str, host: bool = False) -> GpuBlock | HostBlock:
        """Zeroed memory of the GPU, or with ``host`` pinned memory that both sides see."""
        return HostBlock(self._memory, nbytes, what) if host else GpuBlock(self._memory, nbytes, what, self._queue.clear)

    def upload(self, data: np.ndarray, what: str, progress: Callable[[int], None]) -> int:
        """Copy ``data`` to the GPU; its address there."""
        block = self._own(data.nbytes, what)
        upload(self._context, self._memory, self._queue.stream, data, block.address, progress)
        return block.address

    def start(self, launch: Launch, left: Callable[[], None]) -> CudaRun:
        """Wait for the GPU's turn, launch and return. Raises EnvironmentFailure when the GPU refuses the launch; then, and when
        Ctrl-C comes meanwhile, nothing runs."""
        self._turn.take()
        self._memory.begin_launch()

        def ended() -> None:
            self._memory.end_launch()
            self._turn.end()

        try:
            facts = self._kernel.facts
            inputs = self._inputs.move(launch)
            self._queue.launch(inputs, self._kernel.function, facts[Fact.WORKERS], facts[GpuFact.THREADS], facts[GpuFact.SHARED_BYTES], launch)
            return CudaRun(self._queue, launch, lambda: (ended(), left()))
        except BaseException:
            ended()
            raise

    def use_kernel(self, artifact: Artifact, defines: tuple[str, ...] = ()) -> None:
        """Run the kernel of ``artifact`` from the next launch on. None may be running."""
        check_gpu(cuda_driver.load_driver(), self._gpu, artifact)
        former, self._kernel = self._kernel, Kernel(self._context, self._gpu, artifact, defines)
        former.close()

    def close(self) -> None:
        """Free weights, streams and code. The kernel must have left."""
        self._queue.close()
        self._turn.close()
        if hasattr(self, "_inputs"):
            self._inputs.close()
        for block in self._blocks:
            block.free()
        self._blocks.clear()
        self._memory.close()
        if hasattr(self, "_kernel"):  # which, like the inputs, closes itself when it cannot be made
            self._kernel.close()

    def _own(self, nbytes: int, what: str) -> GpuBlock:
        """Memory of the GPU until ``close``."""
        self._blocks.append(self.alloc(nbytes, what))
        return self._blocks[-1]

    def _pair(self, nbytes: int, what: str) -> tuple[GpuBlock, HostBlock]:
        """The same, and as much pinned memory to fill it from."""
        return self._own(nbytes, what), self.alloc(nbytes, what, host=True)


class Queue:
    """The streams of one device: ``stream`` for launches and what must come before them, another to cancel past a running kernel.

    Both are non-blocking: they neither wait for the streams of others in this process nor hold them up.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        with context as driver:
            flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self.stream, self._side = (driver.call("cuStreamCreate", flags) for _ in range(2))
            quiet = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            # Waiting for the kernel's end must not keep a processor busy.
            self._ready, self._done = (driver.call("cuEventCreate", quiet | more) for more in (0, int(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC)))
            self._one = driver.call("cuMemHostAlloc", 4, driver.CU_MEMHOSTALLOC_PORTABLE)
        ctypes.c_uint32.from_address(self._one).value = 1
        self._open = True

    def clear(self, address: int, nbytes: int) -> None:
        """Zero memory of the GPU before the next launch."""
        with self._context as driver:
            driver.call("cuMemsetD8Async", address, 0, nbytes, self.stream)

    def launch(self, inputs: tuple[int, int, int], function: Any, workers: int, threads: int, shared_bytes: int, launch: Launch) -> None:
        """Copy ``inputs`` (to, from pinned memory, bytes) to the GPU and launch ``workers`` blocks that all run at once, or none.
        Returns at once. Raises MachineMismatch, CudaError."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(launch))
        with self._context as driver:
            driver.call("cuMemcpyHtoDAsync", *inputs, self.stream)
            driver.call("cuEventRecord", self._ready, self.stream)
            try:
                driver.call(
                    "cuLaunchCooperativeKernel", function, workers, 1, 1, threads, 1, 1, shared_bytes, self.stream, ctypes.addressof(parameters)
                )
            except CudaError as error:
                if error.name != "COOPERATIVE_LAUNCH_TOO_LARGE":
                    raise
                raise MachineMismatch(f"the GPU has no room for {workers} blocks of {threads} threads at once; compile the model again here") from None
            driver.call("cuEventRecord", self._done, self.stream)

    def cancel(self, control: int) -> None:
        """Tell the running kernel to leave: the first word at ``control`` becomes 1."""
        with self._context as driver:
            # Not before the words were zeroed for this launch.
            driver.call("cuStreamWaitEvent", self._side, self._ready, 0)
            driver.call("cuMemcpyHtoDAsync", control, self._one, 4, self._side)

    def wait_for_end(self) -> None:
        """Return when the launched kernel has left. Raises CudaError when it broke."""
        with self._context as driver:
            driver.call("cuEventSynchronize", self._done)

    def close(self) -> None:
        """Give everything back."""
        if not self._open:
            return
        self._open = False
        streams, events = (self.stream, self._side), (self._ready, self._done)
        self._context.give_back(
            *(("cuStreamSynchronize", stream) for stream in streams),
            *(("cuStreamDestroy", stream) for stream in streams),
            *(("cuEventDestroy", event) for event in events),
            ("cuMemFreeHost", self._one),
        )


class CudaRun(KernelThread):
    """A launch in progress: the thread waits for the kernel's end, and readers look at the pinned state."""

    def __init__(self, queue: Queue, launch: Launch, left: Callable[[], None]) -> None:
        self._queue, self._launch = queue, launch
        self._state = State.from_address(launch.state)
        self._offset: int | None = None
        try:
            self._see_start()
        except BaseException:  # Ctrl-C: nobody has this object, so nobody could cancel
            self._drop()
            raise
        super().__init__(left)

    def _see_start(self) -> None:
        """Look for the kernel's start and do nothing else, not even begin the thread: a late look would make all times late."""
        limit = time.monotonic_ns() + _START_NS
        while not (self._state.start_ns or self._state.finished) and time.monotonic_ns() < limit:
            pass
        self._read_clock(self._state.start_ns)

    def _drop(self) -> None:
        """Cancel, and return when the kernel has left."""
        try:
            self._queue.cancel(self._launch.control)
            self._queue.wait_for_end()
        except CudaError:
            pass  # it has left, as everything has

    def wait(self, seen: int) -> bool:
        """Return when more than ``seen`` tokens are there, or with False when the kernel has left. Ctrl-C is served meanwhile."""
        pause = _SHORTEST_S
        while True:
            if self._state.finished or not self.running:
                return False
            if self._state.produced > seen:
                return True
            time.sleep(pause)
            self._read_clock(self._state.start_ns)
            pause = min(pause * _GROWTH, _LONGEST_S)

    def cancel(self) -> None:
        """Set the word that workers look at in every wait and step, past the running kernel."""
        if not self.running:
            return
        try:
            self._queue.cancel(self._launch.control)
        except CudaError:
            pass  # the kernel is broken, and whoever joins learns of that

    def _work(self) -> None:
        self._queue.wait_for_end()
        self._to_host_clock()

    def _read_clock(self, stamp: int) -> None:
        """Learn from a time the kernel has just written how far the host's clock is ahead. The closest look counts."""
        if stamp and self._offset is None:
            self._offset = time.monotonic_ns() - stamp

    def _to_host_clock(self) -> None:
        """Turn the times of the state, in the GPU's clock, into the host's monotonic ones."""
        state = self._state
        self._read_clock(state.end_ns)
        for name in ("start_ns", "first_token_ns", "end_ns"):
            stamp = getattr(state, name)
            if stamp and self._offset is not None:
                setattr(state, name, stamp + self._offset)
