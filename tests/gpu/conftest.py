"""Skips everything here on machines without the GPU, makes the helpers of tests/endtoend importable, and shares the processor's
cores out among the processes of pytest-xdist, each of which has PyTorch compute references."""

import os
import sys
from pathlib import Path

import pytest
import torch

from kogc.machine import usable_cores
from kogc.runtime.device import why_no_device

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "endtoend")]


@pytest.fixture(autouse=True, scope="session")
def _gpu():
    obstacle = why_no_device("h200")
    if obstacle:
        pytest.skip(f"needs an H200: {obstacle}")
    torch.set_num_threads(max(1, usable_cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
