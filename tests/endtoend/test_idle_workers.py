"""More workers than a model has work for: those without any sample like the others."""

import pytest
from against_torch import assert_computes, compile_quickly, random_model

from kogc import compile_passes
from kogc.ir.passes.schedule import schedule
from kogc.ir.passes.schedule_splits import choose_splits

pytestmark = pytest.mark.compiler

CAPACITY, WORKERS = 12, 12
LLAMA = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    "intermediate_size": 8, "vocab_size": 11, "max_position_embeddings": 64,
}  # fmt: skip


def test_logits_and_tokens_agree_with_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_passes, "choose_splits", lambda program, workers: choose_splits(program, 1))  # else attention is for many
    module = random_model(LLAMA, CAPACITY)
    with compile_quickly(module, tmp_path, workers=WORKERS, dtype="fp32") as artifact, artifact.engine() as engine:
        manifest = artifact.manifest
        plan = schedule(artifact.program, manifest.workers, manifest.tile_rows)
        works = [instance for segment in plan.work for stage in segment for instance in stage]
        idle = [worker for worker in range(WORKERS) if not any(work[worker].runs for work in works)]
        assert manifest.workers == WORKERS and len(idle) > 2
        assert_computes(engine, module, CAPACITY, "fp32")
