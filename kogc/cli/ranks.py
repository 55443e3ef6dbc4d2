"""How commands name an artifact's workers and ranks."""

from __future__ import annotations

from typing import Any


def workers_line(manifest: Any) -> str:
    """``2 workers``, or ``2 ranks of 4 workers``."""
    each = f"{manifest.workers} worker{'s' if manifest.workers != 1 else ''}"
    return f"{manifest.ranks} ranks of {each}" if manifest.ranks > 1 else each
