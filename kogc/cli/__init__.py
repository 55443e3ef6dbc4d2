"""The command line: ``kogc compile | run | explain | inspect | verify | tune | export | targets | doctor | demo``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code.

    0: done. 2: bad input or usage. 1: the environment (disk, toolchain, machine) or a failed gate. 130: Ctrl-C.
    Errors and warnings are one line on stderr each; ``KOGC_DEBUG=1`` shows tracebacks instead.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))
    try:
        from kogc.cli.app import app  # inside, so that Ctrl-C while modules load is caught too
        from kogc.cli.report import show_warnings

        with show_warnings():
            code = app(args=None if argv is None else list(argv), standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        from kogc.cli.report import report

        sys.exit(report(error))
    sys.exit(code if isinstance(code, int) else 0)
