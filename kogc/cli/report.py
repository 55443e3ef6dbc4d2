"""From an exception to one line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kogc.errors import KogcError

#: What Typer raises when the command line itself is wrong (Typer brings a copy of Click's classes and exports only this one).
_UsageError = typer.BadParameter.__base__

#: Shows tracebacks instead of lines.
DEBUG_VARIABLE = "KOGC_DEBUG"
BAD_INPUT, ENVIRONMENT, INTERRUPTED = 2, 1, 130


def report(error: BaseException) -> int:
    """Print what went wrong to stderr and return the exit code for it."""
    if _broken_pipe(error):
        return 0
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    elif type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
        print(str(error), file=sys.stderr)
    else:
        _print_line("31", message(error))
    return exit_code(error)


@contextmanager
def show_warnings() -> Iterator[None]:
    """Show kogc's own warnings as one line each, and nobody else's (PyTorch warns about its own internals)."""

    def show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
        if category.__module__.startswith("kogc."):
            _print_line("33", f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _print_line(colour: str, text: str) -> None:
    line = " ".join(text.split())
    on, off = (f"\x1b[{colour}m", "\x1b[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"{on}kogc:{off} {line}", file=sys.stderr)


def message(error: BaseException) -> str:
    """What the line says."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, _UsageError):
        command = error.ctx.command_path if error.ctx else "kogc"
        return f"{error.format_message()} (see `{command} --help`)"
    if _ours(error):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory; a smaller --max-context or a half-precision --dtype needs less"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    hint = f"set {DEBUG_VARIABLE}=1 to see the traceback"
    return f"internal error, please report it: {type(error).__name__}: {error} ({hint})"


def exit_code(error: BaseException) -> int:
    """0, 1, 2 or 130, as ``kogc.cli.main`` documents them."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, KogcError):
        return error.exit_code
    if isinstance(error, _UsageError):
        return BAD_INPUT
    if _ours(error) or isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return BAD_INPUT
    return ENVIRONMENT


def _ours(error: BaseException) -> bool:
    """Raised on purpose: a KogcError, or a ValueError class of the layers below, which know nothing of KogcError."""
    foreign = not type(error).__module__.startswith("kogc.")
    return isinstance(error, KogcError) or (isinstance(error, ValueError) and not foreign)


def _broken_pipe(error: BaseException) -> bool:
    """The reader of our output has left (``kogc inspect … | head``): nothing to report, and nothing more to flush."""
    if not (isinstance(error, OSError) and error.errno == errno.EPIPE):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
