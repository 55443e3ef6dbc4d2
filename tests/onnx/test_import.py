"""ONNX files in: what ``torch.onnx.export`` and kogc itself write is recognised and computes what the model computes."""

import os
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from against_torch import assert_close, compile_quickly, random_ids, random_model, torch_logits
from onnx import TensorProto, helper
from random_model import random_model as random_transformer
from shapes import SHAPES
from torch import nn

from kogc.export import export_onnx
from kogc.frontend.errors import FrontendError
from kogc.frontend.load import load_model
from kogc.frontend.trace import trace
from kogc.frontend.transformers_step import TransformersStep, cache_shapes
from kogc.ir.interpret import run_sequence
from kogc.ir.passes.recognize import UnrecognizedOp, recognize
from kogc.models.presets import PRESETS

CAPACITY, TOKENS = 24, 4


class CachesOut(nn.Module):
    """A Transformers model with its caches as arguments and results."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        self.names = [f"cache_{kind}_{layer}" for layer in range(count) for kind in ("keys", "values")]

    def forward(self, token, position, *caches):
        step = TransformersStep.__new__(TransformersStep)
        nn.Module.__init__(step)
        step._model, step._layers = (self.model,), len(self.names) // 2
        copies = [cache.clone() for cache in caches]
        for name, cache in zip(self.names, copies, strict=True):
            step.register_buffer(name, cache)
        return (step(token, position), *copies)


def torch_export(model: nn.Module, path: Path) -> Path:
    shapes = cache_shapes(model, CAPACITY, "the model")
    caches = [torch.zeros(shape) for pair in shapes for shape in pair]
    example = (torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS), *caches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(CachesOut(model, len(shapes)), example, dynamo=True, verbose=False).save(path)
    return path


_LATER = [pytest.param(family, marks=pytest.mark.full) for family in ("mistral", "gpt_neox", "qwen3", "phi3", "olmo2", "starcoder2", "smollm3", "granite", "stablelm")]


@pytest.mark.compiler
@pytest.mark.parametrize("family", ["gemma2", "gpt2", *_LATER])
def test_what_torch_exports_compiles(family, tmp_path):
    model = random_transformer(next(shape for shape in SHAPES if shape.family == family))
    artifact = compile_quickly(torch_export(model, tmp_path / "step.onnx"), tmp_path, dtype="fp32")
    assert artifact.manifest.context == CAPACITY
    ids = random_ids(model.config.vocab_size, CAPACITY)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    with artifact.engine() as engine:
        assert_close(engine.logits(ids), want, "fp32")


@pytest.mark.parametrize("preset", ["llama-tiny", "laneformer-tiny"])
def test_what_kogc_writes_it_reads(preset, tmp_path):
    """Functions are inlined, any number of tokens becomes four, and large tensors stay in their file."""
    config = {**PRESETS[preset], "vocab_size": 80, "num_hidden_layers": 3}
    module = random_model(config, CAPACITY)
    export_onnx(module, tmp_path / "x.onnx")
    model = load_model(tmp_path / "x.onnx")
    assert any(isinstance(model.weights.get(key), np.memmap) for key in model.weights.keys())
    graph = recognize(trace(model.module))
    ids = random_ids(80, 13)
    found = run_sequence(graph, ids, model.weights, step_tokens=TOKENS)
    np.testing.assert_allclose(found, torch_logits(module, ids), rtol=0, atol=1e-4)


def test_the_identity_goes_with_the_file_of_the_tensors_whatever_its_name(tmp_path):
    nodes = [LOOKED_UP, helper.make_node("Identity", ["x"], ["logits"]), KEPT]
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[9, 8], data_location=TensorProto.EXTERNAL)
    table.external_data.add(key="location", value="x.onnx_data")
    (tmp_path / "x.onnx_data").write_bytes(bytes(288))
    path = file(tmp_path / "x.onnx", nodes, tensors=[table])
    before = load_model(path).identity
    assert load_model(path).identity == before
    os.utime(tmp_path / "x.onnx_data", (1, 1))
    assert load_model(path).identity != before


# ── what is refused ──


def file(path: Path, nodes, outputs=("logits", "after"), cache_shape=(2, 8, 4), tensors=()) -> Path:
    """A step of ``nodes`` over token, position and one cache."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [4]) for name in ("token", "position")]
    inputs.append(helper.make_tensor_value_info("cache", TensorProto.FLOAT, cache_shape))
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"] * (2 if name == "logits" else 3)) for name in outputs]
    graph = helper.make_graph(nodes, "step", inputs, results, list(tensors))
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def floats(name: str, *shape: int) -> onnx.TensorProto:
    return helper.make_tensor(name, TensorProto.FLOAT, shape, np.ones(shape, np.float32).tobytes(), raw=True)


LOOKED_UP = helper.make_node("Gather", ["table", "token"], ["x"], name="look_up")
KEPT = helper.make_node("Identity", ["cache"], ["after"])


