"""Makes the helpers in `tests/` importable and keeps these small models on one thread."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
