"""From a plan to a binary that may be used. Where the plan's own kernel spills registers, the target's ``alternatives`` are tried in
their order: numbers with which it takes fewer of them, for some of its speed. Who does what stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kogc.compile_passes import Planned, emit
from kogc.errors import PlanRejected
from kogc.targets import Target, with_values
from kogc.targets.toolchains import load_toolchain
from kogc.verify import Progress


@dataclass(frozen=True)
class Built:
    """``planned`` with the kernel that was taken, its ``binary``, and the ``facts`` of it for the manifest."""

    planned: Planned
    binary: Path
    facts: Mapping[str, Any]


def build_plan(planned: Planned, target: Target, tell: Progress) -> Built:
    """The first kernel that fits. Its ``facts`` name the ``alternative`` where it is not the plan's own.

    Raises ToolchainError; PlanRejected, with what was wrong with the plan's own kernel, when none fits.
    """
    toolchain = load_toolchain(target.name)
    problems: list[PlanRejected] = []
    for values in ({}, *target.facts.get("alternatives", ())):
        tell("building the kernel", 0, 0)
        chosen = _with(planned, target, values) if values else planned
        binary = toolchain.build(chosen.rendered.source)
        try:
            facts = toolchain.binary_facts(binary)
        except PlanRejected as problem:
            problems.append(problem)
            continue
        return Built(chosen, binary, {**facts, "alternative": dict(values)} if values else facts)
    others = f"; and none of its {len(problems) - 1} alternatives does" if len(problems) > 1 else ""
    raise PlanRejected(f"{problems[0]}{others}")


def _with(planned: Planned, target: Target, values: Mapping[str, int]) -> Planned:
    """The same plan, emitted for the target with other numbers."""
    return replace(planned, rendered=emit(planned.program, planned.schedule, with_values(target, values)))
