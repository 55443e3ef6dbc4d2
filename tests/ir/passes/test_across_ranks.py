"""Ranks meet in what is sent and in nothing else: every plan is proven, and each piece that is taken out of it is missed."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decode_builder import laneformer, llama
from plan_check import TOKENS, rolled
from rank_plans import TILE, dealt, sent

from kogc.ir.passes.across_ranks import MOST_RANKS, across_ranks, own_lookups
from kogc.ir.passes.exchange import SyncPlan, sync_plan
from kogc.ir.passes.prove import PROMPT, TOKEN, prove, prove_plan, settle_slots
from kogc.ir.passes.roll_interpret import interpret_program
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.schedule_splits import with_splits
from kogc.ir.passes.spans import PlanError

sys.path.append(str(Path(__file__).parent))
from prove_oracle import accepts  # noqa: E402

SEQUENCES = ((PROMPT, PROMPT, PROMPT), (TOKEN, PROMPT, TOKEN), (TOKEN, TOKEN, TOKEN))
LANES = dict(lanes=4, heads=4, kv_heads=4, layers=5, delay=2)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 1), (2, 3), (4, 1), (4, 2)])
@pytest.mark.parametrize("options", [{}, {"early": True}, {"delay": 1, "head": "lane"}, {"head": "vocab_parallel"}, {"head": "pre_norm_lane_agg"}])
def test_dealt_lanes_are_proven(options, ranks, workers):
    program, plan = dealt(laneformer(**LANES | options), ranks, workers)
    assert prove(program, plan).reads > 0


def test_sums_are_sent_in_the_layers_whose_sums_somebody_reads():
    """With delay 2, what the last two layers make never reaches the other lanes."""
    program, _ = dealt(laneformer(**LANES), 2, 2)
    assert [bool(mask) for mask in sent(program)["attention_wo"]] == [True, True, True, False, False]
    assert sent(program)["attention_wo"][0] == 0b11


def test_the_residual_stream_leaves_its_rank_for_the_mean_over_lanes_alone():
    program, _ = dealt(laneformer(**LANES), 2, 2)
    assert [bool(mask) for mask in sent(program)["x"]] == [False] * 5 + [True]
    apart, _ = dealt(laneformer(**LANES, head="vocab_parallel"), 2, 2)
    assert not any(sent(apart)["x"])


def test_what_stays_in_a_lane_stays_in_its_rank():
    program, _ = dealt(laneformer(**LANES), 4, 2)
    scopes = {buffer.name: buffer.scope for buffer in program.buffers}
    assert {name for name, scope in scopes.items() if scope == "ranks"} == {"x", "attention_wo", "feed_forward_w2", "best"}
    assert scopes["q"] == scopes["partials"] == scopes["act"] == scopes["kv_keys"] == "group"


def test_one_rank_sends_nothing():
    program = rolled(laneformer(**LANES))
    plan = schedule(program, 4, TILE)
    assert across_ranks(program, plan) is program and own_lookups(program) is program


def test_lookups_by_lanes_compute_the_same():
    model = laneformer(**LANES)
    before = rolled(model)
    after = own_lookups(replace(before, ranks=2))
    assert after.segments[0].stages[0].lanes == 4
    logits = [interpret_program(program, model.weights, model.graph.tables, TOKENS) for program in (before, after)]
    np.testing.assert_array_equal(*logits)


# ── plans that lack something ──


def crossing(plan: SyncPlan):
    """(instance number, publish number, publish) of everything that is sent."""
    for number, instance in enumerate(plan.instances):
        for index, publish in enumerate(instance.publishes):
            if publish.sent_to:
                yield number, index, publish


def with_instance(plan: SyncPlan, number: int, **changes) -> SyncPlan:
    instances = list(plan.instances)
    instances[number] = replace(instances[number], **changes)
    return replace(plan, instances=tuple(instances))


@pytest.mark.parametrize("options", [{}, {"early": True, "delay": 1}, {"head": "vocab_parallel"}])
def test_a_send_that_is_left_out_is_refused(options):
    plan = sync_plan(*dealt(laneformer(**LANES | options), 2, 2))
    tried = 0
    for number, index, publish in crossing(plan):
        for rank in (r for r in range(2) if publish.sent_to >> r & 1):
            publishes = list(plan.instances[number].publishes)
            publishes[index] = replace(publish, sent_to=publish.sent_to & ~(1 << rank))
            hurt = with_instance(plan, number, publishes=tuple(publishes))
            with pytest.raises(PlanError, match=f"{publish.buffer}.*(does not send|wait forever)"):
                prove_plan(hurt)
            assert not accepts(hurt, SEQUENCES[2])
            tried += 1
    assert tried >= 14


@pytest.mark.parametrize("tagged", [False, True], ids=["flags", "tagged"])
def test_a_wait_for_another_rank_that_is_left_out_is_refused_or_implied(tagged):
    """As within a rank: who does not wait for a value must have heard of it from others."""
    program = own_lookups(replace(rolled(laneformer(layers=3, delay=1, early=True)), ranks=2))
    work = schedule(program, 4, TILE)
    plan = sync_plan(settle_slots(across_ranks(program, work, tagged), work, tagged=tagged), work)
    ranks, outcomes = plan.rank_of(), []
    for number, instance in enumerate(plan.instances):
        for index, wait in enumerate(instance.waits):
            for reader, producer in np.argwhere(wait.producers & (ranks[:, None] != ranks[None])):
                producers = wait.producers.copy()
                producers[reader, producer] = False
                waits = list(instance.waits)
                waits[index] = replace(wait, producers=producers)
                hurt, kinds = with_instance(plan, number, waits=tuple(waits)), SEQUENCES[len(outcomes) % 3]
                try:
                    prove_plan(hurt, step_kinds=[kinds], tagged=tagged)
                    outcomes.append(False)
                except PlanError:
                    outcomes.append(True)
                assert outcomes[-1] != accepts(hurt, kinds, tagged), (str(instance), wait.buffer, reader, producer)
    assert sum(outcomes) > len(outcomes) / 3


def test_words_with_their_own_flags_are_sent_whenever_any_of_their_buffer_are():
    """Tags are few: a rank that missed some writes of a slot would take an old word for the one it waits for."""
    program = own_lookups(replace(rolled(laneformer(**LANES)), ranks=2))
    work = schedule(program, 4, TILE)
    some, every = (across_ranks(program, work, tagged) for tagged in (False, True))
    assert sent(some)["attention_wo"] == [3, 3, 3, 0, 0] and sent(every)["attention_wo"] == [3] * 5
    assert {name for name, masks in sent(some).items() if any(masks)} == {name for name, masks in sent(every).items() if any(masks)}
    prove(settle_slots(every, work, tagged=True), work, tagged=True)
    prove(settle_slots(some, work), work)
    with pytest.raises(PlanError, match="does not send write . of buffer .* where write 0 goes"):
        settle_slots(some, work, tagged=True)


def test_a_slot_less_is_refused():
    program, plan = dealt(laneformer(**LANES), 2, 2)
    tried = [buffer.name for buffer in program.buffers if buffer.slots > 1 and buffer.scope == "ranks"]
    assert tried
    for name in tried:
        fewer = replace(program, buffers=tuple(replace(b, slots=b.slots - (b.name == name)) for b in program.buffers))
        with pytest.raises(PlanError, match=f"overwrites write .* of buffer {name} .*more slots"):
            prove(fewer, plan)


def test_a_cache_that_another_rank_would_have_to_read_is_refused():
    program = with_splits(replace(rolled(llama()), ranks=2), 2)
    with pytest.raises(PlanError, match="rank . reads a cache that another rank appends to"):
        across_ranks(program, schedule(program, 4, TILE))


@pytest.mark.parametrize(("ranks", "workers"), [(2, 3), (MOST_RANKS + 1, MOST_RANKS + 1)])
def test_workers_that_do_not_divide_are_refused(ranks, workers):
    program = replace(rolled(laneformer(**LANES)), ranks=ranks)
    with pytest.raises(PlanError, match=f"{workers} workers do not divide over {ranks} ranks"):
        across_ranks(program, schedule(program, workers, TILE))
