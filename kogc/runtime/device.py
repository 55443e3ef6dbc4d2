"""What an engine asks of a device. A new kind of device is one module that offers these things, and a row in ``_DEVICES``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kogc.cache import content_key
from kogc.codegen.launch import Launch
from kogc.errors import BadInput
from kogc.machine import machine_id

if TYPE_CHECKING:
    from kogc.artifact import Artifact

#: Target name → module and class.
_DEVICES = {"cpu": ("kogc.runtime.cpu", "CpuDevice"), "h200": ("kogc.runtime.cuda", "CudaDevice")}


class Block(Protocol):
    """Zeroed memory the kernel can use. ``address`` is the kernel's pointer."""

    address: int
    nbytes: int

    def view(self, dtype: type | np.dtype) -> np.ndarray:
        """The memory as seen by the host (blocks made with ``host=True``)."""
        ...

    def read(self, dtype: type | np.dtype) -> np.ndarray:
        """A copy for the host. No kernel may be writing there."""
        ...

    def clear(self) -> None:
        """Fill with zeros."""
        ...

    def free(self) -> None:
        """Give the memory back. Harmless when done twice."""
        ...


class Running(Protocol):
    """A kernel that was started."""

    def wait(self, seen: int) -> bool:
        """Return when more than ``seen`` tokens are there, or with False when the kernel has left. Ctrl-C is served meanwhile."""
        ...

    def cancel(self) -> None:
        """Tell the kernel to leave at its next step or wait. Returns at once."""
        ...

    def join(self) -> None:
        """Return when the kernel has left. Raises EnvironmentFailure when it could not be run at all."""
        ...


@dataclass(frozen=True)
class Needs:
    """What a kernel asks for, in bytes: exchange buffers and KV caches of one session, of each rank; probe values (probe builds)."""

    exchange: int
    kv: int
    probe: int


class Device(Protocol):
    """One loaded kernel and the memory around it. ``columns``: tokens of its largest step; ``crowded``: what to tell a user
    when not all of the kernel's workers came to run."""

    needs: Needs
    columns: int
    crowded: str

    def alloc(self, nbytes: int, what: str, host: bool = False) -> Block:
        """Zeroed memory; ``host``: visible to both sides. Raises EnvironmentFailure naming ``what`` when there is none."""
        ...

    def upload(self, data: np.ndarray, what: str, progress: Callable[[int], None]) -> int:
        """Make read-only ``data`` (uint8) available to the kernel; its pointer there. The device keeps it until closed.

        ``progress`` is told how many bytes are there. Raises EnvironmentFailure naming ``what`` when there is no memory.
        """
        ...

    @staticmethod
    def obstacle() -> str | None:
        """Why no kernel can run here, in a few words; None when one can."""
        ...

    @staticmethod
    def model() -> str:
        """Which kind of device kernels run on here, beyond what ``machine_id`` knows; empty when there is nothing more to say."""
        ...

    def start(self, launch: Launch, left: Callable[[], None]) -> Running:
        """Begin a launch and return at once; ``left`` is called, from any thread, when the kernel has left.

        ``launch`` is that of rank 0; those of the other ranks lie behind it. What they point to must live until then.
        """
        ...

    def use_kernel(self, artifact: Artifact, defines: tuple[str, ...] = ()) -> None:
        """Run another kernel of the same program from the next launch on; what was uploaded stays. None may be running.

        Raises as ``open_device`` does, and then the kernel stays as it was.
        """
        ...

    def close(self) -> None:
        """Free everything uploaded."""
        ...


def open_device(artifact: Artifact, defines: tuple[str, ...] = ()) -> Device:
    """Load the artifact's kernel on its device; with ``defines``, a build of its source with those macros.

    Raises ArtifactError, MachineMismatch, ToolchainError.
    """
    target = artifact.manifest.target
    if target not in _DEVICES:
        raise BadInput(f"{artifact.path} is for target {target}; this kogc runs {', '.join(_DEVICES)}")
    return _device_class(target)(artifact, defines)


def why_no_device(target: str) -> str | None:
    """Why this machine cannot run kernels for ``target``, in a few words; None when it can."""
    return _device_class(target).obstacle()


def device_id(target: str) -> str:
    """A key of this machine and of its device for ``target``: what was measured on one is not claimed on another."""
    model = _device_class(target).model()
    return content_key(machine_id(), model) if model else machine_id()


def _device_class(target: str) -> type:
    module, name = _DEVICES[target]
    return getattr(import_module(module), name)
