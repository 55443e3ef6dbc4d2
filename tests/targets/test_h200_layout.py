"""The order of weights in the h200's stream is that of the matrix instruction's A, as the PTX manual states it: warps that take
their pieces from the stream and the vector as vector.cuh packs it compute plain dots."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from kogc.targets import load_target
from kogc.targets.h200 import CONSUMER_WARPS, COPIES_FLOATS, POLL_COST, ROW_K, packed_floats, sharing, stream_order

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
TILE = 4
#: Units of fewer rows than there are warps, of whole groups of eight, and of both; a last row that is full, and not.
WIDTHS = [1, 31, 127, 128, 129, 500, 1000, 1024, 1025, 1600, 2048, 2100]
#: How many warps may share a unit.
SHARES = [8, 4, 2, 1]


def every_shape(test):
    return pytest.mark.parametrize("arity", [1, 2])(pytest.mark.parametrize("k", WIDTHS)(test))


def random_units(dtype: str, arity: int, k: int, count: int = 1) -> np.ndarray:
    return np.random.default_rng(k).standard_normal((count, arity, TILE, k)).astype(DTYPES[dtype])


def random_vector(k: int) -> np.ndarray:
    return np.random.default_rng(k + 1).standard_normal(k).astype(np.float32)


# ── the stream ──


@pytest.mark.parametrize("dtype", DTYPES)
@every_shape
def test_every_weight_is_there_once_and_the_rest_is_zero(k, arity, dtype):
    units = random_units(dtype, arity, k, count=3)
    units[units == 0] = 1
    stream = stream_order(units)
    assert stream.dtype == units.dtype and stream.shape == (3, -(-k // ROW_K) * arity, 2, 32, 8)
    for unit, ordered in zip(units.astype(np.float32), stream.astype(np.float32), strict=True):
        assert np.array_equal(np.sort(ordered[ordered != 0]), np.sort(unit.ravel()))


def test_the_target_packs_in_this_order():
    target = load_target("h200")
    units = random_units("fp16", 2, 40)
    assert target.tile_rows == TILE and np.array_equal(target.layout(units), stream_order(units))
    assert (target.dots.sharing, target.dots.packed_floats) == (sharing, packed_floats)


# ── the instruction: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", .f16 and .bf16 ──


LANE = np.arange(32)[:, None]
GROUP, THREAD = LANE // 4, LANE % 4
A, B, C = np.arange(8), np.arange(4), np.arange(4)  # a lane's elements
A_ROW, A_COLUMN = GROUP + np.where(np.isin(A, [0, 1, 4, 5]), 0, 8), THREAD * 2 + A % 2 + np.where(A < 4, 0, 8)
B_ROW, B_COLUMN = THREAD * 2 + B % 2 + np.where(B < 2, 0, 8), GROUP + 0 * B
C_ROW, C_COLUMN = GROUP + np.where(C < 2, 0, 8), THREAD * 2 + C % 2


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A · B of one warp's fragments, a [32, 8] and b [32, 4], as C [32, 4], with products and sums of fp64."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    left[A_ROW, A_COLUMN], right[B_ROW, B_COLUMN] = a, b
    return (left @ right)[C_ROW, C_COLUMN]


# ── what a warp does: vector.cuh, mma.cuh, units.cuh ──


def pack(x: np.ndarray, dtype) -> np.ndarray:
    """[rows, 256]: of every 64 values the high parts and then the low parts, which together are the fp32 values."""
    padded = np.zeros(-(-len(x) // ROW_K) * ROW_K, np.float32)
    padded[: len(x)] = x
    high = padded.astype(dtype)
    low = (padded - high.astype(np.float32)).astype(dtype)
    return np.stack([high.reshape(-1, 64), low.reshape(-1, 64)], 1).reshape(-1, 2 * ROW_K)


def read(packed_row: np.ndarray, arity: int, step: int) -> np.ndarray:
    """The B [32, 4] of one of the row's steps: a column for each sixteen values' high parts, and one for their low parts. With
    two tiles, steps are half as long and half the columns are zero."""
    if arity == 1:
        return packed_row.reshape(2, 32, 4)[step]
    both_parts = packed_row.reshape(2, 2, 2, 8, 4)[step // 2, :, step % 2]
    return np.concatenate([both_parts.reshape(16, 4), np.zeros((16, 4), packed_row.dtype)])


def row_sums(c: np.ndarray, arity: int) -> np.ndarray:
    """[arity, TILE] of C [32, 4]: over the columns that hold the same weights' values, high parts and low parts."""
    c = c.reshape(8, 4, 4)  # row, thread, element
    if arity == 2:
        mine = c[:, :, 0] + c[:, :, 3]
        return (mine[:, 0] + mine[:, 1]).reshape(2, TILE)
    odd = np.arange(4) % 2 == 1
    low, high = np.where(odd, c[:TILE, :, 2], c[:TILE, :, 0]), np.where(odd, c[TILE:, :, 3], c[TILE:, :, 1])
    return (low + high).sum(1)[None]


