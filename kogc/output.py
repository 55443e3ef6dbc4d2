"""Where an artifact may be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kogc.artifact import begins_like_artifact
from kogc.errors import BadInput, OutputFailure


def check_output(path: Path, source: Any = None) -> None:
    """Find out now, and not after minutes of work, that the result has no place to go or would replace something else.

    ``source``: what the artifact is made of, if that is a file which must stay. Raises OutputFailure, BadInput.
    """
    folder = path.parent
    if path.is_dir():
        raise OutputFailure(f"cannot write {path}: it is a folder; give a file name with -o")
    if path.exists():
        if not path.is_file():
            raise OutputFailure(f"cannot write {path}: it is a device or a pipe; give a file name with -o")
        if isinstance(source, str | Path) and Path(source).exists() and path.samefile(source):
            raise BadInput(f"cannot write {path}: it is the model itself; choose another name with -o")
        if path.suffix != ".kog" and path.stat().st_size and not begins_like_artifact(path):
            raise BadInput(f"cannot write {path}: it is there already and is no kogc artifact; choose another name with -o, or delete it")
    if not folder.is_dir():
        raise OutputFailure(f"cannot write {path}: there is no folder {folder}; make it or choose another with -o")
    if not os.access(folder, os.W_OK):
        raise OutputFailure(f"cannot write {path}: the folder {folder} is read-only; choose another with -o")
