"""ONNX steps whose caches grow: compiled for a fixed context, they compute what onnxruntime computes with the file."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from against_torch import assert_close, compile_quickly, random_ids
from growing_steps import by_dynamo, by_tracing, onnxruntime_logits
from onnx import TensorProto, helper
from random_model import random_model as random_transformer
from shapes import SHAPES

from kogc.frontend.errors import FrontendError
from kogc.frontend.load import load_model
from kogc.frontend.trace import trace
from kogc.ir.interpret import run_sequence
from kogc.ir.passes.recognize import recognize
from kogc.verify import verify_artifact

CONTEXT = 24


def model_of(family: str):
    return random_transformer(next(shape for shape in SHAPES if shape.family == family))


@pytest.mark.compiler
@pytest.mark.parametrize(("export", "family"), [(by_dynamo, "llama"), (by_tracing, "gpt2")])
def test_what_exporters_write_compiles(export, family, tmp_path):
    path = export(model_of(family), tmp_path / "decoder_model.onnx")
    artifact = compile_quickly(path, tmp_path, dtype="fp32", max_context=CONTEXT)
    assert artifact.manifest.context == CONTEXT
    ids = random_ids(96, CONTEXT)
    with artifact.engine() as engine:
        assert_close(engine.logits(ids), onnxruntime_logits(path, ids), "fp32")


_LATER = [
    (by_dynamo, "gpt2", True), (by_tracing, "mistral", True), (by_dynamo, "mistral", False), (by_tracing, "qwen3", True),
    (by_tracing, "gpt_neox", True), (by_dynamo, "gemma2", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("export", "family", "positions"),
    [(by_tracing, "llama", True), (by_tracing, "gpt2", False), *(pytest.param(*case, marks=pytest.mark.full) for case in _LATER)],
)
def test_what_exporters_write_is_recognised(export, family, positions, tmp_path):
    """Also where the position is no input and follows from the caches' length."""
    model = model_of(family)
    path = export(model, tmp_path / "decoder_model.onnx", positions)
    assert ("position_ids" in {one.name for one in onnx.load(path).graph.input}) == positions
    loaded = load_model(path, max_context=CONTEXT)
    ids = random_ids(model.config.vocab_size, 20)
    found = run_sequence(recognize(trace(loaded.module)), ids, loaded.weights, step_tokens=4)
    assert_close(found.astype(np.float32), onnxruntime_logits(path, ids), "fp32")


def test_a_file_in_fp16(tmp_path):
    model = model_of("llama").half()
    loaded = load_model(by_dynamo(model, tmp_path / "decoder_model.onnx"), max_context=CONTEXT)
    assert loaded.dtype == "fp16"
    ids = random_ids(96, 20)
    found = run_sequence(recognize(trace(loaded.module)), ids, loaded.weights, step_tokens=4)
    with torch.no_grad():
        want = model.float()(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    assert_close(found.astype(np.float32), want, "fp16")


# ── what is refused ──


def step(path: Path, nodes, tokens="tokens", after="after") -> Path:
    """``nodes`` behind x = table[token] [1, T, 8]; the cache [1, P, 8] becomes ``after``, and the logits are called that."""
    inputs = [helper.make_tensor_value_info("token", TensorProto.INT64, [1, tokens])]
    inputs.append(helper.make_tensor_value_info("cache", TensorProto.FLOAT, [1, "past", 8]))
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "a", "b"]) for name in ("logits", after)]
    numbers = {"one": [1], "minus_two": [-2], "end": [9999]}
    tensors = [helper.make_tensor(name, TensorProto.INT64, [1], value) for name, value in numbers.items()]
    tensors.append(helper.make_tensor("table", TensorProto.FLOAT, [9, 8], np.ones((9, 8), np.float32).tobytes(), raw=True))
    graph = helper.make_graph([helper.make_node("Gather", ["table", "token"], ["x"]), *nodes], "step", inputs, outputs, tensors)
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


APPEND = helper.make_node("Concat", ["cache", "x"], ["after"], axis=1)
LOGITS = helper.make_node("Identity", ["x"], ["logits"])
REFUSED = {
    "reads a past cache before": helper.make_node("Mul", ["cache", "cache"], ["y"], name="odd"),
    "goes over all tokens so far; only attention may": helper.make_node("ReduceSum", ["after", "one"], ["y"], name="odd"),
    "takes some of the tokens so far": helper.make_node("Slice", ["after", "minus_two", "end", "one"], ["y"], name="odd"),
    "makes a size that is neither fixed nor the number of tokens so far": helper.make_node("Concat", ["after", "after"], ["y"], name="odd", axis=1),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_form_of_fixed_length_names_the_node(words, tmp_path):
    path = step(tmp_path / "x.onnx", [APPEND, LOGITS, REFUSED[words]])
    with pytest.raises(FrontendError, match=rf"x.onnx: \w+ \(odd\) {words}") as caught:
        load_model(path, max_context=CONTEXT)
    assert "\n" not in str(caught.value)


def test_an_unknown_op_is_named(tmp_path):
    path = step(tmp_path / "x.onnx", [APPEND, helper.make_node("Hardmax", ["x"], ["logits"], name="odd")])
    with pytest.raises(FrontendError, match=r"no rule for ONNX op Hardmax \(odd\)"):
        load_model(path, max_context=CONTEXT)


def test_a_cache_that_does_not_come_back(tmp_path):
    path = step(tmp_path / "x.onnx", [APPEND, LOGITS, helper.make_node("Mul", ["after", "after"], ["other"])], after="other")
    with pytest.raises(FrontendError, match="cache cache does not come back with one token more"):
        load_model(path, max_context=CONTEXT)


def test_the_context_must_be_chosen_and_large_enough(tmp_path):
    path = step(tmp_path / "x.onnx", [APPEND, LOGITS])
    with pytest.raises(FrontendError, match="how many positions to compile for; choose with --max-context"):
        load_model(path)
    with pytest.raises(FrontendError, match="a context of 3 was asked for, at least 4 are needed"):
        load_model(path, max_context=3)


def test_one_token_alone_is_refused(tmp_path):
    path = step(tmp_path / "x.onnx", [APPEND, LOGITS], tokens=1)
    with pytest.raises(FrontendError, match="takes one token; export it for any number of them"):
        load_model(path, max_context=CONTEXT)


@pytest.mark.compiler
def test_an_artifact_is_verified_against_its_file(tmp_path):
    """The file does not say for how many positions it was compiled: the artifact does."""
    path = by_tracing(model_of("llama"), tmp_path / "decoder_model.onnx")
    assert verify_artifact(compile_quickly(path, tmp_path, dtype="fp32", max_context=CONTEXT), path).passed
