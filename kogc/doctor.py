"""What kogc finds on this machine: for `kogc doctor` and for bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kogc import __version__
from kogc.cache import cache_folder
from kogc.errors import KogcError
from kogc.machine import cpu_model, memory_bytes, usable_cores

_PACKAGES = ("torch", "numpy", "jinja2", "networkx", "tokenizers", "safetensors", "gguf", "ziglang")


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``level``: ``ok``, ``note`` (works, but know this) or ``bad`` (kogc cannot do its job)."""

    what: str
    level: str
    text: str


def examine() -> list[Finding]:
    """Look at everything a compile and a run need."""
    return [*_system(), *_packages(), *_compilers(), *_cuda(), *_folders()]


def _system() -> Iterator[Finding]:
    yield Finding("kogc", "ok", f"{__version__} in {Path(__file__).parent}")
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Finding("machine", "ok", f"{platform.system()} {platform.machine()}, {cpu_model()}, {usable_cores()} usable cores")
    memory = _memory()
    if memory:
        yield Finding("memory", "ok", memory)


def _memory() -> str | None:
    total, available = memory_bytes()
    return f"{total / 1e9:.1f} GB, {available / 1e9:.1f} GB available" if total else None


def _packages() -> Iterator[Finding]:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding("packages", "ok", ", ".join(found))
    if missing:
        only_zig = missing == ["ziglang"]
        text = f"{', '.join(missing)} not installed" + ("; then the system's C++ compiler is needed" if only_zig else "; reinstall kogc")
        yield Finding("packages", "note" if only_zig else "bad", text)


def _compilers() -> Iterator[Finding]:
    from kogc.targets.cpu import toolchain

    try:
        compilers = toolchain.find_compilers()
    except KogcError as error:  # the cache folder, where trial builds go
        yield Finding("compiler", "bad", f"not tried: {error}")
        return
    chosen = next((compiler for compiler in compilers if compiler.works), None)
    for compiler in compilers:
        state = "used" if compiler is chosen else "works" if compiler.works else f"does not work: {compiler.problem}"
        text = f"{compiler.version} ({compiler.origin}, {' '.join(compiler.command)}): {state}"
        yield Finding("compiler", "ok" if compiler.works else "note", text)
    if chosen is None:
        yield Finding("compiler", "bad", "no working C++ compiler; install one (apt install g++) or `pip install ziglang`")
    else:
        yield Finding("simd", "ok", f"{toolchain.simd_width()} fp32 lanes ({', '.join(toolchain.required_features()) or 'baseline'})")


def _cuda() -> Iterator[Finding]:
    """What the h200 target needs: to compile (no GPU), to look at machine code, and to run. Without it the rest still works."""
    from kogc.targets.h200 import cuda_files, nvrtc, toolchain

    try:
        compilers = toolchain.find_compilers()
    except KogcError as error:
        yield Finding("cuda", "note", f"not tried: {error}")
        return
    chosen = next((compiler for compiler in compilers if compiler.works), None)
    for compiler in compilers:
        state = "used" if compiler is chosen else "works" if compiler.works else f"does not work: {compiler.problem}"
        place = f" ({compiler.origin}, {compiler.place})" if compiler.works else ""
        yield Finding("cuda", "ok" if compiler.works else "note", f"{compiler.version}{place}: {state}")
    if chosen and not chosen.command:
        headers = nvrtc.find_nvrtc().headers
        yield Finding("cuda", "ok", f"headers of CUDA {cuda_files.headers_version(headers)} in {headers}")
    nvdisasm = cuda_files.find_program("nvdisasm")
    text = str(nvdisasm) if nvdisasm else "no nvdisasm, so `kogc inspect --asm` shows no SASS; `pip install nvidia-cuda-nvdisasm`"
    yield Finding("sass", "ok" if nvdisasm else "note", text)
    yield _gpu()


def _gpu() -> Finding:
    from kogc.runtime.cuda import CudaDevice
    from kogc.runtime.cuda_driver import chosen_gpu, driver_version, load_driver

    obstacle = CudaDevice.obstacle()
    if obstacle:
        return Finding("gpu", "note", f"{obstacle}; kernels for h200 can be compiled here, but not run")
    driver = load_driver()
    gpu, version = chosen_gpu(driver), ".".join(map(str, driver_version(driver)))
    return Finding("gpu", "ok", f"{gpu}, {gpu.multiprocessors} multiprocessors, {gpu.memory_bytes / 1e9:.0f} GB, driver for CUDA {version}")


def _folders() -> Iterator[Finding]:
    for what, folder in (("cache", _cache_or_error()), ("temporary", Path(tempfile.gettempdir()))):
        if isinstance(folder, str):
            yield Finding(what, "bad", folder)
        else:
            free = shutil.disk_usage(folder).free / 1e9
            writable = os.access(folder, os.W_OK)
            level = "ok" if writable and free > 1 else "note" if writable else "bad"
            yield Finding(what, level, f"{folder}, {free:.1f} GB free" + ("" if writable else ", not writable"))


def _cache_or_error() -> Path | str:
    try:
        return cache_folder("kernels").parent
    except KogcError as error:
        return str(error)
