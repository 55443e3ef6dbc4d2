"""Where a worker keeps the values of each stage: memory is used again as soon as all its threads have passed what lay there.

A worker's threads meet in every stage that receives anything. What a stage reads before they meet for the last time may be
overwritten by the next stage; *late* values, which are read after that, only by the one after it: some threads may still
be reading while others receive for the next stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kogc.ir.program import Program

#: What a value is, and its name: ("operand", "x").
Key = tuple[str, str]


@dataclass(frozen=True)
class Value:
    """[lanes][pitch] floats a column, ``floats`` in all. ``late``: read after the worker's threads last met; ``vector``: what the
    dots read, near whatever it takes; ``optional``: without a place where near memory has none."""

    lanes: int
    pitch: int
    floats: int
    late: bool
    vector: bool
    optional: bool = False


@dataclass(frozen=True)
class Space:
    """[columns][lanes][pitch] floats from ``offset`` of the near or far memory of every worker."""

    near: bool
    offset: int
    lanes: int
    pitch: int


class _Taken(NamedTuple):
    near: bool
    begin: int
    end: int


def place_values(program: Program, values: Sequence[Mapping[Key, Value]], near_floats: int) -> tuple[list[dict[Key, Space]], int, int]:
    """The spaces of the ``values`` of each stage (by number), and the floats of near and far memory that they take.

    ``near_floats``: what near memory holds at most; vectors are near even beyond it.
    """
    after = next_stages(program)
    before = [{p for p, following in enumerate(after) if number in following} for number in range(len(values))]
    spaces: list[dict[Key, Space]] = [{} for _ in values]
    taken: list[list[_Taken]] = [[] for _ in values]  # by the late values of each stage

    def put(number: int, key: Key, value: Value, others: Iterable[_Taken]) -> list[_Taken]:
        offset = _first_gap(value.floats, [other for other in others if other.near])
        near = value.vector or offset + value.floats <= near_floats
        if not near and value.optional:
            return []
        if not near:
            offset = _first_gap(value.floats, [other for other in others if not other.near])
        spaces[number][key] = Space(near, offset, value.lanes, value.pitch)
        return [_Taken(near, offset, offset + value.floats)]

    for number, of_stage in enumerate(values):
        around = [other for stage in {number} | before[number] | after[number] for other in taken[stage]]
        for key, value in _largest_last(of_stage, late=True):
            taken[number] += put(number, key, value, around + taken[number])
    for number, of_stage in enumerate(values):
        mine = [other for stage in {number} | before[number] for other in taken[stage]]
        for key, value in _largest_last(of_stage, late=False):
            mine += put(number, key, value, mine)
    ends = {near: [0] for near in (True, False)}
    for of_stage, placed in zip(values, spaces, strict=True):
        for key, space in placed.items():
            ends[space.near].append(space.offset + of_stage[key].floats)
    return spaces, max(ends[True]), max(ends[False])


def next_stages(program: Program) -> list[set[int]]:
    """By stage number: the stages that threads of a worker may be in while others are still in that one: the next ones in execution
    order, up to one in which they meet."""
    meets: list[bool] = []
    following: list[set[int]] = []
    for segment in program.segments:
        first = len(meets)
        meets += [bool(stage.operands) for stage in segment.stages]
        following += [{number + 1} for number in range(first, len(meets))]
        if segment.count > 1:
            following[-1].add(first)
    following[-1] = {0}  # the next step
    return [_up_to_meeting(start, following, meets) for start in following]


def _up_to_meeting(start: set[int], following: list[set[int]], meets: list[bool]) -> set[int]:
    reached: set[int] = set()
    waiting = list(start)
    while waiting:
        number = waiting.pop() % len(meets)
        if number not in reached:
            reached.add(number)
            waiting += [] if meets[number] else following[number]
    return reached


def _largest_last(values: Mapping[Key, Value], late: bool) -> list[tuple[Key, Value]]:
    """Vectors first, which must be near; then the small ones, of which most fit."""
    return sorted(((k, v) for k, v in values.items() if v.late == late), key=lambda item: (not item[1].vector, item[1].floats))


def _first_gap(floats: int, others: list[_Taken]) -> int:
    begin = 0
    for other in sorted(others, key=lambda other: other.begin):
        if begin + floats <= other.begin:
            break
        begin = max(begin, other.end)
    return begin
