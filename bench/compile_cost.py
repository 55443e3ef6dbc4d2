"""What a compile costs in time and memory, measured on a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_KINDS = ("RssAnon", "RssFile", "RssShmem")


@dataclass(frozen=True)
class Cost:
    """``report``: what compile_child.py printed. ``peaks``: the largest of each kind of resident memory, in bytes, sampled
    ten times a second; pages of mapped files (the artifact being written, libraries) are ``RssFile``. ``total`` is the
    kernel's own peak of their sum."""

    report: dict
    peaks: dict[str, int]

    @property
    def total(self) -> int:
        return self.report["peak_rss"]


def compile_cost(model: str, output: Path, *flags: str) -> Cost:
    """Compile ``model`` with random weights in fp16 for two workers; raises RuntimeError when that fails."""
    command = [sys.executable, str(HERE / "compile_child.py"), model, str(output), *flags]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peaks = dict.fromkeys(_KINDS, 0)
    while child.poll() is None:
        for kind, size in _resident(child.pid).items():
            peaks[kind] = max(peaks[kind], size)
        time.sleep(0.1)
    if child.returncode:
        raise RuntimeError(f"compiling {model} ended with exit code {child.returncode}")
    return Cost(json.loads(child.stdout.read().splitlines()[-1]), peaks)


def _resident(pid: int) -> dict[str, int]:
    """Resident memory of a process by kind, in bytes; empty when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    facts = (line.partition(":") for line in lines)
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in facts if name in _KINDS}
