"""Every model family of Transformers that docs/models.md lists: the kernel computes what Transformers computes."""

from pathlib import Path

import pytest
import torch
from against_torch import assert_close, assert_greedy, compile_quickly, generated, random_ids
from random_model import random_model
from shapes import CONTEXT, MORE, REFUSED, SHAPES, Shape

import kogc
from kogc.frontend import huggingface
from kogc.frontend.trace import trace
from kogc.ir.passes.recognize import UnrecognizedOp, recognize
from kogc.verify import verify_artifact

pytestmark = pytest.mark.compiler

POSITIONS = 32


@pytest.fixture(autouse=True)
def _no_modules_of_our_own(monkeypatch):
    """All families through the code of Transformers, Llama too."""
    monkeypatch.setattr(huggingface, "MODEL_TYPES", {})


def logits_of(model: torch.nn.Module, ids: list[int]):
    """The model's own logits [T, V] of all positions at once, without any cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.full) for shape in MORE)], ids=str)
def test_the_kernel_computes_what_transformers_computes(shape: Shape, tmp_path: Path):
    model = random_model(shape)
    model.save_pretrained(tmp_path / "model")
    artifact = compile_quickly(tmp_path / "model", tmp_path, dtype="fp32", max_context=CONTEXT)
    ids = random_ids(model.config.vocab_size, POSITIONS)
    with artifact.engine() as engine:
        assert_close(engine.logits(ids), logits_of(model, ids), "fp32")
        tokens = generated(engine, ids[:6], 24)
        assert_greedy(tokens, logits_of(model, ids[:6] + tokens[:-1])[5:], "fp32")


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2"])
def test_the_gate_and_the_probes_hold_a_kernel_against_transformers(family: str, tmp_path: Path):
    """With the rounding of fp16, and stage by stage: the reference runs the model's own code with its caches."""
    random_model(next(shape for shape in SHAPES if shape.family == family)).save_pretrained(tmp_path / "model")
    artifact = kogc.compile(tmp_path / "model", output=tmp_path / "x.kog", dtype="fp16", max_context=CONTEXT)
    assert artifact.manifest.gate["passed"] and artifact.manifest.gate["reference"] == "PyTorch in fp32"
    found = verify_artifact(artifact, tmp_path / "model")
    assert found.passed and {check.stage for check in found.stages} >= {stage.name for _, _, _, stage in artifact.program.instances() if stage.kind == "rows"}


@pytest.mark.parametrize("shape", REFUSED, ids=str)
def test_what_is_not_recognised_names_op_and_line(shape: Shape, tmp_path: Path):
    random_model(shape).save_pretrained(tmp_path)
    loaded = huggingface.load_folder(tmp_path, max_context=CONTEXT)
    with pytest.raises(UnrecognizedOp) as caught:
        recognize(trace(loaded.module))
    op, words = shape.refused
    message = str(caught.value)
    assert f"cannot recognise {op} " in message and words in message
    assert "\n" not in message and f"modeling_{shape.family}.py:" in message
