"""CPU features by the names of ``/proc/cpuinfo``: what a compiler may use, and what this machine has."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

#: Macro that a compiler defines when it may emit the instructions → the machine's name for them.
MACROS = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__SSE4A__": "sse4a",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__F16C__": "f16c",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__LZCNT__": "abm",
    "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe",
    "__AVXVNNI__": "avx_vnni",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__ARM_NEON": "asimd",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_SVE": "sve",
}


def features_of_macros(text: str) -> tuple[str, ...]:
    """Features behind the ``#define``s that ``-dM -E`` printed, in table order."""
    defined = {line.split(maxsplit=2)[1] for line in text.splitlines() if line.startswith("#define ")}
    return tuple(name for macro, name in MACROS.items() if macro in defined)


@lru_cache
def machine() -> str:
    """The instruction set under one name on every system: ``x86_64``, ``aarch64`` …"""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@lru_cache
def host_features() -> frozenset[str] | None:
    """What this machine's CPU can execute, or ``None`` where the system does not tell."""
    if platform.system() == "Linux":
        return _from_cpuinfo(Path("/proc/cpuinfo").read_text(errors="replace"))
    if platform.system() == "Darwin" and machine() == "x86_64":
        return _from_sysctl()
    return None


def missing_features(needed: Iterable[str]) -> list[str]:
    """Which of ``needed`` this machine lacks; nothing where the system does not tell."""
    present = host_features()
    return [] if present is None else [name for name in needed if name not in present]


def _from_cpuinfo(text: str) -> frozenset[str] | None:
    """The flags of the first core (x86: ``flags``, Arm: ``Features``)."""
    for line in text.splitlines():
        label, _, value = line.partition(":")
        if label.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return None


def _from_sysctl() -> frozenset[str] | None:
    """macOS on Intel prints the same features in capitals and with dots."""
    names = ("machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures")
    try:
        text = subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    flags = set(text.lower().replace(".", "_").split())
    renamed = {"sse3": "pni", "avx1_0": "avx", "lzcnt": "abm"}
    return frozenset(flags | {renamed[name] for name in flags & renamed.keys()}) or None
