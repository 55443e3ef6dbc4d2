"""Combining attention's splits in a stage of its own: what the program looks like then, and that it computes the same."""

from dataclasses import replace

import numpy as np
import pytest
from decode_builder import laneformer as lanes
from decode_builder import llama as decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_check import TOKENS, expected_logits, rolled
from program_fixture import Shape, build, laneformer, llama, random_shapes, random_weights, rope_tables

from kogc.ir.passes.exchange import sync_plan
from kogc.ir.passes.prove import prove, settle_slots
from kogc.ir.passes.roll_interpret import ProgramRun, interpret_program
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.schedule_splits import with_splits
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.passes.spans import PlanError
from kogc.ir.program import Affine, Combine, Operand, OpSpec, Output, Program, Stage

TILE = 4


def stages(program: Program) -> list[Stage]:
    return [stage for segment in program.segments for stage in segment.stages]


def named(program: Program, name: str) -> Stage:
    return next(stage for stage in stages(program) if stage.name == name)


# ── the program ──


def test_a_stage_of_its_own_stands_before_the_reader():
    program = separate_combine(llama(heads=4, kv_heads=2, head_dim=6, splits=3), 0)
    names = [stage.name for stage in program.segments[1].stages]
    assert names == ["qkv_0", "attention_0", "attention_0_combine", "o_0", "gate_up_0", "m_0"]
    combine = named(program, "attention_0_combine")
    assert (combine.kind, combine.lanes, combine.combine) == ("combine", 1, Combine("partials", 4, 6, 3))
    assert combine.operands == (Operand("partials", "partials", Affine(0, 1), "records", 1, 4 * 3 * 8),)
    assert combine.parts[0].outputs == (Output("row", "buffer", "attended", Affine(0, 1)),)
    assert combine.units(0, TILE) == 6 and combine.units(0, 5) == 5
    reader = named(program, "o_0")
    assert reader.operands[0] == Operand("attended", "attended", Affine(0, 1), "lane", 1, 24)
    assert reader.prologue == () and reader.vector == "attended"


def test_the_new_buffer_is_like_the_partials_but_as_wide_as_the_heads():
    before = laneformer(heads=8, kv_heads=4, head_dim=6)
    after = separate_combine(before, 0)
    partials, attended = after.buffer("partials"), after.buffer("attended")
    assert replace(attended, name="partials", payload="partials", width=partials.width) == partials == before.buffer("partials")
    assert attended.payload == "vector" and attended.width == 4 * 6
    assert len(after.buffers) == len(before.buffers) + 1


def test_only_partials_that_are_too_wide_are_separated():
    program = llama(heads=4, head_dim=6, splits=2)  # 4 · 2 · 8 = 64 words
    assert separate_combine(program, 64) == program
    assert len(stages(separate_combine(program, 63))) == len(stages(program)) + 1


def test_without_attention_nothing_changes():
    program = llama(layers=0)
    assert separate_combine(program, 0) == program


def test_stages_are_named_after_the_attention_wherever_the_loop_was_cut():
    """Rolled lanes may have an attention in one loop and its reader in the next."""
    program = separate_combine(rolled(lanes(delay=2, layers=5, early=True), splits=2), 0)
    found = [stage for stage in stages(program) if stage.kind == "combine"]
    assert {(stage.name, stage.title) for stage in found} == {("attention_combine", "attention: attention, splits combined")}
    for segment in program.segments:
        for before, after in zip(segment.stages, segment.stages[1:]):
            assert before.kind != "combine" or "attended" in {operand.name for operand in after.operands}
    assert program.meta["stages"] == len(list(program.instances()))


def test_what_else_reads_or_publishes_the_combined_vector_follows():
    """A reader that also adds its own rows of the combined vector and publishes it for a later stage."""
    program = publishing(llama(dim=24, heads=4, head_dim=6))
    after = separate_combine(program, 0)
    combine, reader = named(after, "attention_0_combine"), named(after, "o_0")
    assert [output.buffer for output in combine.parts[0].outputs] == ["attended", "kept"]
    assert reader.prologue_outputs == ()
    assert [(o.name, o.buffer, o.access) for o in reader.operands if o.buffer == "attended"] == [
        ("attended", "attended", "lane"), ("attended_rows", "attended", "rows"),
    ]  # fmt: skip
    assert_same_logits(program, after)
    prove(settle_slots(after, schedule(after, 3, TILE)), schedule(after, 3, TILE))


