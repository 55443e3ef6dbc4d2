"""How warps take in the vector of dots: each by itself where nobody else reads it, else all together; and how they share the dots."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from program_fixture import laneformer, llama, reads_vector_again, with_stages

from kogc.codegen.intake import Intake, late_values, make_intakes
from kogc.codegen.layout import numbered_stages
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.program import OpSpec, Program, Stage
from kogc.targets import DotRules

TILE = 4
WORKERS = 8
#: Two of eight warps share a unit, and hold what they need of vectors that are not too long; they take weights of shorter ones ahead.
RULES = DotRules(
    batch_units=32,
    sharing=lambda k, units: 2,
    packed_floats=lambda k, warps: (8 // warps * k, True),
    holds=lambda k, warps, dtype: k <= 32,
    drains=lambda k, warps, dtype: k <= 24,
    short_bytes=1000,
)


def intakes(program: Program, workers: int = WORKERS, **rules) -> dict[str, Intake | None]:
    """By the name of the stage."""
    found = make_intakes(program, schedule(program, workers, TILE), replace(RULES, **rules))
    return {stage.name: intake for (_, _, stage), intake in zip(numbered_stages(program), found, strict=True)}


def polled(found: dict[str, Intake | None], names: Sequence[str] = ()) -> dict[str, tuple[str, str | None]]:
    """Of stages whose vector every warp polls: the operand, and the norm between the two."""
    return {
        name: (intake.operand.name, intake.norm and intake.norm.name)
        for name, intake in found.items()
        if intake and intake.operand and (not names or name in names)
    }


def named(program: Program, name: str) -> Stage:
    return next(stage for _, _, stage in numbered_stages(program) if stage.name == name)


# ── who polls ──


def test_every_warp_polls_vectors_and_those_that_a_norm_makes_of_them():
    found = intakes(llama())
    # What attention has left in splits is brought together by all threads first.
    assert polled(found) == {"qkv_0": ("x", "attention_norm"), "gate_up_0": ("x", "ffn_norm"), "m_0": ("h", None), "head": ("x", "norm")}
    assert {name for name, intake in found.items() if intake is None} == {"embed", "attention_0", "sample"}
    assert polled(intakes(separate_combine(llama(), 0)), ["o_0"]) == {"o_0": ("attended", None)}


def test_without_a_scale_a_norm_is_one_just_the_same():
    bare = with_stages(llama(), lambda stage: replace(stage, prologue=tuple(replace(op, inputs=op.inputs[:1]) for op in stage.prologue)))
    assert polled(intakes(bare), ["qkv_0"]) == {"qkv_0": ("x", "attention_norm")}


def test_other_ops_are_computed_by_all_threads_together():
    mean_too = with_stages(llama(), lambda stage: replace(stage, prologue=tuple(replace(op, op="layer_norm") for op in stage.prologue)))
    assert polled(intakes(mean_too)) == {"m_0": ("h", None)}
    sums = intakes(laneformer(early="present"))  # the sums of all lanes are added, and published, by the stages that need them first
    assert not {"gate_up_0", "qkv_1", "gate_up_1", "qkv_2"} & set(polled(sums)) and sums["qkv_1"].operand is None
    assert polled(sums, ["qkv_0", "gate_up_2"]) == {"qkv_0": ("x", "attention_norm"), "gate_up_2": ("x", "ffn_norm")}

    def double_too(stage: Stage) -> Stage:
        """Beside the norm: what the other op reads must be received, too."""
        return replace(stage, prologue=(*stage.prologue, OpSpec("doubled", "add", ("x", "x"), {}, 1, 24)))

    assert polled(intakes(with_stages(llama(), double_too))) == {}


def test_a_vector_of_all_lanes_is_not_polled():
    heads = {head: intakes(laneformer(head=head, vocab=54)) for head in ("replicate", "vocab_parallel")}
    assert [polled(found, ["head"]) for found in heads.values()] == [{}, {"head": ("x", "norm")}]
    widened = lambda stage: tuple(replace(o, access="all_lanes") if o.access == "lane" else o for o in stage.operands)
    assert polled(intakes(with_stages(llama(), lambda stage: replace(stage, operands=widened(stage))))) == {}


def test_what_is_read_elsewhere_is_received_by_all_threads():
    assert polled(intakes(with_stages(llama(), reads_vector_again))) == {}

    def reads_source_again(stage: Stage) -> Stage:
        """The operand itself, not what the norm has made of it."""
        source = stage.prologue[0].inputs[0] if stage.prologue else stage.vector
        return replace(reads_vector_again(replace(stage, vector=source)), vector=stage.vector)

    assert polled(intakes(with_stages(llama(), reads_source_again))) == {}


@pytest.mark.parametrize("workers, alone", [(1, False), (2, False), (3, False), (4, True), (6, False), (8, True), (12, True)])
def test_who_visits_several_lanes_receives_what_it_needs_for_all_of_them(workers, alone):
    """It would publish for the first lane before it polls for the second, and others wait for both before they go on."""
    found = intakes(laneformer(lanes=4, heads=8, kv_heads=4, ffn=64), workers)
    ours = {"qkv_0": ("x", "attention_norm"), "m_2": ("h", None)}
    assert polled(found, list(ours)) == (ours if alone else {})
    assert [found[name].batched for name in ours] == [alone, alone]


# ── how dots are shared ──


def test_warps_share_units_by_the_most_that_a_worker_has_in_a_lane():
    asked = []
    found = intakes(llama(ffn=100), 3, sharing=lambda k, units: asked.append((k, units)) or units)
    # 25 units over three workers; 6 of rows over three; q, k and v are cut by the bytes of their units.
    assert (100, 2) in asked and (24, 9) in asked and found["gate_up_0"].warps == 9 and found["m_0"].warps == 2
    several = intakes(laneformer(lanes=4, heads=8, kv_heads=4, ffn=64), 1, sharing=lambda k, units: units)
    assert several["gate_up_0"].warps == 4  # of each lane, one after the other


def test_packed_vectors_take_what_the_target_says():
    floats = lambda k, warps: (k * 8 // warps, warps < 8)
    found = [intakes(llama(), packed_floats=floats, sharing=lambda k, units, warps=warps: warps)["qkv_0"] for warps in (8, 2)]
    assert [(one.floats, one.copied) for one in found] == [(24, False), (96, True)]


# ── all in one go ──


def test_few_units_are_batched_but_not_where_steps_may_pass_over_them_or_values_are_published_first():
    found = intakes(llama())
    assert {name for name, intake in found.items() if intake and intake.batched} == {"qkv_0", "o_0", "gate_up_0", "m_0"}
    sums = intakes(laneformer(early="present"))
    assert [sums[name].batched for name in ("qkv_0", "gate_up_0", "qkv_1", "m_1")] == [True, False, False, True]


def test_more_units_than_fit_into_a_batch_are_not_batched():
    most = {name: max(map(units, work)) for name, work in works(llama(ffn=200), 2).items()}
    assert most["gate_up_0"] == 25 and most["m_0"] == 3
    assert [intakes(llama(ffn=200), 2, batch_units=25 - less)["gate_up_0"].batched for less in (0, 1)] == [True, False]
    assert intakes(llama(ffn=200), 2, batch_units=24)["m_0"].batched


def works(program: Program, workers: int):
    plan = schedule(program, workers, TILE)
    return {stage.name: plan.work[segment][program.segments[segment].stages.index(stage)][0] for _, segment, stage in numbered_stages(program)}


def units(work) -> int:
    return sum(run.count for run in work.runs)


def test_short_vectors_that_one_kind_of_dots_reads_stay_in_registers():
    program = separate_combine(llama(ffn=32), 0)
    found = intakes(program)
    held = {name for name, intake in found.items() if intake and intake.held}
    # Norms need all warps, gated dots two tiles.
    assert held == {"o_0", "m_0"} and [(found[name].floats, found[name].warps) for name in ("o_0", "m_0")] == [(0, 2), (0, 2)]
    assert not intakes(program, holds=lambda k, warps, dtype: False)["m_0"].held
    assert not intakes(program, batch_units=1, workers=2)["m_0"].held

    def gate_only(stage: Stage) -> Stage:
        parts = (replace(part, unit="row", matrices=part.matrices[:1], epilogue=()) if part.unit == "gated" else part for part in stage.parts)
        return replace(stage, parts=tuple(parts))

    normed = intakes(with_stages(program, gate_only))["gate_up_0"]
    assert normed.operand and normed.batched and not normed.held


# ── weights in hand before the vector is there ──


def test_a_stage_of_one_part_tells_how_many_units_all_workers_begin_with():
    found = intakes(llama(ffn=100), 3)  # 25 units of gated rows over three workers
    assert [found["gate_up_0"].first.least, found["gate_up_0"].first.everyone] == [8, True]
    assert found["qkv_0"].first is None  # some begin with queries, some with keys
    few = intakes(llama(ffn=20))["gate_up_0"].first  # 5 units over eight workers
    assert (few.least, few.everyone) == (1, False)


def test_weights_are_taken_ahead_only_where_the_target_has_registers_for_them():
    assert intakes(llama(ffn=32))["gate_up_0"].first.drains  # of vectors of 24
    assert not intakes(llama(ffn=32), drains=lambda k, warps, dtype: False)["gate_up_0"].first.drains


def test_a_stage_is_short_when_no_worker_reads_much_in_it():
    most = 24 * 2 * TILE * 4  # bytes of a gated unit of fp32 with vectors of 24
    assert [intakes(llama(ffn=32), short_bytes=most + more)["gate_up_0"].short for more in (0, 1)] == [False, True]


# ── what is read last ──


def test_values_read_after_the_last_meeting():
    past = laneformer(window=5)
    assert late_values(named(past, "o_2")) >= {"past", "x"} and "partials" not in late_values(named(past, "o_2"))
    assert late_values(named(past, "qkv_0")) >= {"cos", "sin"} and not {"x", "attention_norm"} & late_values(named(past, "qkv_0"))
    assert "x_new" in late_values(named(laneformer(early="present"), "gate_up_0"))  # published
    assert late_values(named(separate_combine(past, 0), "attention_0_combine")) == {"partials"}
