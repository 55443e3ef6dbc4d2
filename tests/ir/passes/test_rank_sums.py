"""Sums over lanes with stages of their own are made in every rank, from one exchange, and stay there."""

from dataclasses import replace

import numpy as np
import pytest
from decode_builder import laneformer
from plan_check import TOKENS, rolled
from rank_plans import TILE, sent

from kogc.ir.passes.across_ranks import across_ranks, own_lookups
from kogc.ir.passes.prove import prove, settle_slots
from kogc.ir.passes.rank_sums import sums_in_every_rank
from kogc.ir.passes.roll_interpret import interpret_program
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.separate_rows import separate_rows
from kogc.ir.program import Program

LANES = dict(lanes=4, heads=4, kv_heads=4, layers=4, delay=2, early=True)
ENDS = {"mean": {}, "sum before the norm": {"head": "pre_norm_lane_agg"}}


def apart(ranks: int, **options) -> Program:
    """With a stage of its own for every sum over lanes, dealt over all ranks so far."""
    return own_lookups(replace(separate_rows(rolled(laneformer(**LANES | options)), 0), ranks=ranks))


def settled(program: Program, tagged: bool = False) -> Program:
    plan = schedule(program, 2 * program.ranks, TILE)
    return settle_slots(across_ranks(program, plan, tagged), plan, tagged=tagged)


@pytest.mark.parametrize("tagged", [False, True], ids=["flags", "tagged"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("end", ENDS)
def test_the_end_takes_one_exchange(end, ranks, tagged):
    before, after = apart(ranks, **ENDS[end]), sums_in_every_rank(apart(ranks, **ENDS[end]))
    crossing = [{name for name, masks in sent(settled(one, tagged)).items() if any(masks)} for one in (before, after)]
    assert len(crossing[0] - crossing[1]) == 1 and crossing[1] < crossing[0], "the sum itself no longer crosses"
    (name,) = crossing[0] - crossing[1]
    assert before.buffer(name).lanes == 1 and after.buffer(name).lanes == ranks
    program = settled(after, tagged)
    assert prove(program, schedule(program, 2 * ranks, TILE), tagged=tagged).reads > 0


@pytest.mark.parametrize("end", ENDS)
def test_the_logits_stay_what_they_are(end):
    model = laneformer(**LANES | ENDS[end])
    before = separate_rows(rolled(model), 0)
    after = sums_in_every_rank(replace(before, ranks=4))
    logits = [interpret_program(program, model.weights, model.graph.tables, TOKENS) for program in (before, after)]
    np.testing.assert_array_equal(*logits)


def test_sums_within_lanes_and_whole_programs_of_one_rank_stay_as_they_are():
    one = separate_rows(rolled(laneformer(**LANES)), 0)
    assert sums_in_every_rank(one) is one
    laned = apart(2, head="vocab_parallel")
    assert any(stage.kind == "rows" for *_, stage in laned.instances()) and sums_in_every_rank(laned) == laned


def test_a_sum_that_somebody_reads_by_rows_stays_whole():
    program = apart(2)
    name = next(stage.parts[0].outputs[0].buffer for *_, stage in program.instances() if stage.kind == "rows" and stage.lanes == 1)

    def by_rows(stage):
        return replace(stage, operands=tuple(replace(o, access="rows") if o.buffer == name else o for o in stage.operands))

    segments = tuple(replace(s, stages=tuple(map(by_rows, s.stages))) for s in program.segments)
    assert sums_in_every_rank(replace(program, segments=segments)).buffer(name).lanes == 1
