"""Schedule: every unit once, equal bytes for all, and waits for exactly the makers of what is read."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_fixture import Shape, build, laneformer, llama, random_shapes

from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.schedule_deal import Dealer
from kogc.ir.passes.schedule_splits import choose_splits, with_splits
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.passes.spans import PlanError
from kogc.ir.program import Affine, Program, Schedule, unit_rows

TILE = 4
few = settings(max_examples=40, deadline=None)


def works(program: Program, plan: Schedule):
    """(stage, iteration, work of all workers) of every stage instance."""
    for segment, iteration, number, stage in program.instances():
        yield stage, iteration, plan.work[segment][number][iteration]


def loads(program: Program, workers: int, tile_rows: int = TILE, context: int = 1024):
    """Bytes of every worker over the token, and those of the heaviest unit."""
    dealer = Dealer(program, workers, tile_rows, context)
    instances = [(stage, iteration) for _, iteration, _, stage in program.instances() if stage.kind != "sample"]
    for stage, iteration in instances:
        dealer.deal(stage, iteration)
    return dealer.bytes, max(max(dealer._unit_bytes(stage, iteration)) for stage, iteration in instances)


# ── dealing ──


@few
@given(random_shapes(), st.integers(1, 7), st.sampled_from([1, 3, 4]), st.booleans())
def test_every_unit_is_dealt_exactly_once_in_flat_order(shape: Shape, workers: int, tile: int, apart: bool):
    program = separate_combine(build(shape), 0 if apart else 1000)
    for stage, _, work in works(program, schedule(program, workers, tile)):
        runs = [run for one in work for run in one.runs]
        dealt = [(run.lane, run.part, run.first + i) for run in runs for i in range(run.count)]
        parts = range(0 if stage.kind == "sample" else max(1, len(stage.parts)))
        wanted = [(lane, part, unit) for lane in range(stage.lanes) for part in parts for unit in range(stage.units(part, tile))]
        assert dealt == wanted


@few
@given(random_shapes(), st.integers(1, 7))
def test_the_heaviest_worker_carries_at_most_one_unit_more_than_the_average(shape: Shape, workers: int):
    carried, heaviest = loads(build(shape), workers)
    assert carried.max() - carried.mean() <= heaviest


def test_remainders_rotate():
    """Five equal units over two workers: after two stages both have five."""
    program = llama(layers=2, dim=20, heads=2, kv_heads=2, head_dim=2, ffn=20)
    downs = [work for stage, _, work in works(program, schedule(program, 2, TILE)) if stage.name.startswith("m_")]
    counts = np.array([[sum(run.count for run in one.runs) for one in work] for work in downs])
    assert sorted(counts[0]) == [2, 3]
    carried, heaviest = loads(program, 2)
    assert carried.max() - carried.min() <= heaviest


@pytest.mark.parametrize(("lanes", "workers"), [(2, 2), (2, 6), (4, 8), (4, 2), (8, 4)])
def test_lanes_keep_to_their_own_workers_where_the_numbers_divide(lanes: int, workers: int):
    program = laneformer(lanes=lanes, heads=8, kv_heads=8, ffn=16 * lanes)
    domains = min(lanes, workers)
    for stage, _, work in works(program, schedule(program, workers, TILE)):
        for worker, one in enumerate(work):
            for run in one.runs if stage.lanes > 1 else ():
                assert run.lane * domains // lanes == worker * domains // workers


def test_a_lane_group_waits_for_nobody_else_inside_a_layer():
    program = laneformer(lanes=2, layers=5, delay=2)
    for stage, _, work in works(program, schedule(program, 4, TILE)):
        local = [i for i, o in enumerate(stage.operands) if program.buffer(o.buffer).scope == "group"]
        for worker, one in enumerate(work):
            group = range(worker // 2 * 2, worker // 2 * 2 + 2)
            assert all(low in group and high - 1 in group for i in local for low, high in one.awaits[i])


def test_more_workers_than_units_leaves_some_without_work():
    program = llama(layers=2, dim=8, heads=1, kv_heads=1, head_dim=4, ffn=8, vocab=9, splits=1)
    plan = schedule(program, 7, TILE)
    idle = [one for stage, _, work in works(program, plan) if stage.kind != "sample" for one in work if not one.runs]
    assert idle and all(not any(one.awaits) and not one.shares for one in idle)
    (head,), (sample,) = ([work for stage, _, work in works(program, plan) if stage.name == name] for name in ("head", "sample"))
    assert not all(one.runs for one in head)
    for worker, one in enumerate(sample):
        awaited = {w for low, high in one.awaits[0] for w in range(low, high)}
        assert awaited | {worker} == set(range(plan.workers)), "who has no row of the head is waited for, too"


def test_windowed_attention_weighs_what_it_reads():
    program = llama(layers=2, capacity=2048, window=16, delay=1)
    dealer = Dealer(program, 2, TILE, 1024)
    attention = program.segments[1].stages[1]
    near, far = (dealer._unit_bytes(attention, i)[0] for i in (0, 1))
    assert far == near * 1024 / 16


# ── waits, against a slow and simple reading of the docstrings ──


def rows_of(stage, run, tile):
    """Output elements of a run, in its lane."""
    if stage.attention:
        core, group = stage.attention, stage.attention.heads // stage.attention.kv_heads
        size = core.head_dim + 2
        for unit in range(run.first, run.first + run.count):
            head, split = divmod(unit, core.splits)
            for q in range(head * group, (head + 1) * group):
                yield from range((q * core.splits + split) * size, (q * core.splits + split + 1) * size)
    elif stage.kind in ("embed", "combine"):
        width = stage.embed_width if stage.kind == "embed" else stage.combine.heads * stage.combine.head_dim
        yield from range(run.first * tile, min((run.first + run.count) * tile, width))
    else:
        part = stage.parts[run.part]
        for unit in range(run.first, run.first + run.count):
            yield from {int(row) for row in unit_rows(part, tile, unit).reshape(-1) if row >= 0}


def elements(program, stage, operand, run, tile):
    """(lane, element) the run needs of the operand."""
    buffer = program.buffer(operand.buffer)
    everything = [(lane, e) for lane in range(buffer.lanes) for e in range(buffer.width)]
    lane = run.lane if buffer.lanes > 1 else 0
    if operand.access == "all_lanes":
        return everything
    if operand.access == "lane":
        return [(lane, e) for e in range(buffer.width)]
    if operand.access.startswith("rows"):
        used = any(operand.name in op.inputs for op in stage.parts[run.part].epilogue)
        lanes = range(buffer.lanes) if operand.access == "rows_all_lanes" else [lane]
        return [(each, e) for each in lanes for e in rows_of(stage, run, tile)] if used else []
    if operand.access == "records":
        core = stage.combine
        size = core.splits * (core.head_dim + 2)
        return [(lane, e) for head in {row // core.head_dim for row in rows_of(stage, run, tile)} for e in range(head * size, (head + 1) * size)]
    core = stage.attention
    size = core.head_dim * (core.heads // core.kv_heads if operand.access == "heads" else 1)
    heads = {unit // core.splits for unit in range(run.first, run.first + run.count)}
    return [(lane, e) for head in heads for e in range(head * size, (head + 1) * size)]


def makers(program, stage, work, tile):
    """(buffer, write affine, lane, element) → worker of what a stage instance makes."""
    logits = [output for part in stage.parts for output in part.outputs if output.kind == "logits"]
    made = {(output.buffer, output.write, 0, worker): worker for output in logits for worker in range(len(work))}
    for worker, one in enumerate(work):
        for share in one.shares:
            output = stage.prologue_outputs[share.output]
            made.update({(output.buffer, output.write, share.lane, e): worker for e in range(share.first, share.last)})
        for run in one.runs:
            outputs = [stage.attention.output] if stage.attention else stage.parts[run.part].outputs
            for output in outputs:
                buffer = program.buffer(output.buffer)
                if output.kind == "logits":
                    continue
                lanes = range(buffer.lanes) if buffer.lanes > stage.lanes else [run.lane]
                made.update({(output.buffer, output.write, lane, e): worker for lane in lanes for e in rows_of(stage, run, tile)})
    return made


@settings(max_examples=15, deadline=None)
@given(random_shapes(most_lanes=4), st.integers(1, 5), st.sampled_from([2, 3]), st.booleans())
def test_waits_cover_exactly_the_makers_of_what_is_read(shape: Shape, workers: int, tile: int, apart: bool):
    program = separate_combine(build(shape), 0 if apart else 1000)
    owner, seen = {}, Counter()
    for stage, iteration, work in works(program, schedule(program, workers, tile)):
        for worker, one in enumerate(work):
            needed = {}
            for i, operand in enumerate(stage.operands):
                key = (operand.buffer, operand.write.at(iteration))
                if operand.access == "best":
                    needed[i] = {w for (b, k, _, _), w in owner.items() if (b, k) == key}
                else:
                    places = [place for run in one.runs for place in elements(program, stage, operand, run, tile)]
                    needed[i] = {owner[(*key, *place)] for place in places}
            for i, operand in enumerate(stage.operands):
                key = (worker, operand.buffer, operand.write.at(iteration))
                awaited = {w for low, high in one.awaits[i] for w in range(low, high)}
                assert awaited <= needed[i]
                for producer in awaited:
                    seen[(*key, producer)] += 1
            for i, operand in enumerate(stage.operands):
                key = (worker, operand.buffer, operand.write.at(iteration))
                assert all(seen[(*key, producer)] for producer in needed[i] - {worker})
        owner.update({(b, w.at(iteration), lane, e): who for (b, w, lane, e), who in makers(program, stage, work, tile).items()})
    assert all(count == 1 for (worker, *_, producer), count in seen.items() if worker != producer)


def test_reading_a_write_that_is_made_later_is_refused():
    program = llama(layers=2)
    stage = program.segments[1].stages[0]
    late = _with_stage(program, 1, 0, operands=(_moved(stage.operands[0], Affine(2, 2)),))
    with pytest.raises(PlanError, match="qkv_0, iteration 0 reads write 2 of buffer x"):
        schedule(late, 2, TILE)


def test_no_workers_are_refused():
    with pytest.raises(PlanError, match="at least one worker"):
        schedule(llama(), 0, TILE)


def _moved(operand, write):
    return replace(operand, write=write)


def _with_stage(program: Program, segment: int, number: int, **changes) -> Program:
    stages = list(program.segments[segment].stages)
    stages[number] = replace(stages[number], **changes)
    segments = list(program.segments)
    segments[segment] = replace(segments[segment], stages=tuple(stages))
    return replace(program, segments=tuple(segments))


# ── splits ──


@pytest.mark.parametrize(
    ("kv_heads", "workers", "splits"), [(3, 2, 2), (3, 3, 1), (8, 128, 16), (16, 132, 8), (4, 3, 3), (1, 7, 7), (2, 1, 1)]
)
def test_splits_are_the_smallest_that_deal_evenly(kv_heads: int, workers: int, splits: int):
    assert choose_splits(llama(heads=kv_heads, kv_heads=kv_heads), workers) == splits


def test_splits_change_attention_partials_and_combine_together():
    program = with_splits(laneformer(heads=8, kv_heads=4, head_dim=6), 3)
    width = 4 * 3 * (6 + 2)
    assert program.buffer("partials").width == width
    for _, _, _, stage in program.instances():
        assert not stage.attention or stage.attention.splits == 3
        assert all(operand.width == width for operand in stage.operands if operand.buffer == "partials")
        assert all(op.attrs["splits"] == 3 for op in stage.prologue if op.op == "attention_combine")
    schedule(program, 3, TILE)
