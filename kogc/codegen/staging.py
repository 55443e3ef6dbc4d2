"""Where a worker puts what it receives, on machines whose exchanged words carry their own flags.

Such a worker polls the very values it needs and copies them into memory of its own. Of every operand it keeps the lanes
and rows it needs and what lies between them, at the same place for all workers and iterations of a stage. Memory *near*
the worker is small: the vector of the dots comes first, then the smaller values; what does not fit lies *far*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from kogc.codegen.intake import Intake, late_values, make_intakes, one_lane_each
from kogc.codegen.layout import BEST_WORDS, numbered_stages, pitch, round_up, stage_places, stored_lanes
from kogc.codegen.near_places import Key, Space, Value, place_values
from kogc.ir.passes.elements import Deal, made_by, needed_of
from kogc.ir.passes.spans import Spans
from kogc.ir.program import Operand, Program, Schedule, Stage
from kogc.targets import DotRules, Target

#: Elements that one poll looks at: places of rows start at multiples of it.
VECTOR = 4

#: Spaces start at multiples of this many floats (a cache line).
_ALIGN = 32


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
    results. ``intakes``: how the vectors of dots are taken in; ``packed``: where they are rearranged, in their own
    place where that can be. ``consts``: those of prologues and the step's rows of position tables are kept near, fetched while a
    worker waits. ``near_floats`` and ``far_floats`` per worker."""

    receipts: dict[tuple[int, int], list[list[Receipt]]]
    operands: tuple[dict[str, Space], ...]
    scratch: tuple[dict[str, Space], ...]
    intakes: tuple[Intake | None, ...]
    packed: tuple[Space | None, ...]
    consts: tuple[dict[str, Space], ...]
    near_floats: int
    far_floats: int


def make_staging(program: Program, schedule: Schedule, target: Target) -> Staging:
    """Find out what every worker receives and place it, in the near memory of a worker as long as there is room."""
    columns, near_floats = max(program.step_tokens), target.near_floats
    receipts = dict(_receipts(program, schedule))
    intakes = make_intakes(program, schedule, target.dots)
    stages = list(numbered_stages(program))
    values = []
    for (number, _, stage), (segment, place) in zip(stages, stage_places(program), strict=True):
        received = [receipts[number, i] for i in range(program.segments[segment].count)]
        intake = intakes[number]
        consts = _near_consts(stage, schedule.work[segment][place], intake)
        values.append(_values(stage, received, schedule, columns, intake) | consts)
    spaces, near, far = place_values(program, values, near_floats)
    return Staging(
        receipts,
        tuple({name: space for (kind, name), space in placed.items() if kind == "operand"} for placed in spaces),
        tuple({name: space for (kind, name), space in placed.items() if kind == "scratch"} for placed in spaces),
        intakes,
        tuple(_packed(stage, placed) for (_, _, stage), placed in zip(stages, spaces, strict=True)),
        tuple({name: space for (kind, name), space in placed.items() if kind == "const"} for placed in spaces),
        near,
        far,
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
        made.update({(m.buffer, m.write): m.spans for m in made_by(program, stage, iteration, deal, shares, schedule.workers, schedule.tile_rows)})


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


def _values(
    stage: Stage, received: list[list[list[Receipt]]], schedule: Schedule, columns: int, intake: Intake | None
) -> dict[Key, Value]:
    late = late_values(stage)
    found: dict[Key, Value] = {}
    polled = {intake.operand.name, stage.vector} if intake and intake.operand else set()
    copied = intake is not None and (bool(polled) or stage.vector in late or intake.copied)

    def add(kind: str, name: str, lanes: int, width: int, is_late: bool, vector: bool) -> None:
        width = round_up(width, _ALIGN) if vector else width
        found[kind, name] = Value(lanes, width, round_up(columns * lanes * width, _ALIGN), is_late, vector)

    for number, operand in enumerate(stage.operands):
        if operand.name in polled:
            continue
        extent = _extent([receipt for instance in received for receipt in instance[number]])
        if operand.access == "best":
            extent = (schedule.workers, BEST_WORDS)
        in_place = operand.name == stage.vector and not copied
        lanes, width = extent
        add("operand", operand.name, lanes, max(width, intake.floats) if in_place else width, operand.name in late, in_place)
    for op in stage.prologue:
        if op.name not in polled:
            in_place = op.name == stage.vector and not copied
            width = max(pitch(op.width, schedule.tile_rows), intake.floats if in_place else 0)
            add("scratch", op.name, stored_lanes(op), width, op.name in late, in_place)
    if copied and not intake.held:
        add("packed", stage.vector, 1, intake.floats, False, True)
    return found


def _near_consts(stage: Stage, work, intake: Intake | None) -> dict[Key, Value]:
    """The step's rows of position tables, for the epilogue; and constants of the prologue, where every worker has one lane and
    reads no other lane's."""
    read = {name for op in stage.prologue if intake is None or op is not intake.norm for name in op.inputs}
    every_lane = {name for op in stage.prologue if op.scope == "all" for name in op.inputs}
    rows = {const.name: const.shape[-1] for const in stage.consts if const.by_position}
    near = {("const", name): Value(1, width, round_up(width, _ALIGN), True, False, optional=True) for name, width in rows.items()}
    if not one_lane_each(work):
        return near
    late = late_values(stage)
    widths = {const.name: prod(const.shape) for const in stage.consts if const.name in read and not const.by_position and (const.lanes == 1 or const.name not in every_lane)}
    return near | {("const", name): Value(1, width, round_up(width, _ALIGN), name in late, False, optional=True) for name, width in widths.items()}


def _packed(stage: Stage, spaces: dict[Key, Space]) -> Space | None:
    kinds = ("packed", "scratch", "operand")
    return next((spaces[kind, stage.vector] for kind in kinds if (kind, stage.vector) in spaces), None)


def _extent(receipts: list[Receipt]) -> tuple[int, int]:
    """(lanes, pitch) that hold what any worker needs."""
    filled = [r for r in receipts if r.intervals]
    lanes = max((max(lane for lane, _, _ in r.intervals) - r.lane + 1 for r in filled), default=1)
    rows = max((max(last for _, _, last in r.intervals) - r.row for r in filled), default=1)
    return lanes, round_up(rows, VECTOR)
