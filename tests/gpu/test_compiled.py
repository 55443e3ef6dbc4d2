"""Compiled models on the GPU against PyTorch and against the same model on the cpu."""

from __future__ import annotations

import random
import time

import pytest
from against_torch import assert_close, assert_equal_bits, assert_greedy, compile_quickly, generated, random_ids, random_model, torch_logits

import kogc
from kogc.errors import KernelStalled
from kogc.ir.passes.schedule import schedule
from kogc.runtime.job import Fault

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]

CONTEXT, VOCAB = 256, 311
LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 640, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
}  # fmt: skip
LANES = {
    "model_type": "laneformer", "num_lanes": 4, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "intermediate_size": 160, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "broadcast_delay": 2,
    "use_early_comm": True, "lm_head_type": "replicate", "sliding_window": 40, "swa_layers": [0, 2],
}  # fmt: skip
PROMPT = random_ids(VOCAB, 7)


@pytest.fixture(scope="module", params=[(LLAMA, "fp16"), (LLAMA, "bf16"), (LLAMA, "fp32"), (LANES, "fp16")], ids=["llama-fp16", "llama-bf16", "llama-fp32", "lanes-fp16"])
def case(request, tmp_path_factory):
    """(module, dtype, artifact for h200, artifact for cpu)."""
    config, dtype = request.param
    module, folder = random_model(config, CONTEXT, dtype, seed=3), tmp_path_factory.mktemp("gpu")
    gpu = kogc.compile(module, "h200", output=folder / "gpu.kog", dtype=dtype, gate=False)
    return module, dtype, gpu, compile_quickly(module, folder, dtype=dtype)


@pytest.fixture(scope="module")
def engine(case):
    with case[2].engine() as engine:
        yield engine


#: Units that are hard on the ring: of fewer rows than there are warps, many at a time; and so long that a team which passes over
#: one passes over most of what the ring holds.
HARD = {
    "short units": ({"hidden_size": 896, "intermediate_size": 640, "vocab_size": 40000}, "bf16"),
    "long units": ({"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}, "fp32"),
}


@pytest.mark.parametrize("shape", HARD)
def test_units_of_every_length_go_through_the_ring(shape, tmp_path):
    changes, dtype = HARD[shape]
    module = random_model(LLAMA | changes, CONTEXT, dtype, seed=4)
    ids = random_ids(VOCAB, 24, seed=2)
    with kogc.compile(module, "h200", output=tmp_path / "hard.kog", dtype=dtype, gate=False).engine() as engine:
        assert_close(engine.logits(ids), torch_logits(module, ids), dtype)
        assert len(generated(engine, PROMPT, 20)) == 20


def test_logits_equal_pytorchs(case, engine):
    module, dtype, *_ = case
    ids = random_ids(VOCAB, CONTEXT, seed=1)
    logits = engine.logits(ids)
    assert_close(logits, torch_logits(module, ids), dtype)
    for _ in range(3):
        assert_equal_bits(engine.logits(ids), logits)


def test_tokens_equal_the_cpus(case, engine):
    module, dtype, _, cpu = case
    with cpu.engine() as other:
        expected = generated(other, PROMPT, 100)
    found = generated(engine, PROMPT, 100)
    text = PROMPT + found
    assert_greedy(found, torch_logits(module, text[:-1])[len(PROMPT) - 1 :], dtype)
    if dtype == "bf16":
        return  # eight bits of a key or value part two texts at the first near tie, and both are right
    same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(found))
    assert same >= 20, f"the texts part after {same} tokens"


def test_generations_repeat(engine):
    first = generated(engine, PROMPT, CONTEXT)
    for _ in range(5):
        assert generated(engine, PROMPT, CONTEXT) == first


def test_cancelled_at_random_times_leaves_a_usable_engine(engine):
    expected, chance = generated(engine, PROMPT, 50), random.Random(5)
    for _ in range(30):
        generation = engine.generate(PROMPT, max_tokens=CONTEXT)
        time.sleep(chance.random() * 0.01)
        generation.close()
    assert generated(engine, PROMPT, 50) == expected


def test_a_session_continues_like_the_concatenated_text(engine):
    with engine.session() as session:
        text: list[int] = []
        for turn, length in enumerate((5, 1, 3)):
            prompt = random_ids(VOCAB, length, seed=10 + turn)
            fresh = generated(engine, text + prompt, 4)
            assert [token.id for token in engine.generate(prompt, max_tokens=4, session=session)] == fresh
            text += prompt + fresh


def test_two_engines_of_one_artifact(case, engine):
    expected = generated(engine, PROMPT, 30)
    with case[2].engine() as other:
        first, second = engine.generate(PROMPT, max_tokens=30), other.generate(PROMPT, max_tokens=30)
        assert [token.id for token in second] == [token.id for token in first] == expected


@pytest.mark.parametrize("kind", [1, 3], ids=["dropped publish", "stuck worker"])
def test_injected_faults_end_within_two_seconds(case, engine, kind):
    artifact, expected = case[2], generated(engine, PROMPT, 10)
    with artifact.engine(fault=Fault(kind, 1, _busy_worker(artifact)), stall_timeout=0.5) as broken:
        began = time.monotonic()
        with pytest.raises(KernelStalled) as caught:
            generated(broken, PROMPT, 10)
        assert time.monotonic() - began < 2 and caught.value.stage in artifact.manifest.stages
    assert generated(engine, PROMPT, 10) == expected


def _busy_worker(artifact) -> int:
    """A worker that publishes something in the stage behind the embedding: small models leave many without work."""
    manifest = artifact.manifest
    dealt = schedule(artifact.program, manifest.workers, manifest.tile_rows).at
    return next(worker for worker in range(manifest.workers) if dealt(1, 0, 0, worker).runs)


def test_the_gate_passes(case, tmp_path):
    module, dtype, *_ = case
    artifact = kogc.compile(module, "h200", output=tmp_path / "gated.kog", dtype=dtype)
    assert artifact.manifest.gate["passed"]
