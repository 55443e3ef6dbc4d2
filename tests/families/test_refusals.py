"""Models that kogc does not compile: one line that names the op and the line of the model's code, and exit code 2."""

from pathlib import Path

import pytest
import torch
import transformers

from kogc.cli import main

DECODER = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))


def vit():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32}
    return transformers.ViTModel(transformers.ViTConfig(**sizes))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, **EXPERTS))


def gpt_oss():
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**DECODER, **EXPERTS, head_dim=8, pad_token_id=None))


def mamba():
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1))


CASES = {
    t5: ("t5 is an encoder-decoder",),
    vit: ("no causal language model of type vit",),
    mixtral: ("aten.softmax", "a router of experts", "modeling_mixtral.py:", "torch.nn.functional.softmax(router_logits"),
    gpt_oss: ("aten.cat", "a weight and attention scores", "modeling_gpt_oss.py:", "torch.cat([attn_weights, sinks]"),
    mamba: ("MambaForCausalLM does not run with a cache of keys and values",),
}


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_one_line_and_exit_code_2(make, tmp_path: Path, capfd):
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "model")
    capfd.readouterr()
    options = ["--max-context", "32"] if make is mamba else []
    with pytest.raises(SystemExit) as left:
        main(["compile", str(tmp_path / "model"), "-o", str(tmp_path / "x.kog"), *options])
    assert left.value.code == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.strip() and not line.rstrip().endswith("…")]
    assert len(lines) == 1, lines
    for words in CASES[make]:
        assert words in lines[0]
    assert not (tmp_path / "x.kog").exists()


def test_a_frequency_that_grows_with_the_text_names_the_line_that_reads_the_position(tmp_path: Path, capfd):
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, rope_parameters=scaling)).save_pretrained(tmp_path / "model")
    capfd.readouterr()
    with pytest.raises(SystemExit):
        main(["compile", str(tmp_path / "model"), "-o", str(tmp_path / "x.kog")])
    assert "modeling_rope_utils.py:" in (error := capfd.readouterr().err) and "if seq_len > max_seq_len_cached" in error
