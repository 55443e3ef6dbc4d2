"""The order of weights in the h200's stream is that of the matrix instruction's A, as the PTX manual states it."""

import ml_dtypes
import numpy as np
import pytest

from kogc.targets import load_target
from kogc.targets.h200 import ROW_PIECES, STEP_K, stream_order

#: Storage dtypes with the words that hold one lane's part of a step.
DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
ROWS = 8
WIDTHS = [1, 16, 31, 32, 33, 96, 101]


def fragment_element(lane: int, i: int) -> tuple[int, int]:
    """(row, column) of element ``i`` of ``lane``'s part of A in mma.m16n8k16 (PTX ISA, "Matrix Fragments for
    mma.m16n8k16 with floating point type", .f16 and .bf16): a0 … a7, two to a register."""
    group, thread = lane // 4, lane % 4
    row = group if i in (0, 1, 4, 5) else group + 8
    column = thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8
    return row, column


def weight_at(unit: np.ndarray, step: int, row: int, column: int):
    """What A[row, column] of a step is: rows 0 to 7 the tile's with the step's first sixteen weights, 8 to 15 with the others."""
    k = step * STEP_K + row // ROWS * 16 + column
    return unit[row % ROWS, k] if k < unit.shape[1] else unit.dtype.type(0)


def random_units(dtype: str, arity: int, k: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(k).standard_normal((count, arity, ROWS, k)).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arity", [1, 2])
@pytest.mark.parametrize("k", WIDTHS)
def test_every_lane_finds_its_fragment_in_one_piece(k, arity, dtype):
    units = random_units(dtype, arity, k)
    stream = np.ascontiguousarray(stream_order(units)).reshape(len(units), -1, arity, 32, 8)
    assert stream.dtype == units.dtype
    # What a warp takes at once is whole, and nothing is longer than it must be for that.
    steps = stream.shape[1]
    assert steps * arity % ROW_PIECES == 0 and 0 <= steps - -(-k // STEP_K) < ROW_PIECES // arity
    for index in np.ndindex(stream.shape):
        unit, step, tile, lane, i = index
        assert stream[index] == weight_at(units[unit, tile], step, *fragment_element(lane, i)), index


def test_the_target_packs_in_this_order():
    target = load_target("h200")
    units = random_units("fp16", 2, 40)
    assert target.tile_rows == ROWS and np.array_equal(target.layout(units), stream_order(units))


# ── the dot, as the instruction computes it ──


def instruction(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D = A · B + C for every warp's 32 fragments [32, 8] of A, with products and sums of fp32 or better."""
    matrix = np.zeros((16, 16))
    for lane in range(32):
        for i in range(8):
            matrix[fragment_element(lane, i)] = a[lane, i]
    return c + matrix @ b.astype(np.float64)


def split(x: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """fp32 activations as two values of ``dtype``: rounded, and what that leaves of them."""
    high = x.astype(dtype)
    return high, (x - high.astype(np.float32)).astype(dtype)


def dot_of_fragments(stream: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Dots [arity, 8] of one unit [steps, arity, 32, 8]: B holds high parts of both halves of a step, then their low parts."""
    steps, arity = stream.shape[:2]
    padded = np.zeros(steps * STEP_K, np.float32)
    padded[: len(x)] = x
    high, low = split(padded, stream.dtype)
    c = np.zeros((arity, 16, 8))
    for step in range(steps):
        b = np.zeros((16, 8), np.float32)
        for column, (part, half) in enumerate([(high, 0), (high, 1), (low, 0), (low, 1)]):
            first = step * STEP_K + half * 16
            b[:, column] = part[first : first + 16]
        for tile in range(arity):
            c[tile] = instruction(stream[step, tile], b, c[tile])
    return c[:, :ROWS, 0] + c[:, :ROWS, 2] + c[:, ROWS:, 1] + c[:, ROWS:, 3]


@pytest.mark.parametrize("dtype, bits", [("fp16", 21), ("bf16", 16)])
@pytest.mark.parametrize("arity", [1, 2])
@pytest.mark.parametrize("k", WIDTHS)
def test_fragments_times_both_parts_of_the_activation_are_the_product(k, arity, dtype, bits):
    units = random_units(dtype, arity, k, count=1)
    x = np.random.default_rng(k + 1).standard_normal(k).astype(np.float32)
    stream = np.ascontiguousarray(stream_order(units)).reshape(-1, arity, 32, 8)
    weights = units[0].astype(np.float64)
    expected, magnitude = weights @ x, np.abs(weights) @ np.abs(x)
    assert np.all(np.abs(dot_of_fragments(stream, x) - expected) <= 2.0**-bits * magnitude)


@pytest.mark.parametrize("arity", [1, 2])
@pytest.mark.parametrize("k", WIDTHS)
def test_lanes_of_a_row_share_out_its_fp32_product(k, arity):
    """fp32 weights are not for the instruction: four lanes add up their own parts of a row."""
    units = random_units("fp32", arity, k, count=1)
    x = np.random.default_rng(k + 1).standard_normal(k).astype(np.float32)
    stream = np.ascontiguousarray(stream_order(units)).reshape(-1, arity, 32, 8).astype(np.float64)
    padded = np.zeros(len(stream) * STEP_K)
    padded[:k] = x
    dots = np.zeros((arity, ROWS))
    for step, tile, lane, i in np.ndindex(stream.shape):
        row, column = fragment_element(lane, i)
        dots[tile, lane // 4] += stream[step, tile, lane, i] * padded[step * STEP_K + row // ROWS * 16 + column]
    np.testing.assert_allclose(dots, units[0].astype(np.float64) @ x, rtol=1e-12, atol=1e-12)
