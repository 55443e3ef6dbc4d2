"""Lanes that never exchange, which only the sampler holds together, and lanes that are always equal."""

import pytest
from against_torch import assert_close, compile_quickly, random_ids, random_model, torch_logits

CONFIG = {
    "model_type": "laneformer", "num_lanes": 4, "hidden_size": 13, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 20, "vocab_size": 53, "max_position_embeddings": 64,
    "broadcast_delay": 3, "use_early_comm": False, "use_comm": True, "lm_head_type": "replicate",
}  # fmt: skip


@pytest.mark.compiler
@pytest.mark.parametrize("layers", [1, 2])
def test_lanes_that_never_come_apart(tmp_path, layers):
    """Every sum is complete at once, so that all lanes are one stream; the head still reads them side by side."""
    changes = {"num_hidden_layers": layers, "use_early_comm": True, "lm_head_type": "lane"}
    module = random_model(CONFIG | changes, 48)
    ids = random_ids(53, 20)
    with compile_quickly(module, tmp_path, workers=2) as artifact, artifact.engine() as engine:
        assert_close(engine.logits(ids), torch_logits(module, ids), "fp32")


@pytest.mark.compiler
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_long_prompts_agree_with_torch(tmp_path, workers):
    module = random_model(CONFIG, 48)
    ids = random_ids(53, 48)
    with compile_quickly(module, tmp_path, workers=workers) as artifact, artifact.engine() as engine:
        assert_close(engine.logits(ids), torch_logits(module, ids), "fp32")
        for _ in range(20):  # a race would show in one of many prompts
            (token,) = engine.generate(ids[:41], max_tokens=1)
            assert token.id == torch_logits(module, ids[:41])[-1].argmax()
