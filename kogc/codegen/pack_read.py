"""Read packed weights back by key: the artifact's own, rounded weights, without the model they came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kogc.codegen.pack_index import Layout, PackIndex, all_consts, item_size, picked_rows, placements
from kogc.ir.program import Matrix, Program, Schedule
from kogc.ir.types import NUMPY_DTYPES


#: Units read back at a time.
PIECE_UNITS = 64


class PackedWeights:
    """A WeightSource over a packed rank (uint8, e.g. a memory map): matrices and embedding tables in the storage dtype,
    constants in fp32, position tables included."""

    def __init__(self, packed: np.ndarray, index: PackIndex, program: Program, schedule: Schedule, layout: Layout) -> None:
        self.packed, self.index, self.program, self.schedule, self.layout = packed, index, program, schedule, layout
        self._consts = {key: const for const in all_consts(program) for key in const.keys}
        self._widths = {stage.embed_table: stage.embed_width for _, _, _, stage in program.instances() if stage.embed_table}
        self._matrices: dict[str, list[Place]] = {}
        for key, place in _matrix_places(program):
            self._matrices.setdefault(key, []).append(place)

    def keys(self) -> Iterable[str]:
        return [*self._widths, *(key for key in self._matrices if key not in self._widths), *self._consts]

    def is_dealt(self, key: str) -> bool:
        """Whether the rows of ``key`` lie in the workers' streams."""
        return key not in self._widths and key not in self._consts

    def get(self, key: str) -> np.ndarray:
        if key in self._widths:
            return self._embed(key)
        if key in self._consts:
            return self._const(key)
        return self._matrix(key)

    def _embed(self, key: str) -> np.ndarray:
        shape = (self.program.vocab, self._widths[key])
        start = self.index.embed_offset + self.index.embeds[key] * item_size(self.program)
        return self._view(start, int(np.prod(shape)), NUMPY_DTYPES[self.program.dtype]).reshape(shape)

    def _const(self, key: str) -> np.ndarray:
        const = self._consts[key]
        shape = (const.lanes, *const.shape) if const.lanes > 1 else const.shape
        start = self.index.const_offset + self.index.consts[key] * 4
        return self._view(start, int(np.prod(shape)), np.dtype(np.float32)).reshape(shape)

    def _view(self, start: int, elements: int, dtype: np.dtype) -> np.ndarray:
        return self.packed[start : start + elements * dtype.itemsize].view(dtype)

    def _matrix(self, key: str) -> np.ndarray:
        """The whole stored tensor, put together from every matrix that is a slice of it. Raises KeyError."""
        where = (self.packed, self.index, self.program, self.schedule, self.layout)
        pieces = [(place[-1], unpack_matrix(*where, *place)) for place in self._matrices[key]]
        rows = max(matrix.rows_from + matrix.rows for matrix, _ in pieces)
        whole = np.zeros((pieces[0][0].lanes, rows, pieces[0][0].k), NUMPY_DTYPES[self.program.dtype])
        for matrix, values in pieces:
            whole[:, matrix.rows_from : matrix.rows_from + matrix.rows] = values
        return whole if len(whole) > 1 else whole[0]


#: Segment, iteration, stage number, part number, matrix.
Place = tuple[int, int, int, int, Matrix]


def unpack_matrix(
    packed: np.ndarray, index: PackIndex, program: Program, schedule: Schedule, layout: Layout,
    segment: int, iteration: int, number: int, part_number: int, matrix: Matrix,
) -> np.ndarray:  # fmt: skip
    """The rounded values [lanes, rows, k] of one matrix, taken from the streams of all workers."""
    part = program.segments[segment].stages[number].parts[part_number]
    unit_bytes = index.unit_bytes[segment][number][part_number]
    order = _element_order(layout, (part.arity, schedule.tile_rows, part.k))
    rows = picked_rows(part, schedule.tile_rows)
    tiles = [i for i in range(part.arity) if part.matrices[i % len(part.matrices)] is matrix]
    values = np.zeros((matrix.lanes, matrix.rows, matrix.k), NUMPY_DTYPES[program.dtype])
    here = next(placed for s, i, n, placed in placements(program, schedule, index) if (s, i, n) == (segment, iteration, number))
    for one in (one for one in here if one.run.part == part_number):
        lane = values[one.run.lane if matrix.lanes > 1 else 0]
        raw = packed[one.offset : one.offset + one.run.count * unit_bytes].reshape(one.run.count, unit_bytes)
        for first in range(0, one.run.count, PIECE_UNITS):
            piece = raw[first : first + PIECE_UNITS]
            wanted = rows[one.run.first + first :][: len(piece)][:, tiles]
            _put_rows(lane, piece, order[tiles], wanted)
    return values


def _put_rows(lane: np.ndarray, piece: np.ndarray, order: np.ndarray, wanted: np.ndarray) -> None:
    """Store units given as bytes [units, bytes]: ``order`` and ``wanted`` place their elements and rows; −1 is padding."""
    item = lane.dtype.itemsize
    elements = piece[:, : piece.shape[1] // item * item].copy().view(lane.dtype)
    real = wanted >= 0
    lane[wanted[real]] = elements[:, order][real]


def _element_order(layout: Layout, shape: tuple[int, int, int]) -> np.ndarray:
    """Where the layout puts each element of a unit: indices [arity, tile_rows, k] into the laid-out unit."""
    count = int(np.prod(shape))
    laid = layout(np.arange(1, count + 1, dtype=np.int32).reshape(1, *shape)).reshape(-1)
    order = np.empty(count, np.int64)
    order[laid[laid > 0] - 1] = np.flatnonzero(laid > 0)
    return order.reshape(shape)


def _matrix_places(program: Program) -> Iterator[tuple[str, Place]]:
    for segment, iteration, number, stage in program.instances():
        for part_number, part in enumerate(stage.parts):
            for matrix in part.matrices:
                yield matrix.key(iteration), (segment, iteration, number, part_number, matrix)
