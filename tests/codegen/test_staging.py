"""Where workers put what they receive: everything they read is received once, has a place, and nothing else lies there."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import compress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_fixture import Shape, build, laneformer, llama, random_shapes, reads_vector_again, with_stages

from kogc.codegen.layout import make_layout, numbered_stages
from kogc.codegen.near_places import Space
from kogc.codegen.pack_index import pack_index
from kogc.codegen.staging import VECTOR, Receipt, Staging, make_staging
from kogc.codegen.tables import first_instances, make_tables
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.passes.separate_rows import separate_rows
from kogc.ir.program import Operand, Program, Schedule, Stage, WorkerStage, unit_rows
from kogc.targets import load_target

TARGET = load_target("h200")
TILE = TARGET.tile_rows
PLENTY = 1 << 20


def own_scales(stage: Stage) -> Stage:
    """Every lane has norm scales of its own."""
    norms = {op.inputs[1] for op in stage.prologue if op.op == "rms_norm" and op.scope == "own"}
    return replace(stage, consts=tuple(replace(const, lanes=stage.lanes) if const.name in norms else const for const in stage.consts))


PROGRAMS = {
    "llama": llama(bias=True),
    "llama of one head": llama(heads=1, kv_heads=1, splits=3),
    "laneformer": laneformer(window=5),
    "blocking sums": laneformer(early="present", lanes=4, heads=8, kv_heads=4, ffn=44),
    "scales of lanes": with_stages(laneformer(early="present", lanes=4, heads=8, kv_heads=4, ffn=44), own_scales),
    "long dots": llama(dim=260, heads=2, kv_heads=1, head_dim=8, ffn=132, dtype="bf16"),
    "wide lanes": laneformer(ffn=1800),  # a worker of several lanes receives and packs vectors in one place
    "vectors read again": with_stages(llama(), reads_vector_again),
    "head per lane": laneformer(head="vocab_parallel", vocab=54),
    "combined apart": separate_combine(laneformer(heads=8, kv_heads=4, splits=3), 0),
    "rows apart": separate_rows(laneformer(early="present", lanes=4, heads=8, kv_heads=4, ffn=44), 0),
}
CASES = pytest.mark.parametrize("name, workers", [(name, workers) for name in PROGRAMS for workers in (1, 3, 40)])


@cache
def staged(name: str, workers: int, near_floats: int = PLENTY) -> tuple[Program, Schedule, Staging]:
    program = PROGRAMS[name]
    plan = schedule(program, workers, TILE)
    return program, plan, make_staging(program, plan, replace(TARGET, near_floats=near_floats))


def received(program: Program, plan: Schedule, staging: Staging) -> Iterator[tuple[int, Stage, Operand, WorkerStage, Receipt]]:
    """(stage number, stage, operand, work, receipt) of every operand that a worker receives in a step."""
    for number, segment, stage in numbered_stages(program):
        works = plan.work[segment][program.segments[segment].stages.index(stage)]
        for iteration, work in enumerate(works):
            for operand, receipts in zip(stage.operands, staging.receipts[number, iteration], strict=True):
                assert len(receipts) == plan.workers
                yield from ((number, stage, operand, one, receipt) for one, receipt in zip(work, receipts, strict=True))


def elements_read(program: Program, plan: Schedule, stage: Stage, operand: Operand, work: WorkerStage) -> set[tuple[int, int]]:
    """(lane, row) of all that ``work`` reads of ``operand``, from the words that document the accesses."""
    buffer = program.buffer(operand.buffer)
    everything = {(lane, row) for lane in range(buffer.lanes) for row in range(buffer.width)}
    if operand.access == "best":
        return {(0, 2 * worker + word) for worker in range(plan.workers) for word in (0, 1)}
    if operand.access == "all_lanes":
        return everything if work.runs else set()
    lane_of = lambda run: run.lane if buffer.lanes > 1 else 0
    if operand.access == "lane":
        return {element for element in everything if element[0] in {lane_of(run) for run in work.runs}}
    if operand.access in ("heads", "cache"):
        core = stage.attention
        each = core.head_dim * (core.heads // core.kv_heads if operand.access == "heads" else 1)
        heads = {(lane_of(run), unit // core.splits) for run in work.runs for unit in range(run.first, run.first + run.count)}
        return {(lane, head * each + i) for lane, head in heads for i in range(each)}
    if operand.access == "records":
        core = stage.combine
        each = core.splits * (core.head_dim + 2)
        heads = {(lane, row // core.head_dim) for lane, row in rows_of(stage, work, set(range(len(stage.parts))))}
        return {(lane, head * each + i) for lane, head in heads for i in range(each)}
    users = {i for i, part in enumerate(stage.parts) if any(operand.name in op.inputs for op in part.epilogue)}
    rows = rows_of(stage, work, users)
    if operand.access == "rows_all_lanes":
        return {(lane, row) for _, row in rows for lane in range(buffer.lanes)}
    assert operand.access == "rows"
    return {(lane if buffer.lanes > 1 else 0, row) for lane, row in rows}


def rows_of(stage: Stage, work: WorkerStage, parts: set[int]) -> set[tuple[int, int]]:
    """(lane, row) of all results of the worker's units of ``parts``."""
    found = set()
    for run in (run for run in work.runs if run.part in parts):
        for unit in range(run.first, run.first + run.count):
            part = stage.parts[run.part]
            rows = unit_rows(part, TILE, unit).ravel().tolist() if part.matrices else range(unit * TILE, (unit + 1) * TILE)
            found |= {(run.lane, row) for row in rows if 0 <= row < stage.part_rows(part)}
    return found


