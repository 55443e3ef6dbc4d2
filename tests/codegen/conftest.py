"""Makes the helpers of this folder and the hand-built programs importable."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ir")]
