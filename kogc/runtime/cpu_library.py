"""The shared library behind a CPU artifact: the artifact's own where this machine can run it, else built from its source."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kogc.cache import cache_folder, content_key, locked, write_atomically
from kogc.codegen.launch import Launch, State
from kogc.errors import ArtifactError, MachineMismatch, ToolchainError
from kogc.runtime.facts import Fact, check_facts
from kogc.targets.cpu import toolchain
from kogc.targets.cpu.features import machine, missing_features

if TYPE_CHECKING:
    from kogc.artifact import Artifact


class Library:
    """A loaded kernel: ``run`` and ``wait`` are its entry points, ``facts`` its answers."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.run = library.kogc_run
        self.run.argtypes, self.run.restype = [ctypes.POINTER(Launch)], ctypes.c_int
        self.wait = library.kogc_wait
        self.wait.argtypes, self.wait.restype = [ctypes.POINTER(State), ctypes.c_int32, ctypes.c_int64], ctypes.c_int
        query = library.kogc_query
        query.argtypes, query.restype = [ctypes.c_int], ctypes.c_int64
        self.facts = {fact: query(fact) for fact in Fact}


def open_library(artifact: Artifact, defines: tuple[str, ...] = ()) -> Library:
    """Load the kernel of ``artifact``, or a build of its source with ``defines``.

    Raises MachineMismatch when it was built for another machine and cannot be built here, ToolchainError when a build
    with ``defines`` fails, ArtifactError when the kernel and the manifest do not belong together.
    """
    try:
        library = Library(_library_path(artifact, defines))
    except (OSError, AttributeError) as error:
        raise ArtifactError(f"{artifact.path}: section kernel.so cannot be loaded: {error}") from None
    check_facts(artifact, library.facts)
    return library


def _library_path(artifact: Artifact, defines: tuple[str, ...]) -> Path:
    if defines:
        return toolchain.build(artifact.source, defines)
    obstacle = _obstacle(artifact)
    if obstacle is None:
        return _extracted(bytes(artifact.binary))
    try:
        return toolchain.build(artifact.source)
    except ToolchainError as error:
        raise MachineMismatch(
            f"{artifact.path} was built for another machine ({obstacle}) and its source cannot be built here ({error}); "
            "compile the model again on this machine"
        ) from None


def _obstacle(artifact: Artifact) -> str | None:
    """Why the artifact's own binary must not be loaded here. An unsupported instruction would kill the process."""
    facts = artifact.manifest.toolchain
    made_for, here = (facts.get("platform"), facts.get("machine")), (sys.platform, machine())
    if made_for != here:
        return f"{made_for[0]} on {made_for[1]}, this is {here[0]} on {here[1]}"
    missing = missing_features(artifact.manifest.cpu_features)
    return f"its CPU has {', '.join(missing)}" if missing else None


def _extracted(binary: bytes) -> Path:
    """The library as a file of its own, named by its content: loaders take files only."""
    path = cache_folder("kernels") / f"{content_key('extracted', binary)}.so"
    # Loading half a library kills the process, so a look at what is there comes first.
    if not (path.is_file() and path.read_bytes() == binary):
        with locked(path):
            write_atomically(path, binary)
    return path
