"""Sums over lanes in stages of their own: what the program looks like then, and that it computes the same."""

from dataclasses import replace

import numpy as np
import pytest
from decode_builder import Graphs
from decode_builder import laneformer as lanes
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_check import TOKENS, expected_logits, rolled
from program_fixture import Shape, build, laneformer, llama, random_shapes, random_weights, rope_tables, with_stages

from kogc.ir.passes.exchange import sync_plan
from kogc.ir.passes.prove import prove, settle_slots
from kogc.ir.passes.roll_interpret import ProgramRun, interpret_program
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.schedule_splits import with_splits
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.passes.separate_rows import separate_rows
from kogc.ir.passes.spans import PlanError
from kogc.ir.program import Affine, Buffer, Operand, OpSpec, Output, Program, Run, Stage

TILE = 4


def stages(program: Program) -> list[Stage]:
    return [stage for segment in program.segments for stage in segment.stages]


def named(program: Program, name: str) -> Stage:
    return next(stage for stage in stages(program) if stage.name == name)


def made(program: Program) -> list[str]:
    return [stage.name for stage in stages(program) if stage.kind == "rows"]


def wide(program: Program, most_words: int = 0) -> set[tuple[str, str]]:
    """(stage, operand) wherever a worker reads more than ``most_words`` words of several lanes for its dots."""
    reads = ((stage, operand) for stage in stages(program) if stage.kind == "matvec" for operand in stage.operands)
    return {(s.name, o.name) for s, o in reads if o.access == "all_lanes" and o.lanes > 1 and o.lanes * o.width > most_words}


def averaging(stage: Stage) -> Stage:
    """A ``gate_up`` stage that adds the mean of all lanes' normed streams to half its own before it norms it, for nobody else."""
    if not stage.name.startswith("gate_up") or len(stage.operands) > 1:
        return stage
    (x,), (scale,), (norm,) = stage.operands, stage.consts, stage.prologue
    adds = (
        replace(norm, name="every_norm", inputs=("every", scale.name), scope="all"),
        OpSpec("mean", "lane_mean", ("every_norm",), {}, 1, x.width, "all"),
        OpSpec("half", "scale", ("x",), {"factor": 0.5}, x.lanes, x.width),
        OpSpec("mixed", "add", ("half", "mean"), {}, x.lanes, x.width),
    )
    operands = (x, replace(x, name="every", access="all_lanes"))
    return replace(stage, operands=operands, prologue=(*adds, replace(norm, inputs=("mixed", scale.name))))


# ── the program ──


def test_a_sum_that_was_published_keeps_its_place():
    """``gate_up`` adds every lane's ``o`` to its stream and publishes that for later stages: now a stage of its own does."""
    before = laneformer(early="present")
    after = separate_rows(before, 0)
    assert [stage.name for stage in after.segments[1].stages] == ["qkv_0", "attention_0", "o_0", "gate_up_0_x_new", "gate_up_0", "m_0"]
    rows, reader = named(after, "gate_up_0_x_new"), named(after, "gate_up_0")
    assert (rows.kind, rows.lanes, rows.parts[0].rows, rows.prologue) == ("rows", 2, 24, ())
    assert rows.title == "gate and up projections, lanes brought together"
    assert [(o.name, o.access) for o in rows.operands] == [("x", "rows"), ("o", "rows_all_lanes")]
    assert [op.name for op in rows.parts[0].epilogue] == ["o_sum", "x_new"]
    assert rows.parts[0].outputs == named(before, "gate_up_0").prologue_outputs == (Output("x_new", "buffer", "x", Affine(1, 2)),)
    assert reader.operands == (Operand("x_new", "x", Affine(1, 2), "lane", 2, 24),)
    assert [op.name for op in reader.prologue] == ["ffn_norm"] and reader.prologue_outputs == ()
    assert (reader.consts, reader.parts) == (named(before, "gate_up_0").consts, named(before, "gate_up_0").parts)


