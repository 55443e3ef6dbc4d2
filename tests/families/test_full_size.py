"""Configurations of full size trace and plan in a minute and 4 GB, without weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

pytestmark = [pytest.mark.full, pytest.mark.slow]

SECONDS, BYTES = 60, 4e9

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama_3_1_8b():
    return transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=131072, rope_parameters=_LLAMA3, bos_token_id=128000, eos_token_id=128001, dtype="bfloat16",
    )  # fmt: skip


def qwen3_8b():
    return transformers.Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, max_position_embeddings=40960, dtype="bfloat16",
    )  # fmt: skip


def gemma_3_4b():
    """The whole multimodal configuration, as it is released."""
    text = transformers.Gemma3TextConfig(
        vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, sliding_window=1024, max_position_embeddings=131072,
    )  # fmt: skip
    return transformers.Gemma3Config(text_config=text, vision_config=transformers.SiglipVisionConfig(), dtype="bfloat16")


def phi_3_mini():
    return transformers.Phi3Config(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        max_position_embeddings=4096, sliding_window=2047, dtype="bfloat16",
    )  # fmt: skip


def mistral_7b():
    return transformers.MistralConfig(
        vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, max_position_embeddings=32768, sliding_window=None, dtype="bfloat16",
    )  # fmt: skip


@pytest.mark.parametrize("make", [llama_3_1_8b, qwen3_8b, gemma_3_4b, phi_3_mini, mistral_7b], ids=lambda make: make.__name__)
def test_traced_and_planned_for_an_h200(make, tmp_path: Path):
    config = make()
    config.save_pretrained(tmp_path)
    program = Path(__file__).with_name("full_size.py")
    done = subprocess.run([sys.executable, program, tmp_path, "h200", "128"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    text = config.get_text_config()
    assert (facts["context"], facts["layers"]) == (text.max_position_embeddings, text.num_hidden_layers)
    assert facts["seconds"] <= SECONDS and facts["peak_bytes"] <= BYTES, facts
    print(facts)
