"""The CPU target: persistent threads, each streaming its own weights with the machine's vector unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kogc.errors import ToolchainError
from kogc.targets import MachineLayer, Target, read_sections, target_facts
from kogc.targets.cpu.features import host_features
from kogc.targets.cpu.toolchain import required_features


def make_target(facts: Mapping[str, Any], simd: str | None = None, march: str = "native") -> Target:
    """The CPU with vector code ``simd``: a key of ``[simd]`` in target.toml; None: the best the compiler has for ``march``.

    Raises KeyError for a kind there is no code for.
    """
    kind = simd or simd_kind(_features(march))
    if kind not in facts["simd"]:
        raise KeyError(f"the cpu target has no vector code {kind!r}; it has {', '.join(facts['simd'])}")
    machine, ranks = (_machine(facts[code], kind) for code in ("device_code", "rank_code"))
    constants = tuple((name, c["value"], c["meaning"]) for name, c in facts["constants"].items())
    title = f"{facts['title']} ({kind})"
    return Target("cpu", title, facts["simd"][kind]["tile_rows"], machine, constants, stream_order, facts, ranks_machine=ranks)


def _machine(code: Mapping[str, Any], kind: str) -> MachineLayer:
    return MachineLayer(*(read_sections("cpu", tuple(f.format(simd=kind) for f in code[part])) for part in ("before", "layer", "entry")))


def stream_order(units: np.ndarray) -> np.ndarray:
    """[units, arity, tile_rows, k] → [units, k, arity, tile_rows]: the rows of a tile side by side, one k after the other."""
    return units.transpose(0, 3, 1, 2)


def _features(march: str) -> Iterable[str]:
    """What code for ``march`` may use; without a compiler (to look at packed weights, say) what this machine has."""
    try:
        return required_features(march)
    except ToolchainError:
        return host_features() or ()


def simd_kind(features: Iterable[str]) -> str:
    """The best vector code for a CPU with ``features`` (names as in /proc/cpuinfo)."""
    have = set(features)
    return next(kind for kind, needs in target_facts("cpu")["simd"].items() if have.issuperset(needs["features"]))
