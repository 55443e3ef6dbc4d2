"""Kernels that are cancelled, watched, starved or broken: they always come back, and say why."""

import threading
import time

import pytest
from kernel_harness import Kernel
from program_fixture import llama

pytestmark = pytest.mark.compiler

IDS = [3, 11, 7, 0, 19]
CONTEXT = 1 << 16


@pytest.fixture(scope="module")
def endless():
    """A model whose context takes minutes to fill."""
    return Kernel(llama(capacity=CONTEXT, splits=1))


@pytest.fixture(scope="module")
def faulty():
    return Kernel(llama(), defines=("KOGC_FAULT",))


def start(run):
    thread = threading.Thread(target=run.run)
    thread.start()
    return thread


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.05])
def test_cancel(endless, delay_s):
    run = endless.launch(IDS, max_tokens=CONTEXT)
    thread = start(run)
    time.sleep(delay_s)
    run.state.cancel = 1
    thread.join(5)
    assert not thread.is_alive() and run.reason == "cancelled"
    assert run.ring[: run.state.produced].min(initial=0) >= 0


def test_cancelled_before_it_starts(endless):
    run = endless.launch(IDS, max_tokens=CONTEXT)
    run.state.cancel = 1
    assert run.run().reason == "cancelled" and run.tokens == []


def test_waiting_for_tokens(endless):
    run = endless.launch(IDS, max_tokens=300)
    thread, seen, wakes = start(run), 0, 0
    while not run.state.finished or run.state.produced > seen:
        assert run.wait(seen, 10)
        assert run.state.produced > seen or run.state.finished
        seen, wakes = run.state.produced, wakes + 1
    thread.join()
    assert seen == 300 and run.reason == "length" and wakes >= 1
    assert run.wait(300, 10), "a finished launch is not waited for"


def test_waiting_has_an_end(endless):
    run = endless.launch(IDS, max_tokens=1)
    begin = time.monotonic()
    assert not run.wait(0, 0.05)
    assert 0.04 < time.monotonic() - begin < 1


def test_waiting_costs_no_core(endless):
    run = endless.launch(IDS, max_tokens=1)
    begin = time.thread_time()
    assert not run.wait(0, 0.5)
    assert time.thread_time() - begin < 0.1


def test_two_launches_at_once(endless):
    """One library, two engines: nothing is shared but code."""
    other = Kernel(endless.program)
    alone = endless.generate(IDS, 50).tokens
    runs = [endless.launch(IDS, max_tokens=50), other.launch(IDS[::-1], max_tokens=50)]
    threads = [start(run) for run in runs]
    for thread in threads:
        thread.join()
    assert runs[0].tokens == alone and runs[1].tokens == other.generate(IDS[::-1], 50).tokens


FAULTS = [("dropped_publish", "qkv_0"), ("wrong_slot", "qkv_0"), ("stuck", "qkv_0"), ("dropped_publish", "embed"), ("stuck", "m_0"), ("dropped_publish", "head")]


@pytest.mark.parametrize("kind, stage", FAULTS, ids=lambda value: value)
def test_a_fault_stalls_and_is_named(faulty, kind, stage):
    number = faulty.rendered.stages.index(stage)
    begin = time.monotonic()
    run = faulty.launch(IDS, max_tokens=5, spin_limit_s=0.2, fault=(kind, number, 1)).run()
    state = run.state
    assert run.reason == "stalled" and time.monotonic() - begin < 5
    assert (state.abort_worker, state.abort_peer) == (0, 1)
    assert (state.abort_iteration, state.abort_stage) > (0, number) and state.abort_stage < len(faulty.rendered.stages)
    assert state.abort_seen < state.abort_expected
    assert faulty.generate(IDS, 5).reason == "length", "the next launch is not affected"


def test_without_a_fault_a_fault_build_is_right(faulty):
    assert faulty.generate(IDS, 5).tokens == Kernel(faulty.program).generate(IDS, 5).tokens


def test_a_stalled_crew_can_be_cancelled(faulty):
    run = faulty.launch(IDS, max_tokens=5, fault=("stuck", 1, 0))
    thread = start(run)
    time.sleep(0.1)
    run.state.cancel = 1
    thread.join(5)
    assert not thread.is_alive() and run.reason == "cancelled"
