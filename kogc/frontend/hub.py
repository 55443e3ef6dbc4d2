"""Models of the Hugging Face hub by their ids, ``ORGANISATION/NAME``."""

from __future__ import annotations

import re
from pathlib import Path

from kogc.frontend.errors import FrontendError, first_line

#: What a model folder is read from; no code unless it is trusted, and no other formats of the weights.
_WEIGHTS = "*.safetensors"
_FILES = ("*.json", _WEIGHTS, "*.jinja")
_CODE = "*.py"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILE_SUFFIXES = (".pt", ".pt2", ".pth", ".bin", ".gguf", ".kog", ".onnx", ".safetensors")


def is_hub_id(source: str) -> bool:
    """Whether ``source`` names a model of the hub: nothing here has that name, and it does not look like a file."""
    path = Path(source)
    return bool(_ID.fullmatch(source)) and not path.exists() and not path.parent.exists() and path.suffix.lower() not in _FILE_SUFFIXES


def hub_folder(name: str, *, weights: bool = True, code: bool = False) -> Path:
    """The folder of the local cache that holds model ``name``, filled from the hub where it must be: without ``weights`` only with what
    tells its shape, with ``code`` also with the Python files that come along. Without network it is read as it is.

    Raises FrontendError when there is no such model, it is not open to this user, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download  # slow to import and seldom needed

    try:
        wanted = [pattern for pattern in _FILES if weights or pattern != _WEIGHTS] + [_CODE] * code
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the library's errors have no common base below it
        raise FrontendError(f"{name} is nothing here, and cannot be had from the Hugging Face hub: {first_line(error)}") from error