def test_an_unknown_op_is_named(tmp_path):
    nodes = [LOOKED_UP, helper.make_node("Hardmax", ["x"], ["logits"], name="odd"), KEPT]
    with pytest.raises(FrontendError, match=r"no rule for ONNX op Hardmax \(odd\)"):
        load_model(file(tmp_path / "x.onnx", nodes, tensors=[floats("table", 9, 8)]))


def test_what_is_not_recognised_names_the_node_of_the_file(tmp_path):
    nodes = [LOOKED_UP, helper.make_node("Softmax", ["x"], ["logits"], name="odd"), KEPT]
    path = file(tmp_path / "x.onnx", nodes, tensors=[floats("table", 9, 8)])
    written = [
        helper.make_node("Reshape", ["x", "shape"], ["heads"]), helper.make_node("Transpose", ["cache"], ["turned"], perm=[1, 0, 2]),
        helper.make_node("Unsqueeze", ["position", "axis"], ["where"]), helper.make_node("ScatterND", ["turned", "where", "heads"], ["new"]),
        helper.make_node("Transpose", ["new"], ["after"], perm=[1, 0, 2]),
    ]  # fmt: skip
    numbers = [helper.make_tensor("shape", TensorProto.INT64, [3], [4, 2, 4]), helper.make_tensor("axis", TensorProto.INT64, [1], [1])]
    path = file(tmp_path / "x.onnx", [*nodes[:2], *written], tensors=[floats("table", 9, 8), *numbers])
    with pytest.raises(UnrecognizedOp, match=r"aten.softmax .*\(at .*x.onnx:3: logits = Softmax\(x\)\)"):
        recognize(trace(load_model(path).module))


def test_shapes_that_are_computed_are_refused(tmp_path):
    nodes = [LOOKED_UP, helper.make_node("Reshape", ["x", "token"], ["logits"], name="shaped"), KEPT]
    path = file(tmp_path / "x.onnx", nodes, tensors=[floats("table", 9, 8)])
    with pytest.raises(FrontendError, match=r"Reshape \(shaped\): a shape is computed in the graph; export with fixed shapes"):
        trace(load_model(path).module)


def test_another_signature_is_refused(tmp_path):
    nodes = [LOOKED_UP, helper.make_node("Identity", ["x"], ["logits"])]
    with pytest.raises(FrontendError, match="takes token, position, cache and gives 1 results, expected int64 token"):
        load_model(file(tmp_path / "x.onnx", nodes, outputs=("logits",), tensors=[floats("table", 9, 8)]))


def test_damaged_files_are_one_line(tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"no protobuf at all")
    with pytest.raises(FrontendError, match="is no valid ONNX file") as caught:
        load_model(tmp_path / "x.onnx")
    assert "\n" not in str(caught.value)


HUGE = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[-1, 8], data_location=TensorProto.EXTERNAL)
HUGE.external_data.add(key="location", value="short.bin")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TensorProto(name="table", data_type=99, dims=[9, 8], raw_data=bytes(288)), "table"),
        (TensorProto(name="table", data_type=TensorProto.INT8, dims=[9, 8], raw_data=bytes(288)), "tensor table is damaged: cannot reshape"),
        (HUGE, "tensor table cannot be read from .*short.bin"),
    ],
    ids=["type", "bytes", "negative"],
)
def test_damaged_tensors_are_one_line(table, message, tmp_path):
    (tmp_path / "short.bin").write_bytes(bytes(8))
    nodes = [LOOKED_UP, helper.make_node("Identity", ["x"], ["logits"]), KEPT]
    with pytest.raises(FrontendError, match=message):
        load_model(file(tmp_path / "x.onnx", nodes, tensors=[table]))


@pytest.mark.parametrize("name", ["cache", "token", "position"])
def test_negative_shapes_are_refused(name, tmp_path):
    nodes = [LOOKED_UP, helper.make_node("Identity", ["x"], ["logits"]), KEPT]
    model = onnx.load(file(tmp_path / "x.onnx", nodes, tensors=[floats("table", 9, 8)]))
    next(one for one in model.graph.input if one.name == name).type.tensor_type.shape.dim[0].dim_value = -1
    onnx.save_model(model, tmp_path / "x.onnx")
    with pytest.raises(FrontendError, match=rf"input {name} has the shape \(-1\b"):
        load_model(tmp_path / "x.onnx")


@pytest.mark.parametrize(("location", "message"), [("../secret.bin", "secret.bin"), ("absent.bin", "absent.bin"), ("short.bin", "cannot be read")])
def test_tensors_outside_of_the_folder_or_missing(location, message, tmp_path):
    (tmp_path / "short.bin").write_bytes(bytes(8))
    (tmp_path.parent / "secret.bin").write_bytes(bytes(288))
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[9, 8], data_location=TensorProto.EXTERNAL)
    table.external_data.add(key="location", value=location)
    nodes = [LOOKED_UP, helper.make_node("Identity", ["x"], ["logits"]), KEPT]
    with pytest.raises(FrontendError, match=message):
        load_model(file(tmp_path / "x.onnx", nodes, tensors=[table]))
