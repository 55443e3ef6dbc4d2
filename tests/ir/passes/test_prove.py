"""The prover: every scheduled program is proven, and every damaged plan is refused unless the damage does not matter."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decode_builder import laneformer as lanes
from decode_builder import llama as decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_check import rolled
from program_fixture import Shape, build, laneformer, llama, random_shapes

from kogc.compile_passes import _proven
from kogc.ir.passes.exchange import Instance, Publish, SyncPlan, sync_plan
from kogc.ir.passes.prove import PROMPT, TOKEN, prove, prove_plan, settle_slots
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.schedule_splits import choose_splits, with_splits
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.passes.spans import PlanError, Spans
from kogc.ir.program import Cache, Program

sys.path.append(str(Path(__file__).parent))
from prove_oracle import accepts  # noqa: E402

TILE = 4
SEQUENCES = ((PROMPT, PROMPT, PROMPT), (TOKEN, PROMPT, TOKEN), (TOKEN, TOKEN, TOKEN))


def settled(program: Program, workers: int, tagged: bool = False):
    plan = schedule(program, workers, TILE)
    return settle_slots(program, plan, tagged=tagged), plan


def verdict(plan: SyncPlan, kinds, tagged: bool = False) -> str | None:
    """Why the prover refuses the plan, or None."""
    try:
        prove_plan(plan, step_kinds=[kinds], tagged=tagged)
    except PlanError as refusal:
        return str(refusal)
    return None


# ── sound plans ──


@settings(max_examples=30, deadline=None)
@given(random_shapes(), st.integers(1, 7), st.booleans(), st.booleans())
def test_every_schedule_is_proven_with_few_slots(shape: Shape, workers: int, tagged: bool, apart: bool):
    program, plan = settled(separate_combine(build(shape), 0 if apart else 1000), workers, tagged)
    proof = prove(program, plan, tagged=tagged)
    assert proof.reads > 0 and proof.overwrites > 0
    for buffer in program.buffers:
        assert buffer.slots <= 2 * shape.layers + 4
        assert buffer.payload != "cache" or buffer.slots == 1


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("make", [llama, lambda: laneformer(early="present"), lambda: laneformer(delay=1, layers=3)])
def test_the_oracle_agrees_on_sound_plans(make, workers: int):
    for tagged in (False, True):
        program, plan = settled(make(), workers, tagged)
        for kinds in SEQUENCES:
            assert accepts(sync_plan(program, plan), kinds, tagged)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("model", [decoder(), lanes(), lanes(delay=2, layers=5, early=True), lanes(head="vocab_parallel")])
def test_rolled_models_are_proven(model, workers: int):
    program = rolled(model)
    program, plan = settled(with_splits(program, choose_splits(program, workers)), workers)
    assert prove(program, plan).reads > 0


@settings(max_examples=12, deadline=None)
@given(random_shapes(), st.sampled_from([16, 64, 128]))
def test_many_workers_are_proven(shape: Shape, workers: int):
    program = build(shape)
    program = with_splits(program, choose_splits(program, workers))
    assert _proven(program, schedule(program, workers, 2 * TILE), tagged=True).buffer("best").slots <= 4


@pytest.mark.parametrize("tagged", [False, True])
def test_workers_that_have_nothing_to_do_are_proven_too(tagged: bool):
    """They sample like all others, and say when they have: in the word that tells of no logit."""
    program = llama(layers=2, dim=8, heads=1, kv_heads=1, head_dim=4, ffn=8, vocab=9, splits=1)
    plan = schedule(program, 128, 2 * TILE)
    busy = {worker for segment in plan.work for stage in segment for work in stage for worker, one in enumerate(work) if one.runs}
    assert len(busy) < 64 and _proven(program, plan, tagged=tagged).buffer("best").slots == 2


def test_one_slot_less_is_refused_by_both():
    program, plan = settled(laneformer(layers=4, delay=2), 2)
    for buffer in (b for b in program.buffers if b.slots > 1):
        fewer = replace(program, buffers=tuple(replace(b, slots=b.slots - (b.name == buffer.name)) for b in program.buffers))
        with pytest.raises(PlanError, match=f"overwrites write .* of buffer {buffer.name} .*more slots"):
            prove(fewer, plan)
        assert not all(accepts(sync_plan(fewer, plan), kinds) for kinds in SEQUENCES)


@pytest.mark.parametrize("make", [llama, lambda: laneformer(head="vocab_parallel", vocab=54)])
def test_every_logit_must_be_made_once(make):
    """Whoever samples reads all of them, and knows of their makers only."""
    program, plan = settled(make(), 3)
    prove(program, plan)
    segment, number = len(program.segments) - 1, len(program.segments[-1].stages) - 2
    dealt = plan.work[segment][number][0]
    assert program.segments[segment].stages[number].name == "head"
    for worker, one in enumerate(dealt):
        for runs, times in ((one.runs[1:], 0), ((*one.runs, one.runs[0]), 2)):
            damaged = (*dealt[:worker], replace(one, runs=runs), *dealt[worker + 1 :])
            stages = (*plan.work[segment][:number], (damaged,), *plan.work[segment][number + 1 :])
            spoilt = replace(plan, work=(*plan.work[:segment], stages, *plan.work[segment + 1 :]))
            with pytest.raises(PlanError, match=f"the logit of word .* is made {times} times, not once"):
                prove(program, spoilt)


def test_delayed_sums_need_slots_for_the_delay():
    slots = {}
    for delay in (1, 2, 3):
        program, _ = settled(laneformer(layers=8, delay=delay), 4)
        slots[delay] = program.buffer("o").slots
    assert slots[1] < slots[2] < slots[3]


def test_steps_between_two_uses_of_a_slot_are_walked():
    """One write a step and five slots: a slot comes back after five steps."""
    program, plan = settled(llama(layers=2), 2)
    many = replace(program, buffers=tuple(replace(b, slots=5 if b.payload == "best" else b.slots) for b in program.buffers))
    assert max(len(kinds) for kinds in prove(many, plan).sequences) >= 6


def test_a_plan_for_a_whole_gpu_is_proven():
    heads = dict(heads=32, kv_heads=16, head_dim=96, rope="interleaved")
    shape = Shape(layers=4, lanes=8, dim=3072, ffn=12288, vocab=32000, delay=2, **heads)
    program = with_splits(build(shape), choose_splits(build(shape), 132))
    plan = schedule(program, 132, 8)
    program = settle_slots(program, plan)
    assert prove(program, plan).waits > 132
    assert program.buffer("x").slots <= 8


# ── damaged plans ──

SMALL = dict(layers=2, dim=12, heads=2, kv_heads=2, head_dim=4, ffn=12, vocab=13, splits=1)


def sound(make, workers=3, tagged=False):
    program, plan = settled(make(), workers, tagged)
    return sync_plan(program, plan)


def with_instance(plan: SyncPlan, number: int, **changes) -> SyncPlan:
    instances = list(plan.instances)
    instances[number] = replace(instances[number], **changes)
    return replace(plan, instances=tuple(instances))


def swapped(items: tuple, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def without_await(plan: SyncPlan, number: int, index: int, reader: int, producer: int) -> SyncPlan:
    wait = plan.instances[number].waits[index]
    producers = wait.producers.copy()
    producers[reader, producer] = False
    return with_instance(plan, number, waits=swapped(plan.instances[number].waits, index, replace(wait, producers=producers)))


def without_publish(plan: SyncPlan, number: int, index: int, worker: int) -> SyncPlan:
    publish: Publish = plan.instances[number].publishes[index]
    keep = publish.spans.worker != worker
    spans = Spans(publish.spans.worker[keep], publish.spans.low[keep], publish.spans.high[keep])
    return with_instance(plan, number, publishes=swapped(plan.instances[number].publishes, index, replace(publish, spans=spans)))


MODELS = {
    "llama": lambda: llama(**SMALL),
    "delayed": lambda: laneformer(**{**SMALL, "layers": 3, "delay": 1}),
    "blocking": lambda: laneformer(**{**SMALL, "layers": 2, "delay": 1, "early": "present"}),
    "combined apart": lambda: separate_combine(llama(**{**SMALL, "head_dim": 6, "splits": 2}), 0),
}


@pytest.mark.parametrize("tagged", [False, True], ids=["flags", "tagged"])
@pytest.mark.parametrize("model", MODELS)
def test_every_dropped_await_is_refused_or_implied(model: str, tagged: bool):
    plan = sound(MODELS[model], tagged=tagged)
    sites = [
        (number, index, int(reader), int(producer))
        for number, instance in enumerate(plan.instances)
        for index, wait in enumerate(instance.waits)
        for reader, producer in np.argwhere(wait.producers)
    ]
    refused = 0
    for turn, site in enumerate(sites):
        hurt, kinds = without_await(plan, *site), SEQUENCES[turn % 3]
        why = verdict(hurt, kinds, tagged)
        assert (why is None) == accepts(hurt, kinds, tagged), (site, why)
        refused += why is not None
    assert refused > len(sites) / 3


@pytest.mark.parametrize("model", MODELS)
def test_every_dropped_publish_is_refused(model: str):
    plan = sound(MODELS[model])
    for number, instance in enumerate(plan.instances):
        for index, publish in enumerate(instance.publishes):
            for worker in set(publish.spans.worker.tolist()):
                hurt = without_publish(plan, number, index, worker)
                whys = [verdict(hurt, kinds) for kinds in SEQUENCES]
                assert any(whys) or all(accepts(hurt, kinds) for kinds in SEQUENCES), (str(instance), publish.buffer, worker)
                if _is_read(plan, publish, worker):
                    assert any(whys), (str(instance), publish.buffer, worker)


def _is_read(plan: SyncPlan, publish: Publish, worker: int) -> bool:
    """Whether anybody reads what ``worker`` makes here."""
    mine = {e for low, high in publish.spans.of_worker(worker) for e in range(low, high)}
    reads = [r for i in plan.instances for r in i.reads if (r.buffer, r.write) == (publish.buffer, publish.write)]
    return any(low < e + 1 <= high for r in reads for low, high in zip(r.spans.low, r.spans.high, strict=True) for e in mine)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("model", MODELS)
def test_every_wrong_write_number_is_refused_or_implied(model: str, change: int):
    plan = sound(MODELS[model])
    for number, instance in enumerate(plan.instances):
        for index, wait in enumerate(instance.waits):
            hurt = with_instance(plan, number, waits=swapped(instance.waits, index, replace(wait, write=wait.write + change)))
            # The prover refuses a wait for a later write of the step even where it would happen to end.
            assert verdict(hurt, SEQUENCES[1]) or accepts(hurt, SEQUENCES[1]), (str(instance), wait.buffer)
        for index, publish in enumerate(instance.publishes):
            moved = replace(publish, write=publish.write + change)
            hurt = with_instance(plan, number, publishes=swapped(instance.publishes, index, moved))
            assert verdict(hurt, SEQUENCES[1]), (str(instance), publish.buffer)


# ── what refusals say ──


def test_a_refusal_names_stage_worker_buffer_and_write():
    plan = sound(MODELS["llama"], workers=2)
    number = next(i for i, instance in enumerate(plan.instances) if instance.name.startswith("gate_up"))
    why = verdict(without_await(plan, number, 0, 0, 1), SEQUENCES[2])
    assert why.startswith("stage gate_up_0, iteration 0: worker 0 reads write 1 of buffer x in step 0")
    assert why.endswith("let it await worker 1")


def test_waiting_for_somebody_who_makes_nothing_is_a_deadlock():
    program = llama(**{**SMALL, "dim": 8})  # two tiles of the last vector, for three workers
    plan = sync_plan(program, schedule(program, 3, TILE))
    wait = plan.instances[-2].waits[0]
    hurt = with_instance(plan, -2, waits=(replace(wait, producers=np.ones((3, 3), bool)),))
    assert f"owns nothing of it in {plan.instances[-3]}: it would wait forever" in verdict(hurt, SEQUENCES[2])


def test_attention_that_does_not_wait_for_appends_is_refused():
    """The read follows from the cache's key, so leaving the operand out does not hide it."""
    program = llama(**SMALL)
    segment = program.segments[1]
    attention = replace(segment.stages[1], operands=segment.stages[1].operands[:2])
    changed = replace(segment, stages=swapped(segment.stages, 1, attention))
    program = replace(program, segments=swapped(program.segments, 1, changed))
    with pytest.raises(PlanError, match="attention_0, iteration 0: worker . reads write 0 of buffer v_order"):
        prove(program, schedule(program, 3, TILE))