def test_norms_of_all_lanes_come_before_their_mean():
    after = separate_rows(laneformer(head="replicate"), 0)
    assert [stage.name for stage in after.segments[-1].stages] == ["head_norm", "head_mean", "head", "sample"]
    norm, mean, head = after.segments[-1].stages[:3]
    # A lane's workers norm that lane alone, whole, and publish their rows of it.
    assert (norm.lanes, norm.operands[0].access, norm.prologue[0].scope) == (2, "lane", "own")
    assert [const.name for const in norm.consts] == ["norm_scale"] and norm.parts[0].epilogue == ()
    assert (mean.lanes, mean.operands[0].access, mean.consts) == (1, "rows_all_lanes", ())
    assert head.operands == (Operand("mean", "mean", Affine(0), "lane", 1, 24),)
    assert (head.prologue, head.consts, head.vector) == ((), (), "mean")
    assert after.buffers[-2:] == (Buffer("norm", "vector", 2, 24, 1, 1), Buffer("mean", "vector", 1, 24, 1, 1))


def test_what_a_loop_makes_anew_has_a_write_for_every_turn():
    program = with_stages(laneformer(early="none", delay=2, layers=4), averaging)
    after = separate_rows(program, 0)
    assert made(after) == [f"gate_up_{layer}_{name}" for layer in (0, 2) for name in ("every_norm", "mixed")] + ["head_norm", "head_mean"]
    assert [buffer.name for buffer in after.buffers[len(program.buffers) :]] == ["every_norm", "mixed", "every_norm_2", "mixed_2", "norm", "mean"]
    assert {after.buffer(name).writes_per_step for name in ("every_norm", "mixed", "every_norm_2", "mixed_2")} == {2}
    assert named(after, "gate_up_2").operands == (Operand("mixed", "mixed_2", Affine(0, 1), "lane", 2, 24),)
    assert_same_logits(program, after)
    assert_proven(after, 3)


def test_a_norm_that_was_published_keeps_its_place_beside_the_new_one():
    kept = Output("norm", "buffer", "kept", Affine(0))
    program = laneformer()
    program = replace(program, buffers=(*program.buffers, Buffer("kept", "vector", 2, 24, 1, 1)))
    after = separate_rows(with_stages(program, lambda stage: replace(stage, prologue_outputs=(kept,)) if stage.name == "head" else stage), 0)
    assert named(after, "head_norm").parts[0].outputs == (replace(kept, buffer="norm"), kept)
    assert named(after, "head").prologue_outputs == ()
    assert_proven(after, 3)


def test_only_more_than_the_limit_is_taken_apart():
    program = laneformer(early="present")  # 2 · 24 = 48 words
    assert separate_rows(program, 48) == program
    assert len(stages(separate_rows(program, 47))) == len(stages(program)) + 6  # four sums of two layers, the head's norm and mean


@pytest.mark.parametrize("program", [llama(), laneformer(head="vocab_parallel")], ids=["llama", "lanes"])
def test_without_sums_of_all_lanes_nothing_changes(program):
    assert separate_rows(program, 0) == program


@pytest.mark.parametrize("options", [{"delay": 4, "layers": 5}, {"delay": 2, "layers": 5, "lane_norms": True}], ids=str)
def test_sums_in_loops_are_found_and_counted(options):
    before = rolled(lanes(early=True, **options))
    after = separate_rows(before, 0)
    assert wide(after) == set() and after.buffers[: len(before.buffers)] == before.buffers
    sums = {output for stage in stages(after) if stage.kind == "rows" for output in stage.parts[0].outputs if output.value == "sum"}
    assert sums == {output for stage in stages(before) for output in stage.prologue_outputs}
    assert after.meta["stages"] == len(list(after.instances())) == before.meta["stages"] + 2 * options["delay"] + 2


def test_an_epilogue_reads_rows_of_what_was_moved():
    """The second linear is added to the very sum that it norms."""
    model = Graphs.summed_linear()
    after = separate_rows(rolled(model), 0)
    reader = named(after, "second")
    assert [(o.name, o.buffer, o.access) for o in reader.operands] == [("sum", "sum", "lane"), ("sum_rows", "sum", "rows")]
    assert reader.parts[0].epilogue[0].inputs == ("sum_rows", "dot0")
    assert_same_as_graph(after, model)
    assert_proven(after, 3)