# ── receipts ──


def assert_everything_once(program: Program, plan: Schedule, staging: Staging) -> None:
    for _, stage, operand, work, receipt in received(program, plan, staging):
        words = Counter((lane, row) for lane, first, last in receipt.intervals for row in range(first, last))
        assert set(words) == elements_read(program, plan, stage, operand, work), (stage.name, operand.name)
        assert max(words.values(), default=1) == 1, (stage.name, operand.name)


@CASES
def test_all_that_a_worker_reads_is_received_once(name, workers):
    assert_everything_once(*staged(name, workers))


@settings(max_examples=25, deadline=None)
@given(random_shapes(), st.integers(1, 7), st.booleans())
def test_so_it_is_for_any_shape(shape: Shape, workers: int, apart: bool):
    program = separate_combine(build(shape), 0 if apart else 1000)
    plan = schedule(program, workers, TILE)
    assert_everything_once(program, plan, make_staging(program, plan, TARGET))


# ── places ──


Floats = tuple[bool, int, int]  # near, first, last


def places_of(program: Program, staging: Staging, number: int) -> dict[tuple[str, str], Floats]:
    """The place of every value of a stage. What lies in another's place on purpose, the packed vector, is there once."""
    columns = max(program.step_tokens)
    found = {("operand", name): floats(space, columns) for name, space in staging.operands[number].items()}
    found |= {("scratch", name): floats(space, columns) for name, space in staging.scratch[number].items()}
    found |= {("const", name): floats(space, 1) for name, space in staging.consts[number].items()}
    packed = staging.packed[number] and floats(staging.packed[number], columns)
    return found | ({("packed", ""): packed} if packed and packed not in found.values() else {})


def polled(staging: Staging, number: int) -> str | None:
    """The operand of a stage that every warp takes in by itself."""
    intake = staging.intakes[number]
    return intake.operand.name if intake and intake.operand else None


def floats(space: Space, columns: int) -> Floats:
    return space.near, space.offset, space.offset + columns * space.lanes * space.pitch


def apart(one: Floats, other: Floats) -> bool:
    return one[0] != other[0] or one[2] <= other[1] or other[2] <= one[1]


