"""From C++ source to a shared library: finds a compiler, builds, and never builds the same thing twice.

The source uses no symbol of the C++ library (headers only, threads by pthread), so that the library loads beside any
other and the ``ziglang`` wheel needs not build its own libc++ first, which takes minutes.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kogc.cache import cache_folder, content_key, write_atomically
from kogc.errors import ToolchainError
from kogc.targets.build_cache import built
from kogc.targets.cpu.features import features_of_macros, host_features, machine
from kogc.targets.run_tool import run_tool

#: Chooses the compiler: a command with arguments, or ``zig`` for the wheel.
COMPILER_VARIABLE = "KOGC_CXX"
SYSTEM_COMPILERS = ("c++", "g++", "clang++")

#: Names of the artifact's members.
SOURCE_MEMBER, BINARY_MEMBER = "kernel.cpp", "kernel.so"

#: No fast-math of any kind: a NaN must stay visible, infinities are used as masks, and sums keep their order.
FLAGS = ("-O3", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast", "-fPIC", "-pthread")

_TRIAL = """#include <atomic>
#include <cmath>
#include <cstdint>
#include <pthread.h>
extern "C" int kogc_trial() { std::atomic<int> answer{41}; return answer.fetch_add(1) + 1; }
"""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and what a trial build said about it.

    ``command``: argument prefix; ``origin``: ``$KOGC_CXX``, ``system`` or ``ziglang wheel``; ``version``: one line;
    ``works``: a tiny library compiled, loaded and answered, else ``problem`` says why not.
    """

    command: tuple[str, ...]
    origin: str
    version: str
    works: bool
    problem: str | None = None

    @property
    def path(self) -> str:
        return self.command[0]

    @property
    def is_zig(self) -> bool:
        return Path(self.path).stem == "zig"


def find_compilers() -> list[Compiler]:
    """Every compiler kogc would consider, best first: $KOGC_CXX, system c++/g++/clang++, the ziglang wheel."""
    return [_tried(origin, command) for origin, command in _candidates()]


def compiler() -> Compiler:
    """The compiler ``build`` uses: $KOGC_CXX when set, else the first that works. Raises ToolchainError."""
    problems = []
    for origin, command in _candidates():
        candidate = _tried(origin, command)
        if candidate.works:
            return candidate
        problem = f"{shlex.join(command)} ({origin}): {candidate.problem}"
        if origin == f"${COMPILER_VARIABLE}":
            raise ToolchainError(f"the chosen compiler does not work: {problem}; unset {COMPILER_VARIABLE} or correct it")
        problems.append(problem)
    found = f" ({'; '.join(problems)})" if problems else ""
    raise ToolchainError(
        f"no working C++ compiler{found}; install g++ or clang, `pip install ziglang`, or set {COMPILER_VARIABLE}"
    )


def build(source: str, defines: Sequence[str] = (), march: str = "native") -> Path:
    """Compile ``source`` to a shared library in the cache and return its path.

    ``defines`` become ``-D``. A library is found again by source, flags, compiler version and (for ``native``) the CPU.
    Raises ToolchainError with the compiler's first errors, EnvironmentFailure when the cache cannot be written.
    """
    return _build(compiler(), source, defines, march)


def binary_facts(binary: Path) -> dict[str, Any]:
    """There is nothing to record of a shared library."""
    return {}


def describe(facts: Mapping[str, Any]) -> str | None:
    """There is nothing to tell."""
    return None


def disassemble(binary: bytes) -> str:
    """The library's machine code, as ``objdump`` shows it. Raises ToolchainError where there is none."""
    program = shutil.which("objdump") or shutil.which("llvm-objdump")
    if program is None:
        raise ToolchainError("no objdump on this machine; install binutils or llvm")
    with tempfile.TemporaryDirectory(prefix="kogc-") as folder:
        path = Path(folder) / BINARY_MEMBER
        path.write_bytes(binary)
        return run_tool([program, "-d", "-C", "--no-show-raw-insn", path.name], Path(folder))[0]


def required_features(march: str = "native") -> tuple[str, ...]:
    """CPU features (names of /proc/cpuinfo: avx2, f16c, avx512f …) that code built for ``march`` may use."""
    return _features(compiler(), march)


def simd_width(march: str = "native") -> int:
    """fp32 elements of the widest vector register code for ``march`` has: the rows of a tile."""
    features = required_features(march)
    return 16 if "avx512f" in features else 8 if "avx2" in features else 4


def toolchain_facts(march: str = "native") -> dict[str, Any]:
    """What the manifest's ``toolchain`` records: how the binary was made, and for which instruction set."""
    chosen = compiler()
    return {
        "compiler": chosen.version,
        "origin": chosen.origin,
        "flags": [*FLAGS, *_march_flags(chosen, march)],
        "machine": machine(),
        "platform": sys.platform,
    }


