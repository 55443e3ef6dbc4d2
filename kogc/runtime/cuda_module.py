"""The cubin of an artifact, loaded into a GPU that can run it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from kogc.errors import ArtifactError, MachineMismatch
from kogc.runtime.cuda_driver import Context, CudaError, Driver, Gpu, driver_version
from kogc.runtime.facts import Fact, GpuFact, check_facts
from kogc.targets.h200 import toolchain

if TYPE_CHECKING:
    from kogc.artifact import Artifact

#: Cubins for this compute capability run on nothing else.
CAPABILITY = (9, 0)

#: What the driver says of code it does not understand.
_FOREIGN = {"INVALID_IMAGE", "INVALID_SOURCE", "NO_BINARY_FOR_GPU", "NOT_FOUND", "UNSUPPORTED_PTX_VERSION", "JIT_COMPILER_NOT_FOUND"}


def check_gpu(driver: Driver, gpu: Gpu, artifact: Artifact) -> None:
    """Raises MachineMismatch when ``artifact`` cannot run on ``gpu``: another kind of GPU, too small, or an old driver."""
    manifest = artifact.manifest
    if gpu.capability != CAPABILITY:
        have, need = (".".join(map(str, capability)) for capability in (gpu.capability, CAPABILITY))
        raise MachineMismatch(f"{gpu} has compute capability {have}, {artifact.path} needs {need}; choose another with KOGC_GPU")
    if gpu.multiprocessors < manifest.workers:
        raise MachineMismatch(
            f"{artifact.path} was compiled for {manifest.workers} multiprocessors, {gpu} has {gpu.multiprocessors}; "
            f"compile again with --workers {gpu.multiprocessors}"
        )
    built_with = re.search(r"(\d+)\.(\d+)", str(manifest.toolchain.get("compiler", "")))
    supported = driver_version(driver)
    # A driver runs the code of every compiler of its own major version.
    if built_with and int(built_with[1]) > supported[0]:
        raise MachineMismatch(
            f"{artifact.path} was built with CUDA {built_with[0]}, the driver supports CUDA up to {supported[0]}.{supported[1]}; update the driver"
        )


class Kernel:
    """A loaded kernel: its ``facts``, and the ``function`` to launch. Unloaded by ``close``."""

    def __init__(self, context: Context, gpu: Gpu, artifact: Artifact, defines: tuple[str, ...]) -> None:
        """With ``defines``: of a build of the artifact's source with those macros.

        Raises MachineMismatch, ToolchainError; ArtifactError when binary and manifest do not belong together.
        """
        self._context = context
        binary = toolchain.build(artifact.source, defines).read_bytes() if defines else bytes(artifact.binary)
        with context as driver:
            self._module = _loaded(driver, gpu, artifact, binary)
            try:
                self.function, self.facts = _contents(driver, self._module, artifact)
                check_facts(artifact, self.facts)
                self._take_shared_memory(driver, gpu, artifact)
            except BaseException:
                driver.try_call("cuModuleUnload", self._module)
                raise

    def close(self) -> None:
        """Unload. Not while it runs."""
        self._context.give_back(("cuModuleUnload", self._module))

    def _take_shared_memory(self, driver: Driver, gpu: Gpu, artifact: Artifact) -> None:
        needed = self.facts[GpuFact.SHARED_BYTES]
        if needed > gpu.shared_bytes:
            raise MachineMismatch(f"{artifact.path} needs {needed} bytes of shared memory in a block, {gpu} has {gpu.shared_bytes}")
        dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.call("cuFuncSetAttribute", self.function, dynamic, needed)


def _loaded(driver: Driver, gpu: Gpu, artifact: Artifact, binary: bytes) -> Any:
    try:
        return driver.call("cuModuleLoadData", binary)
    except CudaError as error:
        if error.name not in _FOREIGN:
            raise
        version = ".".join(map(str, driver_version(driver)))
        raise MachineMismatch(
            f"{artifact.path}: {gpu} with a driver for CUDA {version} cannot load its binary ({error.name}); update the driver or compile again"
        ) from None


def _contents(driver: Driver, module: Any, artifact: Artifact) -> tuple[Any, dict[int, int]]:
    """The kernel's function and its facts."""
    try:
        function = driver.call("cuModuleGetFunction", module, b"kogc_kernel")
        address, size = driver.call("cuModuleGetGlobal", module, b"kogc_facts")
    except CudaError as error:
        if error.name != "NOT_FOUND":
            raise
        raise ArtifactError(f"{artifact.path}: its binary is no kernel of kogc: kogc_kernel or kogc_facts is missing") from None
    facts = np.zeros(len(Fact) + len(GpuFact), np.int64)
    if size < facts.nbytes:
        raise ArtifactError(f"{artifact.path}: its binary is no kernel of kogc: kogc_facts has {size} bytes")
    driver.call("cuMemcpyDtoH", facts.ctypes.data, address, facts.nbytes)
    return function, dict(zip((*Fact, *GpuFact), facts.tolist(), strict=True))