LIMITS = pytest.mark.parametrize("near_floats", [PLENTY, 1024, 0])


@LIMITS
@CASES
def test_what_is_received_fits_into_its_space(name, workers, near_floats):
    program, plan, staging = staged(name, workers, near_floats)
    for number, stage, operand, _, receipt in received(program, plan, staging):
        if polled(staging, number) == operand.name:
            assert operand.name not in staging.operands[number]  # it goes nowhere but into the packed vector
            continue
        space = staging.operands[number][operand.name]
        # The pairs of all workers follow each other.
        lanes, pitch = (1, 2 * workers) if operand.access == "best" else (space.lanes, space.pitch)
        assert receipt.row % VECTOR == space.offset % VECTOR == 0 and (lanes == 1 or pitch % VECTOR == 0)
        for lane, first, last in receipt.intervals:
            assert 0 <= lane - receipt.lane < lanes, (stage.name, operand.name)
            assert receipt.row <= first and last - receipt.row <= pitch, (stage.name, operand.name)


@LIMITS
@CASES
def test_values_of_a_stage_do_not_overlap(name, workers, near_floats):
    program, _, staging = staged(name, workers, near_floats)
    for number, _, stage in numbered_stages(program):
        places = list(places_of(program, staging, number).items())
        for i, (key, place) in enumerate(places):
            assert 0 <= place[1] and place[2] <= (staging.near_floats if place[0] else staging.far_floats), (stage.name, key)
            assert [other for other, at in places[:i] if not apart(place, at)] == [], (stage.name, key)


@LIMITS
@CASES
def test_packed_vectors_have_room_near_the_worker(name, workers, near_floats):
    program, _, staging = staged(name, workers, near_floats)
    for number, _, stage in numbered_stages(program):
        packed, intake = staging.packed[number], staging.intakes[number]
        needed = intake.floats if intake else 0
        assert (packed is None) == (needed == 0), stage.name
        if packed:
            assert packed.near and packed.pitch >= needed and packed.offset % 32 == 0, stage.name  # cache lines


@CASES
def test_vectors_are_packed_in_their_own_place_only_when_nobody_else_reads_them_there(name, workers):
    """Where several teams pack a vector, a fast one would overwrite what others still read; epilogues and shares need it as it was."""
    program, _, staging = staged(name, workers)
    for number, _, stage in numbered_stages(program):
        if stage.kind == "matvec" and not polled(staging, number):
            own = staging.operands[number].get(stage.vector) or staging.scratch[number][stage.vector]
            elsewhere = staging.intakes[number].copied or stage.vector in read_last(stage)
            assert (staging.packed[number] == own) == (not elsewhere), stage.name


@CASES
def test_scales_of_polled_vectors_stay_where_they_are_stored(name, workers):
    """What is fetched while a worker waits is there once its threads meet, and they do not meet before such a norm."""
    program, _, staging = staged(name, workers)
    for number, _, stage in numbered_stages(program):
        norms = {name for op in stage.prologue if op.op == "rms_norm" for name in op.inputs}
        own_lane = staging.intakes[number] and not staging.intakes[number].operand and stage.lanes == 1
        assert not polled(staging, number) or not norms & set(staging.consts[number]), stage.name
        assert not own_lane or norms & {const.name for const in stage.consts} <= set(staging.consts[number]), stage.name


def read_last(stage: Stage) -> set[str]:
    """Values that epilogues, shares and combines read, after the worker's threads last met."""
    names = {value for part in stage.parts for op in part.epilogue for value in op.inputs}
    names |= {output.value for output in stage.prologue_outputs}
    return names | ({operand.name for operand in stage.operands} if stage.kind == "combine" else set())


