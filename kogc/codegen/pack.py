"""Pack weights: one contiguous stream per worker, in the very order in which it will read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import numpy as np

from kogc.codegen.pack_index import (
    PAGE,
    Layout,
    PackError,
    PackIndex,
    Placed,
    all_consts,
    item_size,
    pack_index,
    picked_rows,
    placements,
)
from kogc.ir.program import Const, Matrix, Part, Program, Schedule
from kogc.ir.types import NUMPY_DTYPES
from kogc.ir.weights import WeightSource

#: ``progress(bytes done, bytes in all)``.
Progress = Callable[[int, int], None]

#: Weights are gathered, rounded and laid out in pieces of about this many bytes, which stay in the processor's cache.
PIECE_BYTES = 1 << 18

#: Integer type and exponent mask that tell a number that is not finite.
_EXPONENTS = {"fp32": (np.uint32, 0x7F800000), "fp16": (np.uint16, 0x7C00), "bf16": (np.uint16, 0x7F80)}


def pack_stream(
    program: Program,
    schedule: Schedule,
    weights: WeightSource,
    layout: Layout,
    out: np.ndarray,
    tables: Mapping[str, np.ndarray] | None = None,
    align: int = 1,
    progress: Progress | None = None,
) -> PackIndex:
    """Fill ``out`` (uint8, ``pack_index(...).total_bytes`` long, e.g. a memory map) and return where everything lies.

    Weights are rounded once, to ``program.dtype``; every tensor is asked for once per stage instance that streams it.
    ``tables`` holds the position tables of the graph. Raises PackError naming the tensor that is missing, has another
    shape, holds NaN or infinity, or does not fit the storage dtype.
    """
    index = pack_index(program, schedule, layout, align)
    writer = _Writer(program, schedule, weights, layout, out, index, progress)
    writer.streams()
    writer.embeds()
    writer.consts(tables or {})
    return index


def pack_share(
    program: Program, schedule: Schedule, weights: WeightSource, layout: Layout, out: np.ndarray, index: PackIndex, progress: Progress | None = None
) -> None:
    """As ``pack_stream``, the streams of ``schedule`` alone, as ``index`` places them: the pack of a rank that is not the first."""
    _Writer(program, schedule, weights, layout, out, index, progress).streams()


class _Writer:
    def __init__(self, program, schedule, weights, layout, out, index, progress) -> None:
        if program.dtype not in _EXPONENTS:
            raise PackError(f"weights are packed as {', '.join(_EXPONENTS)}, not {program.dtype}")
        if out.dtype != np.uint8 or out.ndim != 1 or len(out) < index.total_bytes:
            raise ValueError(f"the pack needs {index.total_bytes} bytes of uint8, not {out.dtype}{list(out.shape)}")
        self.program, self.schedule, self.weights, self.layout = program, schedule, weights, layout
        self.out, self.index, self.progress = out, index, progress
        self.dtype = NUMPY_DTYPES[program.dtype]
        self.done = 0
        self.picked: dict[int, np.ndarray] = {}

    def streams(self) -> None:
        for segment, iteration, number, placed in placements(self.program, self.schedule, self.index):
            stage = self.program.segments[segment].stages[number]
            tensors: dict[str, np.ndarray] = {}  # q, k and v, or gate and up, may be slices of one tensor
            for part_index, part in enumerate(stage.parts):
                sources = _one_dtype([self._matrix(matrix, iteration, tensors) for matrix in part.matrices])
                keys = [matrix.key(iteration) for matrix in part.matrices]
                unit_bytes = self.index.unit_bytes[segment][number][part_index]
                for one in placed:
                    if one.run.part == part_index:
                        self._run(part, sources, keys, one, unit_bytes)
                self._tell()
        for offset, length in self.index.streams:
            self.out[offset + length : -(-(offset + length) // PAGE) * PAGE] = 0

    def embeds(self) -> None:
        """Embedding tables [vocab, width] in the storage dtype, unpacked."""
        self.out[self.index.embed_offset : self.index.const_offset] = 0
        widths = {s.embed_table: s.embed_width for segment in self.program.segments for s in segment.stages}
        for key, offset in self.index.embeds.items():
            width = widths[key]
            table = self._fetch(key, (self.program.vocab, width))
            start = self.index.embed_offset + offset * item_size(self.program)
            rows = max(1, PIECE_BYTES // (width * item_size(self.program)))
            for row in range(0, len(table), rows):
                piece = self._rounded(table[row : row + rows], [(key, table[row : row + rows])])
                self._put(start + row * width * self.dtype.itemsize, piece.reshape(-1).view(np.uint8))
            self._tell()

    def consts(self, tables: Mapping[str, np.ndarray]) -> None:
        """Norm scales, biases and position tables in fp32, one copy per key."""
        region = self.out[self.index.const_offset : self.index.total_bytes].view(np.float32)
        region[:] = 0
        for const in all_consts(self.program):
            for key in const.keys:
                values = self._const(const, key, tables).reshape(-1)
                region[self.index.consts[key] : self.index.consts[key] + len(values)] = values
        self.done = self.index.total_bytes
        self._tell()

    # ── one run ──

    def _run(self, part: Part, sources: list[np.ndarray], keys: list[str], one: Placed, unit_bytes: int) -> None:
        picked = self.picked.setdefault(id(part), picked_rows(part, self.schedule.tile_rows))
        lane, first, last = one.run.lane, one.run.first, one.run.first + one.run.count
        step = max(1, PIECE_BYTES // unit_bytes)
        for unit in range(first, last, step):
            rows = picked[unit : min(unit + step, last)]
            block = np.empty((*rows.shape, part.k), sources[0].dtype)
            for tile in range(part.arity):
                source = sources[tile % len(sources)]
                np.take(source[lane if len(source) > 1 else 0], rows[:, tile], 0, block[:, tile], "clip")
            if (rows < 0).any():
                block[rows < 0] = 0
            rounded = self._rounded(block, [(keys[tile % len(keys)], block[:, tile]) for tile in range(part.arity)])
            laid = np.ascontiguousarray(self.layout(rounded))
            self._units(one.offset + (unit - first) * unit_bytes, laid.reshape(len(rows), -1).view(np.uint8), unit_bytes)

    def _units(self, offset: int, laid: np.ndarray, unit_bytes: int) -> None:
        """Units [units, bytes], each followed by zeros up to ``unit_bytes``."""
        place = self.out[offset : offset + len(laid) * unit_bytes].reshape(len(laid), unit_bytes)
        place[:, : laid.shape[1]] = laid
        place[:, laid.shape[1] :] = 0
        self.done += place.size

    def _put(self, offset: int, values: np.ndarray) -> None:
        self.out[offset : offset + len(values)] = values
        self.done += len(values)

    # ── reading and rounding ──

    def _matrix(self, matrix: Matrix, iteration: int, tensors: dict[str, np.ndarray]) -> np.ndarray:
        """The rows of a matrix as [lanes, rows, k], in the dtype of the source."""
        key, last = matrix.key(iteration), matrix.rows_from + matrix.rows
        if key not in tensors:
            tensors[key] = self._get(key)
        value = tensors[key]
        stored = value[None] if matrix.lanes == 1 else value
        wanted = (matrix.lanes, max(last, stored.shape[1] if stored.ndim == 3 else 0), matrix.k)
        if stored.shape != wanted:
            shape = f"[{last}, {matrix.k}]" if matrix.lanes == 1 else f"[{matrix.lanes}, {last}, {matrix.k}]"
            raise PackError(f"weight {key} has shape {list(value.shape)}, expected {shape}")
        return stored[:, matrix.rows_from : last]

    def _const(self, const: Const, key: str, tables: Mapping[str, np.ndarray]) -> np.ndarray:
        if const.kind == "weight":
            lanes = (const.lanes,) if const.lanes > 1 else ()
            values = self._fetch(key, (*lanes, *const.shape)).astype(np.float32)
        elif key in tables:
            values = np.asarray(tables[key][: const.shape[0]], np.float32)
            if values.shape != const.shape:
                raise PackError(f"position table {key} has shape {list(tables[key].shape)}, expected {list(const.shape)}")
        else:
            raise PackError(f"position table {key} is missing")
        if not np.isfinite(values).all():
            raise PackError(f"{key} holds NaN or infinity")
        return values

    def _fetch(self, key: str, shape: tuple[int, ...]) -> np.ndarray:
        value = self._get(key)
        if value.shape != shape:
            raise PackError(f"weight {key} has shape {list(value.shape)}, expected {list(shape)}")
        return value

    def _get(self, key: str) -> np.ndarray:
        try:
            return self.weights.get(key)
        except KeyError:
            raise PackError(f"weight {key} is missing") from None

    def _rounded(self, values: np.ndarray, named: list[tuple[str, np.ndarray]]) -> np.ndarray:
        """``values`` in the storage dtype, rounded once. 16-bit sources go through fp32, which holds them exactly.
        ``named`` tells for an error which tensors the values are from."""
        if values.dtype != self.dtype:
            wide = values if values.dtype == np.float64 else values.astype(np.float32, copy=False)
            with np.errstate(over="ignore", invalid="ignore"):
                rounded = wide.astype(self.dtype)
        else:
            rounded = np.ascontiguousarray(values)
        kind, exponent = _EXPONENTS[self.program.dtype]
        if ((rounded.view(kind) & exponent) == exponent).any():
            self._refuse(named)
        return rounded

    def _refuse(self, named: list[tuple[str, np.ndarray]]) -> NoReturn:
        for key, values in named:
            if not np.isfinite(values.astype(np.float32)).all():
                raise PackError(f"weight {key} holds NaN or infinity")
        key, largest = max(((key, np.abs(values.astype(np.float32)).max()) for key, values in named), key=lambda pair: pair[1])
        raise PackError(f"weight {key} holds {largest:g}, which does not fit {self.program.dtype}: choose bf16 or fp32")

    def _tell(self) -> None:
        if self.progress:
            self.progress(self.done, self.index.total_bytes)


def _one_dtype(sources: list[np.ndarray]) -> list[np.ndarray]:
    """Matrices that share units, in one dtype; fp32 holds every other exactly."""
    if len({source.dtype for source in sources}) == 1:
        return sources
    return [source.astype(np.float32) for source in sources]
