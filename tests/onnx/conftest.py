"""Makes the helpers for whole-pipeline tests and for model families importable."""

import sys
from pathlib import Path

for folder in ("endtoend", "families"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
sys.path.append(str(Path(__file__).parent))
