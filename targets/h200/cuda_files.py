"""Where CUDA's files lie: in NVIDIA's wheels (``nvidia-cuda-nvrtc``, ``-runtime``, ``-nvdisasm``, PyTorch's own) or in a toolkit.

The wheels share the namespace package ``nvidia``; their folders changed over the years (``nvidia/cuda_nvrtc`` for CUDA 12,
``nvidia/cu13`` since), so files are looked for by name below any of them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

#: Says where a toolkit lies that is not in the usual place.
HOME_VARIABLES = ("CUDA_HOME", "CUDA_PATH")


def wheel_folders() -> list[Path]:
    """The folders of NVIDIA's wheels, in the order of Python's path."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations or []) if spec else []
    return [folder for place in dict.fromkeys(places) for folder in sorted(Path(place).glob("*")) if folder.is_dir()]


def toolkit_folders() -> list[Path]:
    """The folders of installed toolkits: named by ``CUDA_HOME``, around the ``nvcc`` on the path, ``/usr/local/cuda*``."""
    named = [Path(os.environ[variable]) for variable in HOME_VARIABLES if os.environ.get(variable)]
    nvcc = shutil.which("nvcc")
    beside = [Path(os.path.realpath(nvcc)).parents[1]] if nvcc else []
    usual = sorted(Path("/usr/local").glob("cuda*"), key=_version_in_name, reverse=True)
    return [folder for folder in dict.fromkeys((*named, *beside, *usual)) if folder.is_dir()]


def find_libraries() -> Iterator[Path]:
    """Every ``libnvrtc``: of the wheels first, then of the toolkits."""
    for folder in wheel_folders():
        yield from sorted((folder / "lib").glob("libnvrtc.so.*"))
    for folder in toolkit_folders():
        yield from sorted((folder / "lib64").glob("libnvrtc.so.[0-9][0-9]"))


def find_headers(library: Path) -> Path | None:
    """The folder with ``cuda_fp16.h`` and its neighbours: beside ``library`` if it is there, else any."""
    folders = [library.parents[1], *wheel_folders(), *toolkit_folders()]
    return next((folder / "include" for folder in folders if (folder / "include" / "cuda_fp16.h").is_file()), None)


def find_program(name: str) -> Path | None:
    """The program ``name`` (``nvdisasm``, ``cuobjdump``): from NVIDIA's wheels, a toolkit, the path, or Triton's wheel."""
    places = [folder / "bin" / name for folder in (*wheel_folders(), *toolkit_folders())]
    on_path = shutil.which(name)
    places += [Path(on_path)] if on_path else []
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name)
    return next((place for place in places if os.access(place, os.X_OK) and place.is_file()), None)


def headers_version(headers: Path) -> str:
    """``13.5`` from the ``CUDA_VERSION`` in ``cuda.h``, or ``unknown``."""
    try:
        found = re.search(r"#define CUDA_VERSION (\d+)", (headers / "cuda.h").read_text(errors="replace"))
    except OSError:
        return "unknown"
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else "unknown"


def _version_in_name(folder: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", folder.name)))
