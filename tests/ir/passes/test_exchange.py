"""The sync plan as data: what a worker does in a step, in order."""

from program_fixture import laneformer, llama

from kogc.ir.passes.exchange import sync_plan
from kogc.ir.passes.schedule import schedule


def events(program, workers, worker):
    plan = sync_plan(program, schedule(program, workers, 4))
    return [(e.kind, e.instance.removeprefix("stage "), e.buffer, e.write, e.intervals) for e in plan.events(worker)]


def test_one_worker_awaits_nothing_and_reads_and_publishes_everything():
    found = events(llama(layers=1, dim=8, heads=2, kv_heads=1, head_dim=4, ffn=8, vocab=9, splits=2), 1, 0)
    assert all(kind != "await" for kind, *_ in found)
    assert found[:7] == [
        ("publish", "embed, iteration 0", "x", 0, ((0, 8),)),
        ("read", "qkv_0, iteration 0", "x", 0, ((0, 8),)),
        ("publish", "qkv_0, iteration 0", "q", 0, ((0, 8),)),
        ("publish", "qkv_0, iteration 0", "k_order", 0, ((0, 4),)),
        ("publish", "qkv_0, iteration 0", "v_order", 0, ((0, 4),)),
        ("read", "attention_0, iteration 0", "q", 0, ((0, 8),)),
        ("read", "attention_0, iteration 0", "k_order", 0, ((0, 4),)),
    ]
    best = ("best", 0, ((0, 1),))
    assert found[-2:] == [("publish", "head, iteration 0", *best), ("read", "sample, iteration 0", *best)]


def test_what_only_epilogues_read_comes_after_the_prologue():
    found = events(laneformer(lanes=2, layers=4, delay=1, early="present"), 2, 0)
    pending = [(kind, buffer) for kind, where, buffer, *_ in found if where == "gate_up_0, iteration 0"]
    assert pending == [("await", "o"), ("read", "x"), ("read", "o"), ("publish", "x"), ("publish", "h")]
    late = [(kind, buffer) for kind, where, buffer, *_ in found if where == "o_2, iteration 0"]
    assert late.index(("read", "partials")) < late.index(("read", "x"))


def test_lanes_lie_side_by_side_in_element_numbers():
    program = laneformer(lanes=2, layers=3, delay=1)
    width = program.buffer("q").width
    own = [i for kind, where, buffer, _, i in events(program, 2, 1) if (kind, buffer) == ("publish", "q")]
    assert own and all(intervals == ((width, 2 * width),) for intervals in own)