def publishing(program: Program) -> Program:
    """``o_0`` publishes the combined vector and adds it to its dots; ``gate_up_0`` norms it instead of the residual."""
    o, gate_up = named(program, "o_0"), named(program, "gate_up_0")
    (part,) = o.parts
    mixed = OpSpec("mixed", "add", ("dot0", "attended"), {}, 1, 24)
    epilogue = (mixed, *(replace(op, inputs=tuple("mixed" if n == "dot0" else n for n in op.inputs)) for op in part.epilogue))
    kept = Output("attended", "buffer", "kept", Affine(0, 1))
    changed = {
        "o_0": replace(o, parts=(replace(part, epilogue=epilogue),), prologue_outputs=(kept,)),
        "gate_up_0": replace(gate_up, operands=(replace(gate_up.operands[0], buffer="kept", write=Affine(0, 1)),)),
    }
    segments = tuple(replace(s, stages=tuple(changed.get(one.name, one) for one in s.stages)) for s in program.segments)
    buffer = replace(program.buffer("h"), name="kept", width=24)
    return replace(program, segments=segments, buffers=(*program.buffers, buffer))


# ── what it computes ──


def assert_same_logits(before: Program, after: Program) -> None:
    weights, tables = random_weights(before), rope_tables(before)
    ids = [token % before.vocab for token in TOKENS]
    found, expected = (interpret_program(one, weights, tables, ids, 3) for one in (after, before))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(random_shapes(most_lanes=4))
def test_logits_stay_the_same(shape: Shape):
    assert_same_logits(build(shape), separate_combine(build(shape), 0))


@pytest.mark.parametrize("model", [decoder(), lanes(delay=2, layers=5, early=True), lanes(head="vocab_parallel")])
def test_rolled_models_compute_the_same(model):
    program = separate_combine(with_splits(rolled(model), 3), 0)
    assert any(stage.kind == "combine" for stage in stages(program))
    found = interpret_program(program, model.weights, model.graph.tables, TOKENS, 2)
    np.testing.assert_allclose(found, expected_logits(model), atol=1e-9)


def test_the_interpreter_keeps_what_the_stage_publishes():
    program = separate_combine(llama(heads=4, head_dim=6, splits=4), 0)
    run = ProgramRun(program, random_weights(program), rope_tables(program))
    run.step([3, 1], [0, 1])
    published = [value for (*where, name, _), value in run.published.items() if (where, name) == ([1, 0, 2], "row")]
    assert published and all(value.shape == (2, 1, 24) and np.isfinite(value).all() for value in published)


# ── who does what ──


def test_a_worker_waits_for_the_makers_of_its_heads_only():
    """Two heads of 8 in two splits over four workers: two of them make a head's records, and combine its rows."""
    program = separate_combine(llama(layers=1, heads=2, kv_heads=2, head_dim=8, splits=2), 0)
    work = schedule(program, 4, TILE).work[1][2][0]
    assert [[(run.first, run.count) for run in one.runs] for one in work] == [[(0, 1)], [(1, 1)], [(2, 1)], [(3, 1)]]
    assert [one.awaits[0] for one in work] == [((1, 2),), ((0, 1),), ((3, 4),), ((2, 3),)]


@settings(max_examples=25, deadline=None)
@given(random_shapes(), st.integers(1, 7), st.booleans())
def test_every_plan_is_proven(shape: Shape, workers: int, tagged: bool):
    program = separate_combine(build(shape), 0)
    plan = schedule(program, workers, TILE)
    program = settle_slots(program, plan, tagged=tagged)
    assert prove(program, plan, tagged=tagged).reads > 0


@pytest.mark.parametrize("tagged", [False, True], ids=["flags", "tagged"])
@pytest.mark.parametrize("operand", ["partials", "attended"])
def test_a_dropped_await_is_refused(operand: str, tagged: bool):
    program = separate_combine(llama(layers=2, heads=4, kv_heads=2, head_dim=6, splits=3), 0)
    plan = schedule(program, 3, TILE)
    program = settle_slots(program, plan, tagged=tagged)
    number = next(i for i, stage in enumerate(program.segments[1].stages) if operand in {o.name for o in stage.operands})
    work = [list(its) for its in plan.work[1]]
    reader = next(worker for worker, one in enumerate(work[number][0]) if one.awaits[0])
    one = work[number][0][reader]
    silent = replace(one, awaits=((), *one.awaits[1:]))
    work[number][0] = (*work[number][0][:reader], silent, *work[number][0][reader + 1 :])
    hurt = replace(plan, work=(plan.work[0], tuple(tuple(its) for its in work), *plan.work[2:]))
    with pytest.raises(PlanError, match=f"worker {reader} reads write 0 of buffer {operand}.*no wait covers"):
        prove(program, hurt, tagged=tagged)


def test_nobody_reads_all_partials_any_more():
    """32 heads, 16 splits over 128 workers: who combines reads one head's records, who multiplies reads the vector."""
    program = with_splits(llama(layers=1, dim=64, heads=32, kv_heads=8, head_dim=64, ffn=64), 16)
    most = {}
    for apart in (False, True):
        one = separate_combine(program, 0) if apart else program
        plan = sync_plan(one, schedule(one, 128, 8))
        reads = [read for instance in plan.instances for read in instance.reads if read.buffer in ("partials", "attended")]
        most[apart] = max(int((read.spans.high - read.spans.low)[read.spans.worker == w].sum()) for read in reads for w in range(128))
    assert most == {False: 32 * 16 * 66, True: 2048}