def test_a_cache_that_would_be_rewritten_is_refused():
    program = llama(**SMALL)
    small = replace(program, caches=(Cache("layers.0.k", 2, 4, program.capacity - 1), *program.caches[1:]))
    with pytest.raises(PlanError, match="cache layers.0.k holds 31 positions of a context of 32"):
        prove(small, schedule(small, 2, TILE))


def test_lanes_that_never_meet_in_a_prompt_step_are_proven():
    """Only the next step's embedding orders them, so the residual must outlive a whole step."""
    program, plan = settled(laneformer(layers=2, delay=2, lanes=3, heads=3, kv_heads=3, ffn=12), 3)
    assert program.buffer("x").slots > program.buffer("x").writes_per_step
    for kinds in SEQUENCES:
        assert accepts(sync_plan(program, plan), kinds)


def test_no_number_of_slots_mends_a_missing_wait():
    program = llama(**SMALL)
    plan = schedule(program, 2, TILE)
    mute = lambda one: replace(one, awaits=tuple(() for _ in one.awaits))
    silent = tuple(tuple(tuple(tuple(map(mute, its)) for its in stage) for stage in segment) for segment in plan.work)
    with pytest.raises(PlanError, match="no wait covers"):
        settle_slots(program, replace(plan, work=silent))


def test_a_writer_that_hears_from_nobody_is_refused_with_any_number_of_slots():
    """An embedding that only this worker makes, and readers that it never waits for."""
    program = llama(**{**SMALL, "layers": 1, "dim": 4})
    plan = sync_plan(program, schedule(program, 2, TILE))
    first = Instance("embed", 0, False, (), (), plan.instances[0].publishes)
    reader = replace(plan.instances[1], publishes=(), reads=tuple(r for r in plan.instances[1].reads if r.buffer == "x"))
    deaf = replace(plan, instances=(first, reader))
    for slots in (1, 2, 3):
        tried = replace(deaf, buffers={"x": replace(plan.buffers["x"], slots=slots, writes_per_step=1)})
        assert "give the buffer more slots" in verdict(tried, (PROMPT,) * 5)


def test_no_slots_are_refused():
    program = llama(**{**SMALL, "slots": 0})
    with pytest.raises(PlanError, match="buffer x has 0 slots"):
        prove(program, schedule(program, 2, TILE))
