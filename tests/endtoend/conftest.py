"""Makes the helpers of this folder importable and keeps PyTorch's part of these small models on one thread."""

import sys
from pathlib import Path

from torch_threads import one_thread

sys.path.append(str(Path(__file__).parent))

__all__ = ["one_thread"]  # pytest finds the fixture here
