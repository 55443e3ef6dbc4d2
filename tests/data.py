"""Where the tests find the small real models with expected tokens (see the README in that folder)."""

import json
import os
from pathlib import Path
from typing import Any

import pytest


def data_dir() -> Path:
    """The data folder: `KOGC_DATA`, else `../shared/data` beside the repository.

    Where it is absent the calling test is skipped, or fails under `CI=true`.
    """
    folder = Path(os.environ.get("KOGC_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if folder.is_dir():
        return folder
    reason = f"no test data at {folder} (set KOGC_DATA)"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def golden(name: str) -> dict[str, Any]:
    """The contents of one JSON file of expected values."""
    return json.loads((data_dir() / name).read_text())