def test_several_values_come_from_one_stage():
    """The dots' vector needs one of the values that were moved, the epilogue another."""

    def adding(stage: Stage) -> Stage:
        if "half" not in {op.name for op in stage.prologue}:
            return stage
        (part,) = stage.parts
        again = OpSpec("again", "add", ("dot0", "half"), {}, 2, 24)
        return replace(stage, parts=(replace(part, epilogue=(again, replace(part.epilogue[0], inputs=("again", "dot1")))),))

    program = with_stages(with_stages(laneformer(ffn=2 * 24), averaging), adding)
    after = separate_rows(program, 0)
    assert [output.buffer for output in named(after, "gate_up_0_half").parts[0].outputs] == ["half", "mixed"]
    assert {(o.name, o.buffer, o.access) for o in named(after, "gate_up_0").operands} == {("half_rows", "half", "rows"), ("mixed", "mixed", "lane")}
    assert_same_logits(program, after)
    assert_proven(after, 3)


# ── what cannot be taken apart ──


def unchanged(program: Program, *names: str) -> None:
    """The stages ``names`` are what they were, and buffers were made for others only."""
    after = separate_rows(program, 0)
    assert all(named(after, name) == named(program, name) for name in names)
    new = {buffer.name for buffer in after.buffers} - {buffer.name for buffer in program.buffers}
    assert new <= {output.buffer for stage in stages(after) if stage.kind == "rows" for output in stage.parts[0].outputs}
    assert not any(one.startswith(f"{name}_") for one in made(after) for name in names)
    assert_proven(after, 3)


def test_lanes_side_by_side_stay_where_they_are():
    """Who joins all lanes reads all lanes, normed before or not."""
    program = rolled(lanes(head="lane"))
    assert separate_rows(program, 0) == program
    unchanged(rolled(lanes(head="lane", early=True)), "lm_head_linear")


@pytest.mark.parametrize("head", ["lane", "replicate", "pre_norm_lane_agg"])
def test_a_sum_that_is_needed_in_all_lanes_stays_where_it_is(head):
    """The head adds up the last layer's lanes, and goes on with the sums of all of them."""
    model = lanes(layers=1, delay=1, early=True, head=head)
    unchanged(rolled(model), "lm_head_linear" if head == "lane" else "lm_head")
    assert_same_as_graph(separate_rows(rolled(model), 0), model)


#: Rows of one lane and rows of every lane are no rows of one stage; whole lanes side by side are no rows at all.
MIXED = {
    "published": {"prologue_outputs": (Output("o_sum", "buffer", "total", Affine(0)),)},
    "joined": {"prologue": (OpSpec("joined", "lane_concat", ("o",), {}, 1, 48, "all"),)},
}


@pytest.mark.parametrize("more", MIXED.values(), ids=MIXED)
def test_a_sum_beside_something_else_stays_where_it_is(more):
    program = laneformer(early="present", delay=1, layers=2)
    program = replace(program, buffers=(*program.buffers, Buffer("total", "vector", 1, 24, 1, 1)))
    stage = named(program, "gate_up_0")
    mixed = replace(stage, **{field: (*getattr(stage, field), *values) for field, values in more.items()})
    unchanged(with_stages(program, lambda one: mixed if one == stage else one), "gate_up_0")


# ── what it computes ──


