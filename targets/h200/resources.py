"""What a kernel takes of a multiprocessor, as ptxas reports it; and what a kernel of ours must not take."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kogc.errors import PlanRejected


@dataclass(frozen=True)
class ResourceReport:
    """Figures of a binary, the largest over its functions.

    ``registers`` and ``barriers``: of a thread and of a block. ``spill_stores``, ``spill_loads``, ``stack``: bytes of local
    memory per thread, that is of trips through the caches in what should be registers. ``static_shared``,
    ``dynamic_shared``: bytes of shared memory declared in the code, and asked for at the launch. ``losses``: what ptxas
    could not do for the kernel, in its words.
    """

    registers: int
    barriers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int
    losses: tuple[str, ...] = ()
    dynamic_shared: int = 0

    @property
    def line(self) -> str:
        """The figures in one line."""
        local = self.spill_stores or self.spill_loads or self.stack
        spills = f"{self.spill_stores} + {self.spill_loads} bytes of spills (stores + loads), {self.stack} bytes of stack" if local else "no spills"
        return f"{self.registers} registers, {spills}, {self.static_shared + self.dynamic_shared} bytes of shared memory"


def read_report(log: str) -> ResourceReport:
    """The figures in what ``ptxas -v`` printed, whichever compiler ran it. Raises ValueError when there are none."""
    if not re.search(r"Used \d+ registers", log):
        raise ValueError("the compiler printed no resource figures")
    return ResourceReport(
        registers=_largest(r"Used (\d+) registers", log),
        barriers=_largest(r"used (\d+) barriers", log),
        spill_stores=_largest(r"(\d+) bytes spill stores", log),
        spill_loads=_largest(r"(\d+) bytes spill loads", log),
        stack=max(_largest(rf"(\d+) bytes {words}", log) for words in ("stack frame", "cumulative stack size", "lmem")),
        static_shared=_largest(r"(\d+) bytes smem", log),
        losses=tuple(dict.fromkeys(re.findall(r"Potential Performance Loss: (.*?)\.?\s*$", log, re.MULTILINE))),
    )


def check_resources(report: ResourceReport) -> None:
    """Raises PlanRejected naming the figures when the kernel spills, uses local memory, or ptxas gave up on something."""
    if report.spill_stores or report.spill_loads or report.stack:
        raise PlanRejected(f"the kernel does not fit into registers: {report.line}")
    if report.losses:
        raise PlanRejected(f"ptxas gave up on part of the kernel: {report.losses[0]} ({report.line})")


def _largest(pattern: str, log: str) -> int:
    return max(map(int, re.findall(pattern, log)), default=0)
