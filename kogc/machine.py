"""Which machine this is: results measured on one machine are not claimed on another."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from kogc.cache import content_key


@cache
def machine_id() -> str:
    """A key of this machine's processor and system; equal on every run here, and different on other machines."""
    return content_key(platform.node(), platform.machine(), platform.system(), cpu_model(), str(os.cpu_count()))


@cache
def cpu_model() -> str:
    """The processor as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model", "CPU part")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> tuple[int, int]:
    """Main memory in all and what can be had of it now, in bytes; zeros where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    facts = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return facts["MemTotal"], facts["MemAvailable"]
