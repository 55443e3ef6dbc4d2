"""Where everything lies in the packed weights: known from program, schedule and layout alone, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kogc.codegen.layout import round_up
from kogc.errors import BadInput
from kogc.ir.program import Const, Part, Program, Run, Schedule, unit_rows
from kogc.ir.types import NUMPY_DTYPES

#: A target's order of the weights in its tiles: [units, arity, tile_rows, k] → [units, …]. It only rearranges (and may
#: append zeros), treats every unit alike, and works for any dtype, because reading back asks it where each element went.
Layout = Callable[[np.ndarray], np.ndarray]

PAGE = 4096
#: Constants start at multiples of this many elements (64 bytes).
CONST_ALIGN = 16


class PackError(BadInput):
    """A weight that cannot be packed: missing, of another shape, not finite or too large for the storage dtype."""


@dataclass(frozen=True)
class PackIndex:
    """Offsets into one packed rank: first the workers' streams, then embedding tables, then fp32 constants.

    ``streams``: (byte offset, byte length) per worker, starting at pages. ``embed_offset`` and ``const_offset`` are the
    byte offsets of the two regions; ``embeds`` (storage dtype) and ``consts`` (fp32) give the place of each key within its
    region in elements. ``unit_bytes[segment][stage][part]`` is the distance between units. ``padding_bytes`` counts the
    zeros inside the streams: padding rows and alignment.
    """

    total_bytes: int
    streams: tuple[tuple[int, int], ...]
    embed_offset: int
    embeds: Mapping[str, int]
    const_offset: int
    consts: Mapping[str, int]
    unit_bytes: tuple[tuple[tuple[int, ...], ...], ...]
    padding_bytes: int


@dataclass(frozen=True)
class Placed:
    """A run of weights and its byte offset in the packed rank."""

    worker: int
    run: Run
    offset: int


def pack_index(program: Program, schedule: Schedule, layout: Layout, align: int = 1) -> PackIndex:
    """Place every unit, table and constant. ``align``: bytes to which every unit's start is aligned (divides 4096)."""
    size = lambda part: _unit_bytes(program, part, schedule.tile_rows, layout, align)
    unit_bytes = tuple(tuple(tuple(map(size, stage.parts)) for stage in segment.stages) for segment in program.segments)
    lengths = _stream_lengths(program, schedule, unit_bytes)
    starts = np.r_[0, np.cumsum([round_up(length, PAGE) for length in lengths])].tolist()
    embeds, embed_elements = _embeds(program)
    consts, const_elements = _consts(program)
    const_offset = round_up(starts[-1] + embed_elements * item_size(program), PAGE)
    return PackIndex(
        total_bytes=const_offset + round_up(const_elements * 4, PAGE),
        streams=tuple(zip(starts[:-1], lengths, strict=True)),
        embed_offset=starts[-1],
        embeds=embeds,
        const_offset=const_offset,
        consts=consts,
        unit_bytes=unit_bytes,
        padding_bytes=sum(lengths) - weight_bytes(program),
    )


def weight_bytes(program: Program) -> int:
    """Bytes of all matrices a token streams, without padding."""
    return item_size(program) * sum(
        stage.lanes * matrix.rows * matrix.k
        for _, _, _, stage in program.instances()
        for part in stage.parts
        for matrix in part.matrices
    )


def placements(program: Program, schedule: Schedule, index: PackIndex) -> Iterator[tuple[int, int, int, list[Placed]]]:
    """(segment, iteration, stage number, runs with weights) of one step in consumption order."""
    cursor = [offset for offset, _ in index.streams]
    for segment, iteration, number, _ in program.instances():
        sizes = index.unit_bytes[segment][number]
        placed = []
        for worker, work in enumerate(schedule.work[segment][number][iteration]):
            for run in work.runs if any(sizes) else ():
                placed.append(Placed(worker, run, cursor[worker]))
                cursor[worker] += run.count * sizes[run.part]
        yield segment, iteration, number, placed


def picked_rows(part: Part, tile_rows: int) -> np.ndarray:
    """Logical rows [units, arity, tile_rows] of every unit of a lane; −1 is padding."""
    units = part.units(tile_rows)
    return unit_rows(part, units * tile_rows, 0).reshape(part.arity, units, tile_rows).transpose(1, 0, 2)


def item_size(program: Program) -> int:
    return NUMPY_DTYPES[program.dtype].itemsize


def all_consts(program: Program) -> list[Const]:
    return [const for segment in program.segments for stage in segment.stages for const in stage.consts]


def _unit_bytes(program: Program, part: Part, tile_rows: int, layout: Layout, align: int) -> int:
    if not part.matrices:
        return 0
    sample = layout(np.zeros((1, part.arity, tile_rows, part.k), NUMPY_DTYPES[program.dtype]))
    return round_up(sample.nbytes, align)


def _stream_lengths(program: Program, schedule: Schedule, unit_bytes) -> list[int]:
    lengths = [0] * schedule.workers
    for segment, iteration, number, _ in program.instances():
        sizes = unit_bytes[segment][number]
        for worker, work in enumerate(schedule.work[segment][number][iteration]):
            lengths[worker] += sum(run.count * sizes[run.part] for run in work.runs if any(sizes))
    return lengths


def _embeds(program: Program) -> tuple[dict[str, int], int]:
    offsets: dict[str, int] = {}
    elements = 0
    for stage in (stage for segment in program.segments for stage in segment.stages):
        if stage.embed_table and stage.embed_table not in offsets:
            offsets[stage.embed_table] = elements
            elements += round_up(program.vocab * stage.embed_width, PAGE)
    return offsets, elements


def _consts(program: Program) -> tuple[dict[str, int], int]:
    offsets: dict[str, int] = {}
    described: dict[str, tuple] = {}
    elements = 0
    for const in all_consts(program):
        what = (const.kind, const.lanes, const.shape)
        for key in const.keys:
            if described.setdefault(key, what) != what:
                raise PackError(f"constant {key} is used as {described[key]} and as {what}: kind, lanes and shape must agree")
            if key not in offsets:
                offsets[key] = elements
                elements += round_up(const.lanes * int(np.prod(const.shape)), CONST_ALIGN)
    return offsets, elements
