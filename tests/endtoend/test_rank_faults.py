"""Faults between ranks are found by the waits of the rank that misses something, and name the rank that owes it."""

from __future__ import annotations

import time

import pytest
from against_torch import compile_quickly, generated, random_ids, random_model

from kogc.artifact import Artifact
from kogc.codegen.layout import stage_places
from kogc.errors import KernelStalled
from kogc.ir.passes.exchange import sync_plan
from kogc.ir.passes.schedule import schedule
from kogc.runtime.job import Fault

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

DROPPED_PUBLISH, STUCK, DROPPED_SEND = 1, 3, 4
STALL_S = 0.4
RANKS, WORKERS = 2, 2
CONFIG = {
    "model_type": "laneformer", "num_lanes": 2, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 64, "norm_eps": 1e-5, "rope_theta": 1e4,
    "broadcast_delay": 2, "use_early_comm": True, "use_attention_comm": True, "use_mlp_comm": True, "lm_head_type": "replicate",
    "pre_norm_lane_agg": False, "tie_word_embeddings": False, "replicated_rmsn_scale": True, "swa_layers": [], "sliding_window": 16,
}  # fmt: skip
PROMPT = random_ids(97, 6)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Artifact:
    return compile_quickly(random_model(CONFIG, 64), tmp_path_factory.mktemp("ranks"), tp=RANKS, workers=WORKERS)


@pytest.fixture(scope="module")
def expected(artifact) -> list[int]:
    with artifact.engine() as engine:
        return generated(engine, PROMPT, 6)


def stall(artifact: Artifact, fault: Fault, expected: list[int]) -> KernelStalled:
    """The error that ``fault`` ends with. Without it, the same engine works."""
    with artifact.engine(stall_timeout=STALL_S, fault=fault) as engine:
        began = time.monotonic()
        with pytest.raises(KernelStalled) as caught:
            generated(engine, PROMPT, 6)
        assert time.monotonic() - began < 20 * STALL_S
        engine._fault = None
        assert generated(engine, PROMPT, 6) == expected
    return caught.value


def sending_stages(artifact: Artifact) -> dict[int, set[int]]:
    """Stage number → workers, counted through all ranks, that send something to the other rank in some iteration."""
    plan = sync_plan(artifact.program, schedule(artifact.program, RANKS * WORKERS, artifact.manifest.tile_rows))
    numbers = {place: number for number, place in enumerate(stage_places(artifact.program))}
    found: dict[int, set[int]] = {}
    for (segment, _, place, _), instance in zip(artifact.program.instances(), plan.instances, strict=True):
        for publish in instance.publishes:
            senders = {w for w in set(publish.spans.worker.tolist()) if publish.sent_to >> (1 - plan.rank_of()[w]) & 1}
            found.setdefault(numbers[segment, place], set()).update(senders)
    return {number: workers for number, workers in found.items() if workers}


def test_a_dropped_send_is_missed_by_the_other_rank(artifact, expected):
    stages = sending_stages(artifact)
    assert len(stages) >= 4
    for turn, (number, workers) in enumerate(stages.items()):
        rank, worker = divmod(sorted(workers)[turn % len(workers)], WORKERS)
        error = stall(artifact, Fault(DROPPED_SEND, number, worker, rank), expected)
        assert (error.peer_rank, error.peer, error.rank) == (rank, worker, 1 - rank), f"{artifact.manifest.stages[number]}: {error}"
        assert f"for worker {worker} of rank {rank}" in str(error) and f"worker {error.worker} of rank {1 - rank} waited" in str(error)


@pytest.mark.parametrize("kind", [DROPPED_PUBLISH, STUCK], ids=["dropped publish", "stuck"])
def test_a_worker_that_owes_a_value_is_named_with_its_rank(artifact, expected, kind):
    for number in (1, len(artifact.manifest.stages) - 2):
        error = stall(artifact, Fault(kind, number, 1, 1), expected)
        assert (error.peer_rank, error.peer) == (1, 1), str(error)
