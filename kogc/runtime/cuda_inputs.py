"""What every launch takes along: the words that tell a kernel to leave, its prompt and its stop ids. Workers read them again and
again, so they lie on the GPU, in one piece that one copy fills."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kogc.codegen.launch import Launch
from kogc.runtime.cuda_memory import GpuBlock, HostBlock

#: The launch's control words: 64 bytes, the first one tells the kernel to leave.
CONTROL_BYTES = 64

#: Room is taken in pieces of at least this.
_LEAST_BYTES = 1 << 16


class Inputs:
    """The inputs of one launch after the other. ``take(bytes, what)`` gives memory of the GPU and the pinned memory to fill it from."""

    def __init__(self, take: Callable[[int, str], tuple[GpuBlock, HostBlock]]) -> None:
        self._take = take
        self._gpu, self._pinned = take(_LEAST_BYTES, "the launch's control words and prompt")

    def move(self, launch: Launch) -> tuple[int, int, int]:
        """Let ``launch`` find its inputs on the GPU, and return the copy that brings them there: to, from (pinned), bytes. No
        other launch may be under way. Prompt and stop ids follow each other where ``launch`` points to now."""
        ids = 4 * (launch.n_prompt + launch.n_stop)
        if CONTROL_BYTES + ids > self._gpu.nbytes:
            self._gpu.free()
            self._gpu, self._pinned = self._take(CONTROL_BYTES + ids, "the prompt")
        ctypes.memmove(self._pinned.address_here + CONTROL_BYTES, launch.prompt, ids)  # the control words stay zeros
        launch.control = self._gpu.address
        launch.prompt = self._gpu.address + CONTROL_BYTES
        launch.stop_ids = launch.prompt + 4 * launch.n_prompt
        return self._gpu.address, self._pinned.address_here, CONTROL_BYTES + ids

    def close(self) -> None:
        """Let go of the memory. The kernel must have left."""
        self._gpu.free()
        self._pinned.free()
