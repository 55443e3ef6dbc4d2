"""`kogc export --onnx`: onnxruntime computes what the model computes, from artifacts and from models."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from against_torch import LIMITS, random_ids, random_model, relative_rmse, torch_logits
from random_model import random_model as random_transformer
from shapes import SHAPES

import kogc
from kogc.cli import main
from kogc.errors import BadInput, EnvironmentFailure, OutputFailure
from kogc.export import export_onnx
from kogc.models.presets import PRESETS

CONTEXT = 24


def run(path: Path, ids: list[int], step: int = 3) -> np.ndarray:
    """Logits [T, V] of the file, ``step`` tokens at a time, caches handed on."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    caches = {one.name: np.zeros(one.shape, np.float32) for one in session.get_inputs() if one.name not in ("token", "position")}
    outputs = [one.name for one in session.get_outputs()]
    assert sorted(outputs[1:]) == sorted(f"{name}.after" for name in caches)
    logits = []
    for start in range(0, len(ids), step):
        part = np.array(ids[start : start + step])
        results = session.run(None, {"token": part, "position": np.arange(start, start + len(part)), **caches})
        logits.append(results[0])
        caches = {name.removesuffix(".after"): value for name, value in zip(outputs[1:], results[1:], strict=True)}
    return np.concatenate(logits)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert relative_rmse(found, expected) <= LIMITS["fp32"] / 10


@pytest.mark.parametrize("preset", ["llama-tiny", "laneformer-tiny"])
def test_presets_with_random_weights(preset, tmp_path):
    config = {**PRESETS[preset], "vocab_size": 48, "num_hidden_layers": 4}
    module = random_model(config, CONTEXT)
    export_onnx(module, tmp_path / "x.onnx")
    onnx.checker.check_model(tmp_path / "x.onnx", full_check=True)
    ids = random_ids(48, 17)
    close(run(tmp_path / "x.onnx", ids), torch_logits(module, ids))


_LATER = [pytest.param(family, marks=pytest.mark.full) for family in ("olmo2", "gpt_neox", "starcoder2", "mistral", "granite")]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", *_LATER])
def test_families(family, tmp_path, monkeypatch):
    model = random_transformer(next(shape for shape in SHAPES if shape.family == family))
    model.save_pretrained(tmp_path / "model")
    export_onnx(tmp_path / "model", tmp_path / "x.onnx", max_context=CONTEXT)
    onnx.checker.check_model(tmp_path / "x.onnx", full_check=True)
    ids = random_ids(model.config.vocab_size, 17)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    close(run(tmp_path / "x.onnx", ids), want)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_an_artifact_with_its_own_rounded_weights(dtype, tmp_path):
    module = random_model({**PRESETS["llama-tiny"], "vocab_size": 128, "hidden_size": 64, "head_dim": 16}, CONTEXT, dtype)
    kogc.compile(module, output=tmp_path / "x.kog", dtype=dtype, gate=False)
    with pytest.raises(SystemExit) as left:
        main(["export", str(tmp_path / "x.kog"), "--onnx", str(tmp_path / "x.onnx")])
    assert left.value.code == 0
    stored = {tensor.data_type for tensor in onnx.load(tmp_path / "x.onnx", load_external_data=False).graph.initializer}
    assert {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}[dtype] in stored
    assert (tmp_path / "x.onnx.data").stat().st_size > (1 << 14) and (tmp_path / "x.onnx").stat().st_size < (1 << 18)
    ids = random_ids(128, 17)
    close(run(tmp_path / "x.onnx", ids), torch_logits(module, ids))


def test_standard_ops_stay_standard_and_the_rest_are_functions_with_bodies(tmp_path):
    export_onnx(random_model({**PRESETS["llama-tiny"], "num_hidden_layers": 3}, CONTEXT), tmp_path / "x.onnx")
    model = onnx.load(tmp_path / "x.onnx")
    kinds = {(node.domain, node.op_type) for node in model.graph.node}
    assert {("", "Gemm"), ("", "Add"), ("", "Gather"), ("kogc", "attention"), ("kogc", "rope"), ("kogc", "rms_norm")} <= kinds
    functions = {function.name: function for function in model.functions}
    assert {name for domain, name in kinds if domain == "kogc"} == functions.keys()
    assert all(node.domain == "" for function in functions.values() for node in function.node)
    assert len([name for name in functions if name.startswith("attention")]) == 1  # one for all layers


def test_what_cannot_be_exported(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="has no weights"):
        export_onnx("preset:llama-tiny", tmp_path / "x.onnx")
    module = random_model(PRESETS["llama-tiny"], CONTEXT)
    with pytest.raises(OutputFailure, match="cannot write .*absent"):
        export_onnx(module, tmp_path / "absent" / "x.onnx")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFailure, match="needs the onnx package"):
        export_onnx(module, tmp_path / "x.onnx")
