"""What the families brought that Llama has not compiles for an H200, too: norms before RoPE, learned positions, fused QKV head by head."""

from pathlib import Path

import pytest
from random_model import random_model
from shapes import CONTEXT, SHAPES, Shape

import kogc
from kogc.frontend import huggingface

FAMILIES = ("qwen3", "gemma3", "olmo2", "gpt2", "gpt_neox", "stablelm")


@pytest.mark.full
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.family in FAMILIES], ids=str)
def test_it_compiles_without_a_gpu_and_spills_nothing(shape: Shape, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(huggingface, "MODEL_TYPES", {})
    random_model(shape).save_pretrained(tmp_path / "model")
    artifact = kogc.compile(tmp_path / "model", "h200", output=tmp_path / "x.kog", dtype="fp16", max_context=CONTEXT, workers=8, gate=False)
    resources = artifact.manifest.meta["resources"]
    assert resources["spill_stores"] == resources["spill_loads"] == 0
    kinds = [stage.kind for _, _, _, stage in artifact.program.instances()]
    assert ("rows" in kinds) == (shape.family in ("qwen3", "gemma3", "olmo2") or "every head" in shape.what)
