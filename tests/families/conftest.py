"""Makes the helpers of this folder and those for whole-pipeline tests importable; keeps PyTorch's part of these small models on one thread."""

import sys
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "endtoend"):
    sys.path.append(str(folder))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
