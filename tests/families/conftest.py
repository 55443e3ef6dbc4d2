"""Makes the helpers of this folder and those for whole-pipeline tests importable; keeps PyTorch's part of these small models on one thread."""

import sys
from pathlib import Path

from torch_threads import one_thread

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "endtoend"):
    sys.path.append(str(folder))

__all__ = ["one_thread"]  # pytest finds the fixture here
