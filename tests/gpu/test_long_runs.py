"""The whole of a long context, teacher-forced and generated, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from against_torch import assert_close, assert_equal_bits, assert_greedy, generated, random_ids, random_model, torch_logits

import kogc

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]

CONTEXT, VOCAB = 32768, 311
LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 640, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rope_theta": 500000.0,
}  # fmt: skip
LANES = {
    "model_type": "laneformer", "num_lanes": 4, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "intermediate_size": 160, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "broadcast_delay": 1,
    "use_early_comm": True, "lm_head_type": "replicate", "sliding_window": 1000, "swa_layers": [1], "rope_theta": 500000.0,
}  # fmt: skip
#: Between two of these an error cannot hide among those of all the other positions.
UNTIL = (64, 1024, 4096, 16384, CONTEXT - 64, CONTEXT)
#: The reference's attention takes so many positions at once, over the whole context each time.
STEP = 512
#: Over two texts that fill the context.
SOAKED, REPEATS = 50_000, 3


@pytest.fixture(scope="module", params=[(LLAMA, "fp16"), (LLAMA, "bf16"), (LLAMA, "fp32"), (LANES, "fp16")], ids=["llama-fp16", "llama-bf16", "llama-fp32", "lanes-fp16"])
def case(request, tmp_path_factory):
    """(module, dtype, engine). The module computes on the GPU, too, where its PyTorch can: attention over 32k positions is slow elsewhere."""
    config, dtype = request.param
    module = random_model(config, CONTEXT, dtype, seed=6)
    with kogc.compile(module, "h200", output=tmp_path_factory.mktemp("long") / "long.kog", dtype=dtype, gate=False).engine() as engine:
        yield module.to("cuda" if torch.cuda.is_available() else "cpu"), dtype, engine


def test_every_position_of_a_long_context_agrees_with_pytorch(case):
    module, dtype, engine = case
    ids = random_ids(VOCAB, CONTEXT, seed=8)
    found, expected = engine.logits(ids), torch_logits(module, ids, STEP)
    for first, last in zip((0, *UNTIL), UNTIL, strict=False):
        assert_close(found[first:last], expected[first:last], dtype)


def test_fifty_thousand_tokens_are_the_same_every_time(case):
    _, dtype, engine = case
    prompts = [random_ids(VOCAB, length, seed=length) for length in (5, 40)]
    texts = [generated(engine, prompt, CONTEXT) for prompt in prompts]
    assert sum(map(len, texts)) >= SOAKED
    for prompt, tokens in zip(prompts, texts, strict=True):
        text = prompt + tokens[:-1]
        logits = engine.logits(text)
        assert_greedy(tokens, logits[len(prompt) - 1 :], dtype)
        for _ in range(REPEATS - 1):
            assert generated(engine, prompt, CONTEXT) == tokens
            assert_equal_bits(engine.logits(text), logits)
