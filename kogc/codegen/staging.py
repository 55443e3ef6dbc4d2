"""Where a worker puts what it receives, on machines whose exchanged words carry their own flags.

Such a worker polls the very values it needs and copies them into memory of its own. Of every operand it keeps the lanes
and rows it needs and what lies between them, at the same place for all workers and iterations of a stage. Memory *near*
the worker is small: the vector of the dots comes first, then the smaller values; what does not fit lies *far*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from kogc.codegen.layout import BEST_WORDS, numbered_stages, pitch, round_up, stage_places, stored_lanes
from kogc.ir.passes.elements import Deal, made_by, needed_of
from kogc.ir.passes.spans import Spans
from kogc.ir.program import Operand, Program, Schedule, Stage

#: Elements that one poll looks at: places of rows start at multiples of it.
VECTOR = 4

#: Spaces start at multiples of this many floats (a cache line).
_ALIGN = 32


@dataclass(frozen=True)
class Space:
    """[columns][lanes][pitch] floats from ``offset`` of the near or far memory of every worker."""

    near: bool
    offset: int
    lanes: int
    pitch: int


@dataclass(frozen=True)
class Receipt:
    """What one worker needs of one operand: (lane, first, last) of every interval; the place of ``lane``, ``row`` is the
    begin of its space. Rows are counted within the lane; the pairs of a ``best`` buffer follow each other in lane 0."""

    lane: int
    row: int
    intervals: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Staging:
    """``receipts[stage number, iteration][operand][worker]``, and by stage number the spaces of operands and of prologue
    results. ``packed``: where a stage's vector is rearranged for its dots, in its own place unless it is read after them,
    too. ``consts``: those of prologues are kept near, fetched while a worker waits. ``near_floats`` and ``far_floats`` per worker."""

    receipts: dict[tuple[int, int], list[list[Receipt]]]
    operands: tuple[dict[str, Space], ...]
    scratch: tuple[dict[str, Space], ...]
    packed: tuple[Space | None, ...]
    consts: tuple[dict[str, Space], ...]
    near_floats: int
    far_floats: int


def make_staging(program: Program, schedule: Schedule, near_floats: int) -> Staging:
    """Find out what every worker receives and place it; ``near_floats`` are the near memory of a worker."""
    columns = max(program.step_tokens)
    receipts = dict(_receipts(program, schedule))
    stages = list(numbered_stages(program))
    values = []
    for (number, _, stage), (segment, place) in zip(stages, stage_places(program), strict=True):
        received = [receipts[number, i] for i in range(program.segments[segment].count)]
        values.append(_values(stage, received, schedule, columns) | _near_consts(stage, schedule.work[segment][place]))
    places = [_Places(near_floats) for _ in stages]
    near = far = 0
    for place, sizes in zip(places, values, strict=True):
        place.near, place.far = near, far
        for key, value in sizes.items():
            if value.late:
                place.put(key, value)
        near, far = place.near, place.far
    for place, sizes in zip(places, values, strict=True):
        place.near, place.far = near, far
        for key, value in sorted(sizes.items(), key=lambda item: (not item[1].vector, item[1].floats)):
            if not value.late:
                place.put(key, value)
    return Staging(
        receipts,
        tuple({name: space for (kind, name), space in place.spaces.items() if kind == "operand"} for place in places),
        tuple({name: space for (kind, name), space in place.spaces.items() if kind == "scratch"} for place in places),
        tuple(_packed(stage, place.spaces) for (_, _, stage), place in zip(stages, places, strict=True)),
        tuple({name: space for (kind, name), space in place.spaces.items() if kind == "const" and space.near} for place in places),
        max(place.near for place in places),
        max(place.far for place in places),
    )


# ── what is received ──


def _receipts(program: Program, schedule: Schedule) -> Iterator[tuple[tuple[int, int], list[list[Receipt]]]]:
    made: dict[tuple[str, int], Spans] = {}
    numbers = {place: number for number, place in enumerate(stage_places(program))}
    for segment, iteration, index, stage in program.instances():
        work = schedule.work[segment][index][iteration]
        deal = Deal.from_work(work)
        found = [_of_operand(program, schedule, stage, operand, iteration, deal, made) for operand in stage.operands]
        yield (numbers[segment, index], iteration), found
        shares = [(worker, share) for worker, one in enumerate(work) for share in one.shares]
        made.update({(m.buffer, m.write): m.spans for m in made_by(program, stage, iteration, deal, shares, schedule.tile_rows)})


def _of_operand(program: Program, schedule: Schedule, stage: Stage, operand: Operand, iteration: int, deal: Deal, made) -> list[Receipt]:
    owned = made[operand.buffer, operand.write.at(iteration)]
    needed = needed_of(program, stage, operand, deal, owned, schedule.workers, schedule.tile_rows)
    buffer = program.buffer(operand.buffer)
    known: dict[tuple, Receipt] = {}
    spans: list[list[tuple[int, int]]] = [[] for _ in range(schedule.workers)]
    for worker, low, high in zip(needed.worker.tolist(), needed.low.tolist(), needed.high.tolist(), strict=True):
        spans[worker].append((low, high))
    return [known.setdefault(key, _receipt(key, buffer)) for key in map(tuple, map(sorted, spans))]


def _receipt(spans: tuple[tuple[int, int], ...], buffer) -> Receipt:
    pieces: list[tuple[int, int, int]] = []
    for low, high in _merged(spans):
        if buffer.payload == "best":
            pieces.append((0, low * BEST_WORDS, high * BEST_WORDS))
            continue
        while low < high:
            lane = low // buffer.width
            last = min(high, (lane + 1) * buffer.width)
            pieces.append((lane, low - lane * buffer.width, last - lane * buffer.width))
            low = last
    if not pieces:
        return Receipt(0, 0, ())
    return Receipt(min(p[0] for p in pieces), min(p[1] for p in pieces) // VECTOR * VECTOR, tuple(pieces))


def _merged(spans: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in spans:
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


# ── where it is put ──


@dataclass(frozen=True)
class _Value:
    """[lanes][pitch] floats a column, ``floats`` in all. ``late``: read when other threads of the worker may be receiving for
    the next stage already, so that its place is nobody else's. ``vector``: what the dots read, near whatever it takes."""

    lanes: int
    pitch: int
    floats: int
    late: bool
    vector: bool


