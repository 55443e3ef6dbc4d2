"""Brings the excerpts in h200.md up to date with the kernel kogc emits: run it after a change to templates or device code.

An excerpt is a fenced block under ``<!-- kernel: FIRST … LAST -->``: the lines of the kernel from the first that contains
FIRST to the next that begins with LAST. Needs no compiler and no GPU.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).with_name("h200.md")
MODEL = Path(__file__).parents[1] / "models" / "checkpoints" / "pylane.pt"

_EXCERPT = re.compile(r"(<!-- kernel: (?P<first>.+?) … (?P<last>.+?) -->\n```cpp\n).*?(?=```\n)", re.DOTALL)


def page() -> str:
    """The page with the excerpts as they must be. Raises ValueError for one that the kernel does not have any more."""
    lines = kernel().splitlines()
    return _EXCERPT.sub(lambda found: found[1] + excerpt(lines, found["first"], found["last"]), PAGE.read_text(encoding="utf-8"))


def kernel() -> str:
    """The source that ``kogc compile models/checkpoints/pylane.pt --target h200`` emits."""
    from kogc.compile_passes import plan
    from kogc.dump import Dump
    from kogc.frontend.load import load_model
    from kogc.targets import load_target

    model, target = load_model(MODEL), load_target("h200")
    return plan(model, model.dtype, target.facts["workers"], target, Dump(None), lambda step, done, total: None).rendered.source


def excerpt(lines: list[str], first: str, last: str) -> str:
    """The lines from the one that contains ``first`` to the one that begins with ``last``."""
    begin = next((i for i, line in enumerate(lines) if first in line), None)
    end = next((i for i, line in enumerate(lines) if begin is not None and i >= begin and line.startswith(last)), None)
    if end is None:
        raise ValueError(f"{PAGE.name} shows the lines from {first!r} to {last!r}, which the kernel does not have: choose others")
    return "\n".join(lines[begin : end + 1]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