def assert_same_logits(before: Program, after: Program) -> None:
    weights, tables = random_weights(before), rope_tables(before)
    ids = [token % before.vocab for token in TOKENS]
    found, expected = (interpret_program(one, weights, tables, ids, 3) for one in (after, before))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def assert_same_as_graph(program: Program, model) -> None:
    found = interpret_program(program, model.weights, model.graph.tables, TOKENS, 2)
    np.testing.assert_allclose(found, expected_logits(model), atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(random_shapes(most_lanes=4), st.booleans(), st.integers(0, 60))
def test_logits_stay_the_same(shape: Shape, averages: bool, most_words: int):
    program = with_stages(build(shape), averaging) if averages and shape.lanes > 1 else build(shape)
    after = separate_rows(program, most_words)
    assert wide(after, most_words) == set()
    assert_same_logits(program, after)


SUMS = [{"early": True, "delay": 2}, {"early": True, "delay": 5, "lane_norms": True}, {"delay": 1, "mlp_comm": False}]


@pytest.mark.parametrize("head", ["replicate", "lane", "vocab_parallel", "pre_norm_lane_agg"])
@pytest.mark.parametrize("options", SUMS, ids=str)
def test_rolled_models_compute_the_same(options, head):
    model = lanes(layers=5, head=head, lanes=4, kv_heads=4, **options)
    for program in (rolled(model), separate_combine(with_splits(rolled(model), 3), 0)):
        assert_same_as_graph(separate_rows(program, 0), model)


def test_the_interpreter_keeps_what_the_stages_publish():
    program = separate_rows(laneformer(), 0)
    run = ProgramRun(program, random_weights(program), rope_tables(program))
    run.step([3, 1], [0, 1])
    head = len(program.segments) - 1
    published = {(*where, name): value for (*where, name, _), value in run.published.items()}
    normed, mean = published[head, 0, 0, "norm"], published[head, 0, 1, "mean"]
    assert normed.shape == (2, 2, 24)
    np.testing.assert_allclose(mean, normed.mean(1, keepdims=True))


# ── who does what ──


def assert_proven(program: Program, workers: int, tagged: tuple[bool, ...] = (False, True)) -> None:
    plan = schedule(program, workers, TILE)
    for one in tagged:
        assert prove(settle_slots(program, plan, tagged=one), plan, tagged=one).reads > 0


def test_workers_share_the_rows_and_wait_for_their_makers_only():
    """Two lanes of 8 rows over four workers: each makes a tile of one lane's sum and waits for who made it of the other's."""
    program = separate_rows(laneformer(early="present", delay=1, layers=2, dim=8), 0)
    number = [stage.name for stage in program.segments[1].stages].index("gate_up_0_x_new")
    work = schedule(program, 4, TILE).work[1][number][0]
    assert [one.runs for one in work] == [(Run(0, 0, 0, 1),), (Run(0, 0, 1, 1),), (Run(1, 0, 0, 1),), (Run(1, 0, 1, 1),)]
    assert [one.awaits[1] for one in work] == [((2, 3),), ((3, 4),), ((0, 1),), ((1, 2),)]


@settings(max_examples=25, deadline=None)
@given(random_shapes(), st.integers(1, 7), st.booleans(), st.booleans())
def test_every_plan_is_proven(shape: Shape, workers: int, tagged: bool, averages: bool):
    program = with_stages(build(shape), averaging) if averages and shape.lanes > 1 else build(shape)
    assert_proven(separate_rows(program, 0), workers, (tagged,))


@pytest.mark.parametrize("tagged", [False, True], ids=["flags", "tagged"])
@pytest.mark.parametrize("name, buffer", [("gate_up_0_x_new", "o"), ("gate_up_0", "x"), ("head_norm", "x"), ("head_mean", "norm")])
def test_a_dropped_await_is_refused(name: str, buffer: str, tagged: bool):
    program = separate_rows(laneformer(early="present", lanes=4, kv_heads=4), 0)
    plan = schedule(program, 3, TILE)
    program = settle_slots(program, plan, tagged=tagged)
    at, number = next((s, n) for s, segment in enumerate(program.segments) for n, stage in enumerate(segment.stages) if stage.name == name)
    operand = next(i for i, one in enumerate(program.segments[at].stages[number].operands) if one.buffer == buffer)
    work = [[list(its) for its in segment] for segment in plan.work]
    ones = list(work[at][number][0])
    reader = next(worker for worker, one in enumerate(ones) if one.awaits[operand])
    awaits = list(ones[reader].awaits)
    awaits[operand] = ()
    ones[reader] = replace(ones[reader], awaits=tuple(awaits))
    work[at][number][0] = tuple(ones)
    hurt = replace(plan, work=tuple(tuple(tuple(its) for its in segment) for segment in work))
    with pytest.raises(PlanError, match=f"worker {reader} reads write .* of buffer {buffer}.*no wait covers"):
        prove(program, hurt, tagged=tagged)


def test_nobody_reads_all_lanes_any_more():
    """8 lanes of 512 over 128 workers: who sums reads its few rows in all lanes, who multiplies reads one lane."""
    program = laneformer(early="present", lanes=8, kv_heads=8, heads=8, dim=512, ffn=512, vocab=64)
    most = {}
    for apart in (False, True):
        one = separate_rows(program, 0) if apart else program
        plan = sync_plan(one, schedule(one, 128, TILE))
        reads = [read.spans for instance in plan.instances for read in instance.reads]
        most[apart] = max(np.bincount(spans.worker, spans.high - spans.low).max() for spans in reads)
    assert most == {False: 8 * 512, True: 512}
