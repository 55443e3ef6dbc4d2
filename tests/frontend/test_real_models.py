"""File → loader → trace → interpreter, against expected logits that were made independently."""

import numpy as np
import pytest
import torch
from data import data_dir, golden
from llama2c import read_llama2c
from tokenizers import Tokenizer

from kogc.frontend.load import load_model
from kogc.frontend.trace import trace
from kogc.ir.interpret import run_sequence
from kogc.ir.verify import verify


@pytest.mark.parametrize("name", ["lane4_delay2_window", "lane2_delay1_lanehead_lanenorms", "lane8_delay2_vocabparallel"])
def test_laneformer_checkpoints(name):
    expected = golden("laneformer_golden.json")[name]
    model = load_model(data_dir() / f"laneformer_{name}.pt", max_context=32)
    assert model.dtype == "fp16"
    logits = run_sequence(verify(trace(model.module, tokens=5)), expected["ids"], model.weights)
    # The golden logits have six decimals; the rope tables of the traced fp32 module are rounded to fp32.
    for row, key in ((0, "logits_first"), (-1, "logits_last")):
        np.testing.assert_allclose(logits[row], expected[key], rtol=0, atol=2e-6)
    assert logits.argmax(-1).tolist() == expected["argmax"]


@pytest.mark.parametrize("name", ["stories260K", "babyllama_tok105"])
def test_llama_checkpoints(name, tmp_path):
    config, state = read_llama2c(data_dir() / f"{name}.bin")
    torch.save({"config": config, "state_dict": state}, tmp_path / "model.pt")
    model = load_model(tmp_path / "model.pt", max_context=64)
    expected = golden("golden.json")[name][0]
    prompt, out = expected["ids"], expected["out"]
    logits = run_sequence(verify(trace(model.module)), [*prompt, *out[:8]], model.weights)[len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == out[:9]
    for token, value in expected["first_top8"]:
        assert abs(logits[0, token] - value) < 1e-3


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_gguf(smollm2):
    expected = golden("golden.json")["smollm2-135m-instruct-q4_1"]
    model = load_model(smollm2, max_context=16)
    assert (model.context, model.eos_ids, model.bos_id, model.dtype) == (16, (2,), 1, "fp32")
    assert "<|im_start|>" in model.chat_template
    tokenizer = Tokenizer.from_str(model.tokenizer_json)
    for case in expected:
        assert tokenizer.encode(case["prompt"]).ids == case["ids"]
        assert tokenizer.decode(case["out"], skip_special_tokens=False) == case["text"]
    ids = expected[0]["ids"]
    logits = run_sequence(trace(model.module, tokens=len(ids)), ids, model.weights)
    for token, value in expected[0]["first_top8"]:
        assert abs(logits[-1, token] - value) < 1e-3
