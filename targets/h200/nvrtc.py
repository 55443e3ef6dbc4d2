"""NVIDIA's run-time compiler as a library: from CUDA C++ to a cubin, without a GPU, a driver or a host compiler.

Called through ctypes, because its C interface is a dozen functions that have not changed since CUDA 11.1, while every
wrapper has an opinion about where the library must lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kogc.errors import ToolchainError
from kogc.targets.h200.cuda_files import find_headers, find_libraries, headers_version
from kogc.targets.run_tool import first_errors

#: NVRTC has no C library headers. These are handed to it with the source, so that the source is the same for nvcc.
_STDINT = b"""#pragma once
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef long intptr_t;
typedef unsigned long uintptr_t;
#define INT8_MAX 127
#define INT16_MAX 32767
#define INT32_MAX 2147483647
#define INT32_MIN (-INT32_MAX - 1)
#define UINT32_MAX 4294967295u
#define INT64_MAX 9223372036854775807l
#define UINT64_MAX 18446744073709551615ul
"""
_STDDEF = b"#pragma once\n"  # size_t is built in
_HEADERS = {b"stdint.h": _STDINT, b"cstdint": _STDINT, b"stddef.h": _STDDEF, b"cstddef": _STDDEF}

#: The oldest version that knows what kernels use.
OLDEST = (12, 4)


@dataclass(frozen=True)
class Nvrtc:
    """A usable NVRTC: its ``library``, the ``headers`` that go with it, and its ``version``."""

    library: Path
    headers: Path
    version: tuple[int, int]

    @property
    def name(self) -> str:
        """With the patch level, where a wheel says it."""
        wheel = next((file for above in self.library.parents for file in above.glob("nvidia_cuda_nvrtc*.dist-info")), None)
        version = wheel.name.removesuffix(".dist-info").rpartition("-")[2] if wheel else ".".join(map(str, self.version))
        return f"NVRTC {version}"

    @property
    def identity(self) -> tuple[str, ...]:
        """What besides source and flags decides over the binary."""
        return (self.name, str(self.library.stat().st_size), headers_version(self.headers))


@lru_cache
def find_nvrtc() -> Nvrtc:
    """The first NVRTC that loads, is new enough and has headers. Raises ToolchainError saying what to install."""
    problems = []
    for library in find_libraries():
        try:
            version = _version(library)
        except OSError as error:
            problems.append(f"{library} cannot be loaded ({error})")
            continue
        headers = find_headers(library)
        if version < OLDEST:
            problems.append(f"{library} is of CUDA {version[0]}.{version[1]}, older than {OLDEST[0]}.{OLDEST[1]}")
        elif headers is None:
            problems.append("cuda_fp16.h is missing: `pip install nvidia-cuda-runtime`")
        else:
            return Nvrtc(library, headers, version)
    found = f" ({'; '.join(problems)})" if problems else ""
    raise ToolchainError(f"no usable NVRTC{found}; `pip install nvidia-cuda-nvrtc nvidia-cuda-runtime` (Linux, x86-64 or Arm)")


def compile_cubin(compiler: Nvrtc, source: str, flags: Sequence[str]) -> tuple[bytes, str]:
    """The cubin of ``source`` and what the compiler printed. Raises ToolchainError with the first errors."""
    library = _load(compiler.library)
    program = ctypes.c_void_p()
    names, texts = (ctypes.c_char_p * len(_HEADERS))(*_HEADERS), (ctypes.c_char_p * len(_HEADERS))(*_HEADERS.values())
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", len(_HEADERS), texts, names))
    try:
        options = [option.encode() for option in (*flags, f"-I{compiler.headers}")]
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _text(library, program)
        if status:
            raise ToolchainError(f"{compiler.name} failed: {_first_errors(log) or _meaning(library, status)}")
        return _cubin(library, program), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _first_errors(log: str) -> str:
    """Without the resource figures, which are printed even when something else failed."""
    return first_errors("\n".join(line for line in log.splitlines() if not line.startswith("ptxas info") and "spill stores" not in line))


@lru_cache
def _load(path: Path) -> ctypes.CDLL:
    # NVRTC opens its builtins by name only, and not every release looks beside itself: loaded already, they are found.
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


def _version(path: Path) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _load(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _text(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    # Parts of the log that come from different tools are separated by NULs.
    return _sized(library, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").replace(b"\0", b"\n").decode(errors="replace")


def _cubin(library: ctypes.CDLL, program: ctypes.c_void_p) -> bytes:
    return _sized(library, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")


def _sized(library: ctypes.CDLL, program: ctypes.c_void_p, size_call: str, get_call: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, size_call)(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, get_call)(program, data))
    return data.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise ToolchainError(f"NVRTC failed: {_meaning(library, status)}")


def _meaning(library: ctypes.CDLL, status: int) -> str:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library.nvrtcGetErrorString(status).decode()
