"""Skips everything here on machines without the GPU, and makes the helpers of tests/endtoend importable."""

import sys
from pathlib import Path

import pytest

from kogc.runtime.device import why_no_device

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "endtoend")]


@pytest.fixture(autouse=True, scope="session")
def _gpu():
    obstacle = why_no_device("h200")
    if obstacle:
        pytest.skip(f"needs an H200: {obstacle}")
