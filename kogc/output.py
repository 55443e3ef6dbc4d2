"""Where a result may be written, and how it gets its place: as a whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kogc.artifact import begins_like_artifact
from kogc.errors import BadInput, OutputFailure


def check_output(path: Path, source: Any = None, suffix: str = ".kog", option: str = "-o") -> None:
    """Find out now, and not after minutes of work, that the result has no place to go or would replace something else.

    ``source``: what the result is made of, if that is a file which must stay. ``suffix``: files named so may be replaced.
    ``option``: the one that names ``path``. Raises OutputFailure, BadInput.
    """
    folder = path.parent
    if path.is_dir():
        raise OutputFailure(f"cannot write {path}: it is a folder; give a file name with {option}")
    if path.exists():
        if not path.is_file():
            raise OutputFailure(f"cannot write {path}: it is a device or a pipe; give a file name with {option}")
        if isinstance(source, str | Path) and Path(source).exists() and path.samefile(source):
            raise BadInput(f"cannot write {path}: it is the model itself; choose another name with {option}")
        if path.suffix != suffix and path.stat().st_size and not (suffix == ".kog" and begins_like_artifact(path)):
            kind = "kogc artifact" if suffix == ".kog" else f"{suffix} file"
            raise BadInput(f"cannot write {path}: it is there already and is no {kind}; choose another name with {option}, or delete it")
    if not folder.is_dir():
        raise OutputFailure(f"cannot write {path}: there is no folder {folder}; make it or choose another with {option}")
    if not os.access(folder, os.W_OK):
        raise OutputFailure(f"cannot write {path}: the folder {folder} is read-only; choose another with {option}")


@contextmanager
def replacing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Temporary names beside ``paths``. Those written to are renamed when the block ends well; otherwise, Ctrl-C included,
    nothing of them stays and what was at ``paths`` does."""
    parts = tuple(path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part") for path in paths)
    try:
        yield parts
        for part, path in zip(parts, paths, strict=True):
            if part.exists():
                os.replace(part, path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
