"""What goes wrong with a model that somebody hands in."""

from __future__ import annotations

import os
import traceback

import torch

_TORCH = os.path.dirname(torch.__file__)
_OWN = os.path.dirname(__file__)


class FrontendError(ValueError):
    """A model that cannot be read or traced. One line: what is wrong, where, and what to do about it."""


class UnsafeModelWarning(UserWarning):
    """Reading this model runs code from its file, as the caller allowed."""


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's text and what it announces with a colon, or the error's type when it has no text."""
    if isinstance(error, KeyError):  # its text is the key alone
        return f"there is no {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def raised_at(error: BaseException) -> str:
    """`` (at file:line: code)`` of the innermost frame of the model's own code that ``error`` came through, or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OWN, "<"))]
    inside = [frame for frame in own if any(outer.filename.startswith(_OWN) for outer in frames[: frames.index(frame)])]
    return f" (at {inside[-1].filename}:{inside[-1].lineno}: {inside[-1].line})" if inside else ""