def _values(stage: Stage, received: list[list[list[Receipt]]], schedule: Schedule, columns: int) -> dict[tuple[str, str], _Value]:
    late = _late(stage)
    found: dict[tuple[str, str], _Value] = {}

    def add(kind: str, name: str, lanes: int, width: int, is_late: bool, vector: bool) -> None:
        width = round_up(width, _ALIGN) if vector else width
        found[kind, name] = _Value(lanes, width, round_up(columns * lanes * width, _ALIGN), is_late, vector)

    copied = stage.vector in late
    for number, operand in enumerate(stage.operands):
        extent = _extent([receipt for instance in received for receipt in instance[number]])
        if operand.access == "best":
            extent = (schedule.workers, BEST_WORDS)
        add("operand", operand.name, *extent, operand.name in late, operand.name == stage.vector and not copied)
    for op in stage.prologue:
        width = pitch(op.width, schedule.tile_rows)
        add("scratch", op.name, stored_lanes(op), width, op.name in late, op.name == stage.vector and not copied)
    if copied:
        add("packed", stage.vector, 1, stage.vector_width, False, True)
    return found


def _near_consts(stage: Stage, work) -> dict[tuple[str, str], _Value]:
    """Constants of the prologue, where every worker has one lane and reads no other lane's."""
    read = {name for op in stage.prologue for name in op.inputs}
    every_lane = {name for op in stage.prologue if op.scope == "all" for name in op.inputs}
    if any(len({run.lane for run in one.runs}) > 1 for instance in work for one in instance):
        return {}
    widths = {const.name: prod(const.shape) for const in stage.consts if const.name in read and const.kind == "weight" and (const.lanes == 1 or const.name not in every_lane)}
    return {("const", name): _Value(1, width, round_up(width, _ALIGN), False, False) for name, width in widths.items()}


def _late(stage: Stage) -> set[str]:
    """Values that are read after the worker's threads last met: by epilogues, by shares, and all that a combine reads."""
    names = {name for part in stage.parts for op in part.epilogue for name in op.inputs}
    names |= {output.value for output in stage.prologue_outputs}
    return names | {operand.name for operand in stage.operands} if stage.kind == "combine" else names


def _packed(stage: Stage, spaces: dict[tuple[str, str], Space]) -> Space | None:
    kinds = ("packed", "scratch", "operand")
    return next((spaces[kind, stage.vector] for kind in kinds if (kind, stage.vector) in spaces), None)


def _extent(receipts: list[Receipt]) -> tuple[int, int]:
    """(lanes, pitch) that hold what any worker needs."""
    filled = [r for r in receipts if r.intervals]
    lanes = max((max(lane for lane, _, _ in r.intervals) - r.lane + 1 for r in filled), default=1)
    rows = max((max(last for _, _, last in r.intervals) - r.row for r in filled), default=1)
    return lanes, round_up(rows, VECTOR)


class _Places:
    """The places of one stage's values, given one after the other; ``near`` and ``far`` are taken up to there."""

    def __init__(self, near_floats: int) -> None:
        self.near_floats, self.near, self.far = near_floats, 0, 0
        self.spaces: dict[tuple[str, str], Space] = {}

    def put(self, key: tuple[str, str], value: _Value) -> None:
        fits = self.near + value.floats <= self.near_floats or value.vector
        self.spaces[key] = Space(fits, self.near if fits else self.far, value.lanes, value.pitch)
        self.near += value.floats * fits
        self.far += value.floats * (not fits)
