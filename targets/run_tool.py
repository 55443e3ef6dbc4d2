"""Runs a compiler or a tool beside it, and says in one line what went wrong."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kogc.errors import ToolchainError

#: The longest a compile may take, in seconds; the ziglang wheel builds its own runtime library on its first day.
LIMIT_S = 600

#: As GCC, Clang, NVRTC and ptxas (``line 20; error   :``) mark an error.
_ERROR = re.compile(r"\b(?:fatal |catastrophic )?error\s*:")


def run_tool(command: Sequence[str], folder: Path | None = None, more_environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Standard output and standard error of ``command``. Raises ToolchainError with its first errors."""
    environment = {**os.environ, "LC_ALL": "C", **(more_environment or {})}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=LIMIT_S)
    except FileNotFoundError:
        raise ToolchainError(f"{command[0]} does not exist") from None
    except PermissionError:
        raise ToolchainError(f"{command[0]} may not be executed") from None
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ToolchainError(f"{Path(command[0]).name} did not finish within {LIMIT_S} s") from None
    if done.returncode:
        raise ToolchainError(f"{Path(command[0]).name} failed: {first_errors(done.stderr) or f'exit {done.returncode}'}")
    return done.stdout, done.stderr


def first_errors(text: str, limit: int = 3) -> str:
    """The first errors in a compiler's output, on one line; its first lines when none is marked as an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)] or lines
    more = f" (and {len(errors) - limit} more)" if len(errors) > limit else ""
    return " | ".join(errors[:limit]) + more
