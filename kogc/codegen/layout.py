"""Where things lie in the kernel's own memory: exchange buffers, KV caches, scratch and probes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kogc.ir.program import Attention, Buffer, OpSpec, Output, Program, Stage
from kogc.ir.types import NUMPY_DTYPES

#: Data and flags of different workers never share a cache line.
LINE_BYTES = 64
_LINE_FLOATS = LINE_BYTES // 4

#: A cache row of a GPU is a multiple of this: bulk copies move no less.
CACHE_ROW_BYTES = 16

#: What a worker of a GPU says of the wait it gave up.
REPORT_BYTES = 64

#: A worker's best: its logit and the logit's index.
BEST_WORDS = 2


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
    buffer: str
    kind: str
    offset: int
    lanes: int
    width: int


@dataclass(frozen=True)
class Layout:
    """Everything the kernel addresses by constants. Sizes in bytes, ``*_floats`` in fp32 values, memory that of one rank.

    ``scratch[stage number][op name]`` is the offset of a prologue result in a worker's scratch; ``probe_first[stage number,
    output number]`` the entry of iteration 0 (``stage_outputs`` counts); the next iterations follow at once. Behind the
    exchange buffers of machines with far memory lie that of all workers and a report of each (``with_far_memory``).
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
    cache_align: int = 1
    far_begin: int = 0
    reports_begin: int = 0
    ranks: int = 1

    def cache_pitch(self, dtype: str, head_dim: int) -> int:
        """Values from one position of a cache to the next."""
        return cache_row_bytes(dtype, head_dim, self.cache_align) // NUMPY_DTYPES[dtype].itemsize

    def buffer(self, name: str) -> PlacedBuffer:
        return next(placed for placed in self.buffers if placed.buffer.name == name)


def make_layout(program: Program, workers: int, tile_rows: int, tagged: bool = False) -> Layout:
    """Lay out the memory of ``program`` for ``workers`` workers (of all ranks) with tiles of ``tile_rows`` rows.

    ``tagged``: exchanged words carry their own flags, so that there are no others, and what is appended to the caches in a
    step crosses the exchange, too.
    """
    columns = max(program.step_tokens)
    buffers, exchange_bytes = (_place_tagged if tagged else _place_buffers)(program, workers, tile_rows, columns)
    align = CACHE_ROW_BYTES if tagged else 1
    caches, kv_bytes = _place_caches(program, align)
    scratch = tuple(_scratch(stage, columns, tile_rows) for _, _, stage in numbered_stages(program))
    probes, probe_first, probe_floats = _place_probes(program, columns)
    return Layout(
        columns, buffers, exchange_bytes, caches, kv_bytes, tuple(offsets for offsets, _ in scratch),
        max((size for _, size in scratch), default=0) or _LINE_FLOATS, probes, probe_first, probe_floats, align,
        ranks=program.ranks,
    )  # fmt: skip


def with_far_memory(layout: Layout, workers: int, far_floats: int) -> Layout:
    """``layout`` with ``far_floats`` of far memory and one report per worker behind its exchange buffers."""
    reports = layout.exchange_bytes + workers * far_floats * 4
    return replace(layout, far_begin=layout.exchange_bytes, reports_begin=reports, exchange_bytes=reports + workers * REPORT_BYTES)


def numbered_stages(program: Program) -> Iterator[tuple[int, int, Stage]]:
    """(global number, segment number, stage) in source order."""
    number = 0
    for index, segment in enumerate(program.segments):
        for stage in segment.stages:
            yield number, index, stage
            number += 1


def stage_places(program: Program) -> list[tuple[int, int]]:
    """(segment, number within it) of every stage, by global number: how schedules and instances name it."""
    return [(index, place) for index, segment in enumerate(program.segments) for place in range(len(segment.stages))]


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
    return round_up(width, tile_rows)


def round_up(value: int, step: int) -> int:
    """The next multiple of ``step``."""
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
        flags = round_up(data + buffer.slots * columns * lanes * width * 4, LINE_BYTES)
        offset = flags + workers * LINE_BYTES
        placed.append(PlacedBuffer(buffer, data, flags, lanes, width))
    return tuple(placed), offset


def _place_tagged(program: Program, workers: int, tile_rows: int, columns: int) -> tuple[tuple[PlacedBuffer, ...], int]:
    placed, offset = [], 0
    for buffer in program.buffers:
        best = buffer.payload == "best"
        lanes, width = (1, pitch(workers * BEST_WORDS, 4)) if best else (buffer.lanes, pitch(buffer.width, tile_rows))
        placed.append(PlacedBuffer(buffer, offset, 0, lanes, width))
        offset = round_up(offset + buffer.slots * columns * lanes * width * 4, 2 * LINE_BYTES)
    return tuple(placed), offset


def _place_caches(program: Program, align: int) -> tuple[dict[str, int], int]:
    offsets, offset = {}, 0
    for cache in program.caches:
        offsets[cache.key] = offset
        offset = round_up(offset + cache.kv_heads // program.ranks * cache.capacity * cache_row_bytes(program.dtype, cache.head_dim, align), LINE_BYTES)
    return offsets, offset


def cache_row_bytes(dtype: str, head_dim: int, align: int) -> int:
    """Bytes from one position of a cache to the next."""
    return round_up(head_dim * NUMPY_DTYPES[dtype].itemsize, align)


def _scratch(stage: Stage, columns: int, tile_rows: int) -> tuple[dict[str, int], int]:
    offsets, offset = {}, 0
    for op in stage.prologue:
        offsets[op.name] = offset
        offset = round_up(offset + columns * stored_lanes(op) * pitch(op.width, tile_rows), _LINE_FLOATS)
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
                entries.append(ProbeEntry(number, stage.name, iteration, output.value, output.buffer, output.kind, offset, lanes, wide))
                first.setdefault((number, index), entries[-1])
                offset += columns * lanes * wide
    return tuple(entries), first, offset
