"""One compile in a fresh process, so that its memory is its own. usage: compile_child.py MODEL OUT.kog [--no-weights].

Prints one JSON object: seconds of the whole, by step and of the imports before it, whether the artifact was there already,
bytes of its weights, and the process's peak memory.
"""

from __future__ import annotations

import json
import sys
import time

BEGAN = time.monotonic()


class Steps:
    """Adds up how long each step of a compile takes, from the progress it reports."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._step, self._since = "", time.monotonic()

    def __call__(self, step: str, done: float, total: float) -> None:
        now = time.monotonic()
        if self._step:
            self.seconds[self._step] = self.seconds.get(self._step, 0.0) + now - self._since
        self._step, self._since = step, now


def peak_bytes() -> int:
    """The largest resident size so far, mapped files included."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    from kogc.compiler import compile_model

    imported, steps = time.monotonic(), Steps()
    model, output = sys.argv[1:3]
    done = compile_model(
        model, output=output, dtype="fp16", workers=2, random_weights=True, weights="--no-weights" not in sys.argv, progress=steps
    )
    steps("", 0, 0)
    sections = done.artifact.manifest.sections
    report = {
        "seconds": time.monotonic() - imported,
        "import_s": imported - BEGAN,
        "steps": {name: round(value, 2) for name, value in steps.seconds.items()},
        "cached": done.cached,
        "weight_bytes": sum(section.bytes for section in sections[0].values()) if sections else 0,
        "peak_rss": peak_bytes(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