def successors(program: Program) -> list[set[int]]:
    """By stage number: where some threads of a worker may be while others are in that stage, from two steps in their order. They
    meet in every stage that receives anything."""
    numbers = {stage.name: (number, bool(stage.operands)) for number, _, stage in numbered_stages(program)}
    order = [numbers[stage.name] for *_, stage in program.instances()]
    found: list[set[int]] = [set() for _ in numbers]
    for at, (number, _) in enumerate(order):
        for following, meets in [*order[at + 1 :], *order]:
            found[number].add(following)
            if meets:
                break
    return found


@LIMITS
@CASES
def test_what_is_read_last_is_safe_from_the_next_stage(name, workers, near_floats):
    """Epilogues and shares run after the worker's threads last met: some may be at the next stage already."""
    program, _, staging = staged(name, workers, near_floats)
    places = [places_of(program, staging, number) for number, _, _ in numbered_stages(program)]
    following = successors(program)
    for number, _, stage in numbered_stages(program):
        assert number not in following[number]
        for (kind, value), place in places[number].items():
            if kind != "packed" and value in read_last(stage):
                others = (at for other in following[number] for at in places[other].values())
                assert all(apart(place, at) for at in others), (stage.name, value)


def test_depth_takes_no_more_memory():
    """Segments of layers that differ use the same memory one after the other."""
    programs = (laneformer(early="present", layers=layers, delay=layers - 1) for layers in (4, 8))
    few, many = (make_staging(program, schedule(program, 3, TILE), TARGET) for program in programs)
    assert len(many.operands) > len(few.operands) and many.near_floats == few.near_floats


@pytest.mark.parametrize("near_floats", [PLENTY, 1024, 300, 0])
@pytest.mark.parametrize("name", PROGRAMS)
def test_near_memory_is_kept_to_its_limit_but_for_the_vectors_of_dots(name, near_floats):
    program, _, staging = staged(name, 3, near_floats)
    for number, _, stage in numbered_stages(program):
        vector = staging.packed[number] and floats(staging.packed[number], max(program.step_tokens))
        for key, place in places_of(program, staging, number).items():
            assert not place[0] or place == vector or place[2] <= near_floats, (stage.name, key)


@pytest.mark.parametrize("name", PROGRAMS)
def test_far_memory_is_for_what_does_not_fit_and_only_for_that(name):
    _, _, roomy = staged(name, 3)
    assert roomy.far_floats == 0
    assert staged(name, 3, roomy.near_floats)[2] == roomy
    _, _, tight = staged(name, 3, 0)
    assert tight.far_floats > 0 and tight.near_floats < roomy.near_floats and tight.receipts == roomy.receipts


# ── the plan's words ──


@CASES
def test_the_plan_tells_workers_what_they_receive(name, workers):
    program, plan, staging = staged(name, workers)
    index = pack_index(program, plan, TARGET.layout)
    tables = make_tables(program, plan, make_layout(program, workers, TILE, tagged=True), index, staging)
    words, first = np.frombuffer(tables.data, np.int32).tolist(), first_instances(program)
    for worker in range(workers):
        begin, length = words[words[2] + 2 * worker :][:2]
        script = words[begin : begin + length]
        assert length <= tables.script_words
        for number, segment, stage in numbered_stages(program):
            for iteration in range(program.segments[segment].count):
                at = script[tables.work + first[number] + iteration]
                if any(const.lanes > 1 and const.name in staging.consts[number] for const in stage.consts):
                    runs = plan.at(segment, program.segments[segment].stages.index(stage), iteration, worker).runs
                    assert {run.lane for run in runs} <= {script[at]}
                    at += 1
                listed_operands = (operand.name != polled(staging, number) for operand in stage.operands)
                for receipts in compress(staging.receipts[number, iteration], listed_operands):
                    lane, row, count = script[at : at + 3]
                    listed = tuple(tuple(script[at + 3 + 3 * i : at + 6 + 3 * i]) for i in range(count))
                    assert Receipt(lane, row, listed) == receipts[worker], stage.name
                    at += 3 + 3 * count
