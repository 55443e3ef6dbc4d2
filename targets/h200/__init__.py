"""The H200 target: one persistent thread block per multiprocessor, weights streamed through a ring in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kogc.targets import MachineLayer, Target, read_sections

#: Weights of one row that a matrix instruction takes at once: two slices of sixteen.
STEP_K = 32

#: Tiles of neighbouring steps that one warp takes at once.
ROW_PIECES = 4


def make_target(facts: Mapping[str, Any]) -> Target:
    """The H200."""
    code = facts["device_code"]
    machine = MachineLayer(*(read_sections("h200", tuple(code[part])) for part in ("before", "layer", "entry")))
    constants = tuple((name, c["value"], c["meaning"]) for name, c in facts["constants"].items())
    constants += (("SHARED_BYTES", facts["shared_bytes"], "dynamic shared memory of a block"),)
    near_floats = facts["near_bytes"] // 4
    return Target("h200", facts["title"], facts["tile_rows"], machine, constants, stream_order, facts, near_floats)


def stream_order(units: np.ndarray) -> np.ndarray:
    """[units, arity, 8, k] → [units, steps, arity, 32 lanes, 8]: what each lane of a warp loads for one matrix instruction.

    The instruction (mma.m16n8k16) takes 16 rows; rows 0 to 7 are the tile's with the first 16 weights of a step, rows 8 to
    15 the same with the next 16. Lane 4 · row + q holds of both halves weights 2q, 2q + 1 and 8 + 2q, 9 + 2q. A warp takes
    ``ROW_PIECES`` tiles of steps in a row; the unit's last row is filled up with zeros.
    """
    count, arity, rows, k = units.shape
    steps = -(-k // STEP_K)
    steps += -steps % (ROW_PIECES // arity)
    padded = np.zeros((count, arity, rows, steps * STEP_K), units.dtype)
    padded[..., :k] = units
    parts = padded.reshape(count, arity, rows, steps, 2, 2, 4, 2)  # …, half, eight, q, pair
    return parts.transpose(0, 3, 1, 2, 6, 5, 4, 7)
