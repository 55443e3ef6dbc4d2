"""From CUDA C++ to a cubin for sm_90a: finds a compiler, builds, reports resources, and never builds the same thing twice.

No GPU and no driver is needed. nvcc is used where there is a working one, else NVRTC from NVIDIA's wheels.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kogc.cache import content_key
from kogc.errors import ToolchainError
from kogc.targets.build_cache import Files, built
from kogc.targets.h200 import nvrtc
from kogc.targets.h200.cubin import read_array
from kogc.targets.h200.disassembler import disassemble
from kogc.targets.h200.resources import ResourceReport, check_resources, read_report
from kogc.targets.run_tool import run_tool

#: Chooses the compiler: ``nvrtc`` for the one in NVIDIA's wheels, or the command that is nvcc.
COMPILER_VARIABLE = "KOGC_NVCC"

#: Names of the artifact's members.
SOURCE_MEMBER, BINARY_MEMBER = "kernel.cu", "kernel.cubin"

#: No fast-math: a NaN must stay visible, infinities are used as masks; only quotients may be 2 ulp off. Line numbers cost nothing at run time and let
#: profilers, the sanitizer and ``kogc inspect --asm`` name lines of the emitted source.
FLAGS = ("-arch=sm_90a", "-std=c++17", "-prec-div=false", "-lineinfo")

#: Which of ``kogc_facts`` is the dynamic shared memory.
_SHARED_FACT = 11

_TRIAL = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
extern "C" __global__ void kogc_trial(uint32_t* out) { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); *out = 41; }
"""


@dataclass(frozen=True)
class Compiler:
    """A CUDA compiler. ``command``: of nvcc, empty for NVRTC; ``origin``: ``$KOGC_NVCC``, ``system`` or ``wheel``;
    ``version``: one line; ``problem``: why it does not work, if it does not."""

    command: tuple[str, ...]
    origin: str
    version: str
    problem: str | None = None

    @property
    def works(self) -> bool:
        return self.problem is None

    @property
    def place(self) -> str:
        """Where it lies."""
        return shlex.join(self.command) or str(nvrtc.find_nvrtc().library)


def find_compilers() -> list[Compiler]:
    """Every compiler kogc would consider, best first: $KOGC_NVCC, nvcc, NVRTC."""
    return [_tried(origin, command) for origin, command in _candidates()]


def compiler() -> Compiler:
    """The compiler ``build`` uses: $KOGC_NVCC when set, else the first that works. Raises ToolchainError."""
    problems = []
    for origin, command in _candidates():
        candidate = _tried(origin, command)
        if candidate.works:
            return candidate
        if origin == f"${COMPILER_VARIABLE}":
            raise ToolchainError(f"the chosen CUDA compiler does not work: {candidate.problem}; unset {COMPILER_VARIABLE} or correct it")
        problems.append(candidate.problem)
    raise ToolchainError(f"no working CUDA compiler: {'; '.join(filter(None, problems))}")


def build(source: str, defines: Sequence[str] = ()) -> Path:
    """Compile ``source`` to a cubin in the cache and return its path; ``resource_report`` has its figures.

    ``defines`` become ``-D``. A cubin is found again by source, flags and compiler. Raises ToolchainError with the
    compiler's first errors, EnvironmentFailure when the cache cannot be written.
    """
    return _build(compiler(), source, defines)


def resource_report(cubin: Path) -> ResourceReport:
    """Registers, spills and shared memory of a cubin that ``build`` returned."""
    facts = json.loads(cubin.with_suffix(".json").read_text())
    return ResourceReport(**{**facts, "losses": tuple(facts["losses"])})


def binary_facts(cubin: Path) -> dict[str, Any]:
    """What the manifest records about a cubin that ``build`` returned. Raises PlanRejected when it must not be used."""
    report = resource_report(cubin)
    check_resources(report)
    return {"resources": dataclasses.asdict(report)}


def describe(facts: Mapping[str, Any]) -> str | None:
    """``binary_facts`` in one line."""
    return ResourceReport(**facts["resources"]).line if "resources" in facts else None


