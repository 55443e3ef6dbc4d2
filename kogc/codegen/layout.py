"""Where things lie in the kernel's own memory: exchange buffers, KV caches, scratch and probes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kogc.ir.program import Attention, Buffer, OpSpec, Output, Program, Stage
from kogc.ir.types import NUMPY_DTYPES

#: Data and flags of different workers never share a cache line.
LINE_BYTES = 64
_LINE_FLOATS = LINE_BYTES // 4


@dataclass(frozen=True)
class PlacedBuffer:
    """A buffer in the exchange: byte offsets of its data and of its flags (one cache line per worker), and the shape
    [slots][columns][lanes][pitch] of its data in floats. A ``best`` buffer has the workers for lanes."""

    buffer: Buffer
    data: int
    flags: int
    lanes: int
    pitch: int


@dataclass(frozen=True)
class ProbeEntry:
    """Where a probe build leaves one published value of one stage instance: fp32 [columns][lanes][width] from ``offset``.

    ``stage`` is the global stage number, ``stage_name`` its name, ``kind`` that of the output (buffer or cache; appended
    keys and values are stored before they are rounded). Values are those of the last executed step.
    """

    stage: int
    stage_name: str
    iteration: int
    value: str
    kind: str
    offset: int
    lanes: int
    width: int


@dataclass(frozen=True)
class Layout:
    """Everything the kernel addresses by constants. Sizes in bytes, ``*_floats`` in fp32 values.

    ``scratch[stage number][op name]`` is the offset of a prologue result in a worker's scratch; ``probe_first[stage number,
    output number]`` the entry of iteration 0 (``stage_outputs`` counts); the next iterations follow at once.
    """

    columns: int
    buffers: tuple[PlacedBuffer, ...]
    exchange_bytes: int
    caches: dict[str, int]
    kv_bytes: int
    scratch: tuple[dict[str, int], ...]
    scratch_floats: int
    probes: tuple[ProbeEntry, ...]
    probe_first: dict[tuple[int, int], ProbeEntry]
    probe_floats: int

    def buffer(self, name: str) -> PlacedBuffer:
        return next(placed for placed in self.buffers if placed.buffer.name == name)


def make_layout(program: Program, workers: int, tile_rows: int) -> Layout:
    """Lay out the memory of ``program`` for ``workers`` workers with tiles of ``tile_rows`` rows."""
    columns = max(program.step_tokens)
    buffers, exchange_bytes = _place_buffers(program, workers, tile_rows, columns)
    caches, kv_bytes = _place_caches(program)
    scratch = tuple(_scratch(stage, columns, tile_rows) for _, _, stage in numbered_stages(program))
    probes, probe_first, probe_floats = _place_probes(program, columns)
    return Layout(
        columns, buffers, exchange_bytes, caches, kv_bytes, tuple(offsets for offsets, _ in scratch),
        max((size for _, size in scratch), default=0) or _LINE_FLOATS, probes, probe_first, probe_floats,
    )  # fmt: skip


def numbered_stages(program: Program) -> Iterator[tuple[int, int, Stage]]:
    """(global number, segment number, stage) in source order."""
    number = 0
    for index, segment in enumerate(program.segments):
        for stage in segment.stages:
            yield number, index, stage
            number += 1


def stage_outputs(stage: Stage) -> list[tuple[Output, int]]:
    """Everything a stage hands on as (output, features per lane), in the order prologue, parts, attention."""
    widths = {op.name: op.width for op in stage.prologue}
    found = [(output, widths[output.value]) for output in stage.prologue_outputs]
    for part in stage.parts:
        found += [(output, stage.part_rows(part)) for output in part.outputs]
    if stage.attention:
        found.append((stage.attention.output, partials_width(stage.attention)))
    return found


def partials_width(attention: Attention) -> int:
    """Floats of one lane's partial results: [heads][splits][head_dim + 2]."""
    return attention.heads * attention.splits * (attention.head_dim + 2)


def computed_once(op: OpSpec) -> bool:
    """Whether a prologue op is computed once for the stage, and not again for every lane a worker visits."""
    return op.scope == "all" or op.lanes == 1


def stored_lanes(op: OpSpec) -> int:
    """Lanes of a prologue result that a worker holds at a time."""
    return op.lanes if op.scope == "all" else 1


def pitch(width: int, tile_rows: int) -> int:
    """Floats from one vector of ``width`` to the next: whole tiles."""
    return -(-width // tile_rows) * tile_rows


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _place_buffers(program: Program, workers: int, tile_rows: int, columns: int) -> tuple[tuple[PlacedBuffer, ...], int]:
    placed, offset = [], 0
    for buffer in program.buffers:
        lanes, width = buffer.lanes, pitch(buffer.width, tile_rows)
        if buffer.payload == "best":
            lanes, width = workers, _LINE_FLOATS
        elif buffer.payload == "cache":
            width = 0
        data = offset
        flags = _up(data + buffer.slots * columns * lanes * width * 4, LINE_BYTES)
        offset = flags + workers * LINE_BYTES
        placed.append(PlacedBuffer(buffer, data, flags, lanes, width))
    return tuple(placed), offset


def _place_caches(program: Program) -> tuple[dict[str, int], int]:
    offsets, offset = {}, 0
    size = NUMPY_DTYPES[program.dtype].itemsize
    for cache in program.caches:
        offsets[cache.key] = offset
        offset = _up(offset + cache.kv_heads * cache.capacity * cache.head_dim * size, LINE_BYTES)
    return offsets, offset


def _scratch(stage: Stage, columns: int, tile_rows: int) -> tuple[dict[str, int], int]:
    offsets, offset = {}, 0
    for op in stage.prologue:
        offsets[op.name] = offset
        offset = _up(offset + columns * stored_lanes(op) * pitch(op.width, tile_rows), _LINE_FLOATS)
    return offsets, offset


def _place_probes(program: Program, columns: int) -> tuple[tuple[ProbeEntry, ...], dict[tuple[int, int], ProbeEntry], int]:
    entries, first, offset = [], {}, 0
    for number, segment, stage in numbered_stages(program):
        for index, (output, width) in enumerate(stage_outputs(stage)):
            if output.kind == "logits":
                continue
            lanes = stage.lanes if output.kind == "cache" else program.buffer(output.buffer).lanes
            wide = width if output.kind == "cache" else program.buffer(output.buffer).width
            for iteration in range(program.segments[segment].count):
                entries.append(ProbeEntry(number, stage.name, iteration, output.value, output.kind, offset, lanes, wide))
                first.setdefault((number, index), entries[-1])
                offset += columns * lanes * wide
    return tuple(entries), first, offset
