"""Faults injected into a running kernel are found by the waits, and the same faults in a plan are refused beforehand."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from against_torch import generated, random_ids, random_model

import kogc
from kogc.errors import KernelStalled
from kogc.ir.passes.exchange import SyncPlan, sync_plan
from kogc.ir.passes.prove import prove_plan
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.spans import PlanError, Spans
from kogc.runtime.job import Fault

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

DROPPED_PUBLISH, WRONG_SLOT, STUCK = 1, 2, 3
STALL_S = 0.4
WORKERS = 3
CONFIG = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip
PROMPT = random_ids(97, 6)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "llama.kog"
    return kogc.compile(random_model(CONFIG, 64), target="cpu", output=path, workers=WORKERS)


@pytest.fixture(scope="module")
def expected(artifact):
    with artifact.engine() as engine:
        return generated(engine, PROMPT, 8)


@pytest.fixture(scope="module")
def plan(artifact) -> SyncPlan:
    return sync_plan(artifact.program, schedule(artifact.program, WORKERS, artifact.manifest.tile_rows))


@pytest.fixture(scope="module")
def crossings(artifact, plan) -> dict[int, dict[int, set[str]]]:
    """Stage number → worker → the stages in which another worker awaits what this one publishes there."""
    found: dict[int, dict[int, set[str]]] = {}
    for publisher in plan.instances:
        for publish in publisher.publishes:
            for reader in plan.instances:
                for wait in (w for w in reader.waits if (w.buffer, w.write) == (publish.buffer, publish.write)):
                    for worker in set(publish.spans.worker.tolist()) & awaited_by_others(wait.producers):
                        number = artifact.manifest.stages.index(publisher.name)
                        found.setdefault(number, {}).setdefault(worker, set()).add(reader.name)
    return found


def awaited_by_others(producers: np.ndarray) -> set[int]:
    readers, made_by = np.nonzero(producers)
    return set(made_by[readers != made_by].tolist())


def stall(artifact, fault: Fault) -> KernelStalled:
    """The error a generation with ``fault`` ends with. The engine survives: without the fault, it works."""
    with artifact.engine(stall_timeout=STALL_S, fault=fault) as engine:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(KernelStalled) as caught:
                generated(engine, PROMPT, 8)
            # Far from what a wait without a limit would take; the limit itself counts only time with a processor.
            assert time.monotonic() - began < 20 * STALL_S
        engine._fault = None
        caught.value.recovered = generated(engine, PROMPT, 8)
    return caught.value


def test_this_model_crosses_workers_everywhere(artifact, crossings):
    stages = artifact.manifest.stages
    assert set(stages) - {stages[number] for number in crossings} == {"sample"}
    assert all(len(workers) == WORKERS for number, workers in crossings.items() if "attn" not in stages[number])


@pytest.mark.parametrize("kind", [DROPPED_PUBLISH, WRONG_SLOT], ids=["dropped publish", "wrong slot"])
def test_what_a_worker_does_not_publish_is_missed(artifact, crossings, expected, kind):
    for number, workers in crossings.items():
        worker = sorted(workers)[number % len(workers)]
        error = stall(artifact, Fault(kind, number, worker))
        assert (error.peer, error.stage in workers[worker]) == (worker, True), f"{artifact.manifest.stages[number]}: {error}"
        assert error.seen < error.expected
        assert error.stage in str(error) and f"worker {worker}" in str(error)
        assert error.recovered == expected


def test_a_worker_that_is_stuck_is_named(artifact, expected):
    for number, name in enumerate(artifact.manifest.stages[:-1]):
        worker = number % WORKERS
        error = stall(artifact, Fault(STUCK, number, worker))
        assert error.peer == worker, f"stuck in {name}: {error}"
        assert error.recovered == expected


# ── the same faults in the plan ──


def damaged(plan: SyncPlan, number: int, index: int, **changes) -> SyncPlan:
    instance = plan.instances[number]
    publishes = list(instance.publishes)
    publishes[index] = replace(publishes[index], **changes)
    instances = list(plan.instances)
    instances[number] = replace(instance, publishes=tuple(publishes))
    return replace(plan, instances=tuple(instances))


def without(spans: Spans, worker: int) -> Spans:
    keep = spans.worker != worker
    return Spans(spans.worker[keep], spans.low[keep], spans.high[keep])


def crossing_publishes(artifact, plan, crossings):
    """(instance number, publish index, publish, stage number) of everything another worker awaits."""
    for number, instance in enumerate(plan.instances):
        stage = artifact.manifest.stages.index(instance.name)
        for index, publish in enumerate(instance.publishes):
            if stage in crossings:
                yield number, index, publish, stage


def test_the_plan_as_it_is_holds(plan):
    assert prove_plan(plan).reads > 0


def test_a_dropped_publish_is_refused_by_the_checker(artifact, plan, crossings):
    for number, index, publish, stage in crossing_publishes(artifact, plan, crossings):
        for worker in crossings[stage]:
            if worker in publish.spans.worker:
                with pytest.raises(PlanError, match=f"stage .*{publish.buffer}"):
                    prove_plan(damaged(plan, number, index, spans=without(publish.spans, worker)))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_slot_is_refused_by_the_checker(artifact, plan, crossings, change):
    for number, index, publish, _ in crossing_publishes(artifact, plan, crossings):
        with pytest.raises(PlanError, match="stage "):
            prove_plan(damaged(plan, number, index, write=publish.write + change))