def _candidates() -> list[tuple[str, tuple[str, ...]]]:
    """(origin, command) in the order of preference, each program once."""
    found: list[tuple[str, tuple[str, ...]]] = []
    chosen = os.environ.get(COMPILER_VARIABLE, "").strip()
    zig = _zig_command()
    if chosen == "zig":
        found.append((f"${COMPILER_VARIABLE}", zig or ("zig", "c++")))
    elif chosen:
        try:
            command = tuple(shlex.split(chosen))
        except ValueError as error:
            raise ToolchainError(f"{COMPILER_VARIABLE} is {chosen!r}, not a command ({error})") from None
        found.append((f"${COMPILER_VARIABLE}", command))
    found += [("system", (path,)) for path in filter(None, map(shutil.which, SYSTEM_COMPILERS))]
    if zig and chosen != "zig":
        found.append(("ziglang wheel", zig))
    by_program = {(os.path.realpath(command[0]), command[1:]): (origin, command) for origin, command in reversed(found)}
    return list(reversed(by_program.values()))


def _zig_command() -> tuple[str, ...] | None:
    """The wheel's program, run directly: ``python -m ziglang`` would start Python for nothing."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).parent / ("zig.exe" if os.name == "nt" else "zig")
    return (str(program), "c++") if program.exists() else None


@lru_cache
def _tried(origin: str, command: tuple[str, ...]) -> Compiler:
    """Ask for the version and build a trial library (once per process; the library is cached like any other)."""
    version = "unknown"
    try:
        version = _version(command)
        candidate = Compiler(command, origin, version, works=True)
        answer = ctypes.CDLL(str(_build(candidate, _TRIAL, (), "native"))).kogc_trial()
    except (ToolchainError, OSError) as error:
        return Compiler(command, origin, version, works=False, problem=str(error))
    if answer != 42:
        return Compiler(command, origin, version, works=False, problem=f"a trial library answered {answer} instead of 42")
    return candidate


def _version(command: tuple[str, ...]) -> str:
    line = _run([*command, "--version"], None).splitlines()[0].strip()
    return f"zig {importlib.metadata.version('ziglang')}, {line}" if command == _zig_command() else line


def _build(chosen: Compiler, source: str, defines: Sequence[str], march: str) -> Path:
    flags = [*FLAGS, *_march_flags(chosen, march), *(f"-D{define}" for define in defines)]
    key = content_key(source, "\0".join(flags), *_identity(chosen, march))
    return built(key, (".so",), lambda folder: {".so": _compile(chosen, source, flags, folder).read_bytes()})


def _compile(chosen: Compiler, source: str, flags: list[str], folder: Path) -> Path:
    """Compile and link inside ``folder``; messages then say ``kernel.cpp:LINE``."""
    (folder / "kernel.cpp").write_text(source)
    made = folder / "kernel.so"
    if not chosen.is_zig:
        _run([*chosen.command, *flags, "-shared", "kernel.cpp", "-o", made.name], folder)
        return made
    _run([*chosen.command, *flags, "-c", "kernel.cpp", "-o", "kernel.o"], folder)
    # `zig cc` instead of `zig c++`: the object needs nothing of libc++. Without -nostdlib the wheel would first build
    # its compiler runtime (half a minute), which only code for old CPUs needs (conversions of half precision).
    link = [chosen.path, "cc", "-shared", "kernel.o", "-o", made.name]
    try:
        _run([*link, "-nostdlib", "-lc", "-lm", "-Wl,-z,defs"], folder)
    except ToolchainError:
        _run([*link, "-pthread"], folder)
    return made


def _march_flags(chosen: Compiler, march: str) -> list[str]:
    if machine() == "aarch64":
        return [f"-mcpu={march}"]
    return [f"-march={march.replace('-', '_') if chosen.is_zig else march}"]


def _identity(chosen: Compiler, march: str) -> tuple[str, ...]:
    """What besides source and flags decides over the library: the compiler, and for ``native`` the CPU."""
    cpu = sorted(host_features() or ()) if march == "native" else ()
    return (chosen.version, str(os.path.realpath(chosen.path)), machine(), " ".join(cpu))


@lru_cache
def _features(chosen: Compiler, march: str) -> tuple[str, ...]:
    flags = _march_flags(chosen, march)
    path = cache_folder("kernels") / f"{content_key('macros', *flags, *_identity(chosen, march))}.macros"

    def ask() -> str:
        return _run([*chosen.command, *flags, "-dM", "-E", "-x", "c++", os.devnull], None)

    return features_of_macros(_cached_text(path, ask))


def _cached_text(path: Path, make: Callable[[], str]) -> str:
    """What ``make`` once made. A damaged file is made again: half a list of macros would mean code for a lesser CPU."""
    try:
        checksum, _, text = path.read_bytes().partition(b"\n")
        if checksum == content_key(text).encode():
            return text.decode()
    except OSError:
        pass
    text = make().encode()
    write_atomically(path, content_key(text).encode() + b"\n" + text)
    return text.decode()


def _run(command: Sequence[str], folder: Path | None) -> str:
    """Standard output of ``command``. Raises ToolchainError with its first errors."""
    # The wheel keeps what it builds for itself; with everything else of ours, where the user said.
    zig_cache = os.environ.get("ZIG_GLOBAL_CACHE_DIR") or str(cache_folder("zig"))
    return run_tool(command, folder, {"ZIG_GLOBAL_CACHE_DIR": zig_cache})[0]
