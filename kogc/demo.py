"""The checkpoint that ships with kogc, compiled."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from kogc.cache import cache_folder
from kogc.compiler import Compiled, Progress, compile_model

CHECKPOINT = "pylane.pt"


def checkpoint_path() -> Path:
    """The shipped checkpoint file."""
    return Path(str(resources.files("kogc.models") / "checkpoints" / CHECKPOINT))


def compile_demo(progress: Progress | None = None) -> Compiled:
    """Compile the shipped checkpoint for the cpu into the cache folder, or find it there."""
    output = cache_folder("demo") / Path(CHECKPOINT).with_suffix(".kog").name
    return compile_model(checkpoint_path(), "cpu", output=output, progress=progress)