def required_features() -> tuple[str, ...]:
    """CPU features the binary needs: none."""
    return ()


def toolchain_facts() -> dict[str, Any]:
    """What the manifest's ``toolchain`` records: how the binary was made, and for what."""
    chosen = compiler()
    return {"compiler": chosen.version, "origin": chosen.origin, "flags": list(FLAGS), "machine": "sm_90a"}


def _candidates() -> list[tuple[str, tuple[str, ...]]]:
    """(origin, command) in the order of preference; NVRTC has no command."""
    chosen = os.environ.get(COMPILER_VARIABLE, "").strip()
    if chosen == "nvrtc":
        return [(f"${COMPILER_VARIABLE}", ())]
    if chosen:
        try:
            return [(f"${COMPILER_VARIABLE}", tuple(shlex.split(chosen)))]
        except ValueError as error:
            raise ToolchainError(f"{COMPILER_VARIABLE} is {chosen!r}, not a command ({error})") from None
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return [*([("system", (nvcc,))] if nvcc else []), ("wheel", ())]


@lru_cache
def _tried(origin: str, command: tuple[str, ...]) -> Compiler:
    """Ask for the version and build a trial kernel (once per process; the cubin is cached like any other)."""
    name = shlex.join(command) or "NVRTC"
    try:
        version = _nvcc_version(command) if command else nvrtc.find_nvrtc().name
        candidate = Compiler(command, origin, version)
        _build(candidate, _TRIAL, ())
    except ToolchainError as error:
        problem = str(error) if not command else f"{name} ({origin}): {error}"
        return Compiler(command, origin, name, problem)
    return candidate


def _nvcc_version(command: tuple[str, ...]) -> str:
    lines = run_tool([*command, "--version"])[0].strip().splitlines()
    return next((f"nvcc {line.rpartition(' ')[2].lstrip('V')}" for line in lines if "release" in line), "nvcc of unknown version")


def _build(chosen: Compiler, source: str, defines: Sequence[str]) -> Path:
    flags = [*FLAGS, *(f"-D{define}" for define in defines)]
    identity = (chosen.version, os.path.realpath(chosen.command[0])) if chosen.command else nvrtc.find_nvrtc().identity
    return built(content_key("cubin", source, "\0".join(flags), *identity), (".cubin", ".json"), lambda folder: _compile(chosen, source, flags, folder))


def _compile(chosen: Compiler, source: str, flags: Sequence[str], folder: Path) -> Files:
    """The cubin and its resource figures. Messages say ``kernel.cu(LINE)``."""
    flags = [*flags, "--ptxas-options=-v"]
    if chosen.command:
        (folder / "kernel.cu").write_text(source)
        _, log = run_tool([*chosen.command, *flags, "-cubin", "kernel.cu", "-o", "kernel.cubin"], folder)
        if not (folder / "kernel.cubin").is_file():
            raise ToolchainError(f"{chosen.command[0]} succeeded without writing a cubin; it is no nvcc")
        cubin = (folder / "kernel.cubin").read_bytes()
    else:
        cubin, log = nvrtc.compile_cubin(nvrtc.find_nvrtc(), source, flags)
    try:
        report = read_report(log)
    except ValueError as error:
        raise ToolchainError(f"{chosen.version}: {error}; there must be a __global__ function in the source") from None
    facts = read_array(cubin, "kogc_facts") or ()
    if len(facts) > _SHARED_FACT:
        report = dataclasses.replace(report, dynamic_shared=facts[_SHARED_FACT])
    return {".cubin": cubin, ".json": json.dumps(dataclasses.asdict(report)).encode()}


__all__ = [
    "BINARY_MEMBER", "COMPILER_VARIABLE", "SOURCE_MEMBER", "Compiler", "binary_facts", "build", "compiler", "describe", "disassemble", "find_compilers",
    "required_features", "resource_report", "toolchain_facts",
]  # fmt: skip
