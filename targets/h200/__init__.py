"""The H200 target: one persistent thread block per multiprocessor, weights streamed through a ring in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from kogc.targets import DotRules, MachineLayer, Target, WorkerMemory, read_sections

#: Warps of a block that compute.
CONSUMER_WARPS = 8

#: Weights that a row of a unit has of each row of a tile: a warp takes them at once.
ROW_K = 128

#: Fragments in a piece of the stream, which a warp takes at once of a row of a tile.
PIECE_FRAGMENTS = 2

#: Rows of a vector up to which a warp has registers for weights beside its part of the vector.
DRAINED_ROWS = 4

#: Floats of near memory that teams' copies of a vector may take: the rest is the ring's.
COPIES_FLOATS = 8192

#: What it costs that another warp polls a row, too, in units of what the dots of a row cost.
POLL_COST = 0.2


def make_target(facts: Mapping[str, Any]) -> Target:
    """The H200."""
    code = facts["device_code"]
    machine = MachineLayer(*(read_sections("h200", tuple(code[part])) for part in ("before", "layer", "entry")))
    constants = tuple((name, c["value"], c["meaning"]) for name, c in facts["constants"].items())
    constants += (("CONSUMER_WARPS", CONSUMER_WARPS, "which compute"), ("ROW_K", ROW_K, "values of the vector that a row of a unit takes"))
    constants += (("DRAINED_ROWS", DRAINED_ROWS, "of a unit, each warp's, up to which it takes weights before their vector is there"),)
    constants += (("SHARED_BYTES", facts["shared_bytes"], "dynamic shared memory of a block"),)
    batch, bulk, drain = (facts["constants"][name]["value"] for name in ("BATCH_UNITS", "BULK_BYTES", "DRAIN"))
    held, drained = partial(holds, held_rows=facts["held_rows"]), partial(drains, fragments=drain)
    dots = DotRules(batch, sharing, packed_floats, held, drained, bulk)
    return Target(
        "h200", facts["title"], facts["tile_rows"], machine, constants, stream_order, facts,
        facts["near_bytes"] // 4, dots,
        WorkerMemory(facts["shared_bytes"], facts["named_bytes"], facts["constants"]["CHUNK_BYTES"]["value"], facts["least_slots"]),
    )  # fmt: skip


def sharing(k: int, units: int) -> int:
    """How many of a worker's warps share a unit with dots of length ``k`` when it has ``units`` of them: the others work on other
    units meanwhile, but every such team takes in the vector for itself."""
    rows = -(-k // ROW_K)

    def cost(warps: int) -> float:
        teams, own_rows = CONSUMER_WARPS // warps, -(-rows // warps)
        return -(-units // teams) * own_rows + own_rows + POLL_COST * teams * rows

    choices = [CONSUMER_WARPS >> i for i in range(CONSUMER_WARPS.bit_length())]
    return min((warps for warps in choices if warps == CONSUMER_WARPS or packed_floats(k, warps)[0] <= COPIES_FLOATS), key=cost)


def packed_floats(k: int, warps: int) -> tuple[int, bool]:
    """Floats that a packed vector of ``k`` takes in shared memory when ``warps`` share a unit, and whether they hold it several
    times, once for every team."""
    teams = CONSUMER_WARPS // warps
    return teams * -(-k // ROW_K) * ROW_K, teams > 1


def holds(k: int, warps: int, dtype: str, held_rows: int) -> bool:
    """Whether a warp can hold its part of a vector of ``k`` in registers, ready for dots with rows of one tile: at most ``held_rows``
    rows of it, four values a lane."""
    return dtype != "fp32" and -(-k // (ROW_K * warps)) <= held_rows


def drains(k: int, warps: int, dtype: str, fragments: int) -> bool:
    """Whether all warps take equal parts of every unit of length ``k``, in whole fragments and not more than a few, so that they can
    hold those of a tile, ``fragments`` at most, before the vector is there (``Drained`` in units.cuh)."""
    rows = -(-k // ROW_K)
    alike = warps == CONSUMER_WARPS and rows % CONSUMER_WARPS == 0 and rows <= DRAINED_ROWS * CONSUMER_WARPS
    return dtype != "fp32" and alike and rows // CONSUMER_WARPS * PIECE_FRAGMENTS <= fragments


def stream_order(units: np.ndarray) -> np.ndarray:
    """[units, arity, 4, k] → [units, pieces, 2, 32 lanes, 8]: what each lane of a warp loads for one matrix instruction, two of
    which are a piece: with one tile a row of ``ROW_K`` weights, with two half of one.

    The instruction (mma.m16n8k16) takes 16 rows: both tiles' four with 16 weights and again with the next 16, or one tile's
    four with four times 16. Lane 4 · row + q holds of rows ``row`` and 8 + ``row`` weights 4q to 4q + 3, the first pairs before
    the second: which weight meets which of the instruction's columns is ours to choose, as long as the vector follows. Of
    every eight rows, one for each warp, the first pieces come before the second ones, so that all warps go through the stream
    side by side. A unit's last row is filled up with zeros.
    """
    count, arity, tile_rows, k = units.shape
    rows = -(-k // ROW_K)
    padded = np.zeros((count, arity, tile_rows, rows * ROW_K), units.dtype)
    padded[..., :k] = units
    # row of the unit, piece of it, fragment, 8 rows of the instruction or 8 more, which tile or part of one, q, pair, one of it
    parts = padded.reshape(count, arity, tile_rows, rows, arity, 2, 2, 2 // arity, 4, 2, 2)
    pieces = parts.transpose(0, 3, 4, 5, 7, 1, 2, 8, 9, 6, 10)
    whole = rows // CONSUMER_WARPS * CONSUMER_WARPS
    groups = pieces[:, :whole].reshape(count, whole // CONSUMER_WARPS, CONSUMER_WARPS, *pieces.shape[2:]).swapaxes(2, 3)
    rest = pieces[:, whole:].swapaxes(1, 2)
    halves = [part.reshape(count, -1, 2, 32, 8) for part in (groups, rest) if part.size]
    return halves[0] if len(halves) == 1 else np.concatenate(halves, axis=1)