def pieces_of(warp: int, warps: int, arity: int, k: int) -> Iterator[tuple[int, int, int]]:
    """(piece of the unit, row, first step) that ``warp`` of the ``warps`` that share a unit takes, in its order: of whole groups of
    eight rows every ``warps``-th piece, so that all warps go through the stream side by side, and then of the rest."""
    groups, rest = divmod(-(-k // ROW_K), CONSUMER_WARPS)
    teams = CONSUMER_WARPS // warps
    for n in range(groups * arity * teams):
        row = n // (arity * teams) * CONSUMER_WARPS + n % teams * warps + warp
        yield n * warps + warp, row, n // teams % arity * 2
    for piece in range(arity):
        for row in range(warp, rest, warps):
            yield groups * CONSUMER_WARPS * arity + piece * rest + row, groups * CONSUMER_WARPS + row, piece * 2


def dots(unit: np.ndarray, x: np.ndarray, warps: int) -> np.ndarray:
    """[arity, TILE] of a unit's stream [pieces, 2, 32, 8], the sums of all its warps."""
    packed, arity = pack(x, unit.dtype), len(unit) // -(-len(x) // ROW_K)
    total = np.zeros((32, 4))
    for warp in range(warps):
        for at, row, step in pieces_of(warp, warps, arity, len(x)):
            for fragment in range(2):
                total += multiply(unit[at, fragment], read(packed[row], arity, step + fragment))
    return row_sums(total, arity)


@pytest.mark.parametrize("dtype, bits", [("fp16", 21), ("bf16", 16)])
@every_shape
def test_fragments_times_both_parts_of_the_vector_are_the_product(k, arity, dtype, bits):
    units, x = random_units(dtype, arity, k), random_vector(k)
    (unit,) = stream_order(units)
    weights = units[0].astype(np.float64)
    expected, magnitude = weights @ x, np.abs(weights) @ np.abs(x)
    for warps in SHARES:
        assert np.all(np.abs(dots(unit, x, warps) - expected) <= 2.0**-bits * magnitude), warps


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_lanes_that_hold_a_row_exchange_what_the_other_half_needs(dtype):
    """A row that stays in registers is four values a lane; its steps are what would be read of the packed row."""
    x = random_vector(ROW_K)
    high = x.astype(DTYPES[dtype])
    low = (x - high.astype(np.float32)).astype(DTYPES[dtype]).reshape(32, 4)
    high, upper = high.reshape(32, 4), LANE >= 16
    other = np.where(upper, high, low)[LANE[:, 0] ^ 16]
    for step, held in enumerate([np.where(upper, other, high), np.where(upper, low, other)]):
        assert np.array_equal(held, read(pack(x, DTYPES[dtype])[0], 1, step))


@every_shape
def test_lanes_of_a_row_share_out_its_fp32_product(k, arity):
    """fp32 weights are not for the instruction: four lanes, or with one tile eight, add up their own parts of a row."""
    units, x = random_units("fp32", arity, k), random_vector(k)
    (unit,) = stream_order(units)
    rows, step_k = -(-k // ROW_K), 64 // arity
    padded = np.zeros(rows * ROW_K)
    padded[:k] = x
    lane, total = LANE[:, 0], np.zeros(32)
    for at, row, step in pieces_of(0, 1, arity, k):
        for fragment in range(2):
            first = row * ROW_K + (step + fragment) * step_k + lane % 4 * 4 + (lane // 16 * 16 if arity == 1 else 0)
            for i in range(8):  # pairs of both halves by turns
                total += unit[at, fragment, :, i] * padded[first + i // 2 % 2 * (step_k // 2) + i // 4 * 2 + i % 2]
    sums = total.reshape(2, TILE, 4).sum(2)
    np.testing.assert_allclose(sums if arity == 2 else sums.sum(0, keepdims=True), units[0].astype(np.float64) @ x, rtol=1e-12, atol=1e-12)


# ── how warps share units, and where they keep the vector ──


def busiest(k: int, units: int, warps: int) -> float:
    """Rows whose dots the busiest warp computes or whose values it packs, and what polling costs all of them."""
    rows, teams = -(-k // ROW_K), CONSUMER_WARPS // warps
    mine = [[len(range(warp, rows, warps)) * (len(range(team, units, teams)) + 1) for warp in range(warps)] for team in range(teams)]
    return max(max(team) for team in mine) + POLL_COST * teams * rows


@pytest.mark.parametrize("k", [1, 128, 129, 384, 1000, 1024, 1152, 2048, 3200, 14336])
def test_warps_share_units_so_that_the_busiest_has_least_to_do(k):
    for units in [1, 2, 3, 8, 17, 32, 33, 250]:
        fitting = [warps for warps in SHARES if warps == CONSUMER_WARPS or packed_floats(k, warps)[0] <= COPIES_FLOATS]
        costs = {warps: busiest(k, units, warps) for warps in fitting}
        assert costs[sharing(k, units)] == pytest.approx(min(costs.values())), (units, costs)


def test_all_warps_share_what_there_is_one_of_and_each_has_short_dots_of_its_own():
    assert [sharing(k, 1) for k in (1024, 4096)] == [8, 8]
    assert [sharing(128, units) for units in (8, 32)] == [1, 1]


@pytest.mark.parametrize("warps", SHARES)
def test_every_team_has_room_for_whole_rows(warps):
    teams = CONSUMER_WARPS // warps
    assert [packed_floats(k, warps) for k in (1, 128, 129)] == [(teams * rows * ROW_K, teams > 1) for rows in (1, 1, 2)]
    # High and low part of a value take no more room than the value.
    assert packed_floats(1000, warps)[0] * 4 == teams * pack(np.zeros(1000), np.float16).nbytes


def test_warps_hold_a_few_rows_of_storage_types_that_are_multiplied_by_instructions():
    holds, most = load_target("h200").dots.holds, 4 * load_target("h200").facts["held_rows"] * ROW_K
    assert [holds(k, 4, dtype) for k in (most, most + 1) for dtype in ("fp16", "bf16", "fp32")] == [True, True, False, False, False, False]
