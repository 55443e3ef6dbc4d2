"""Real models on the GPU say what they say on the cpu."""

from __future__ import annotations

import pytest
from real_models import (
    LANEFORMERS,
    LLAMAS,
    assert_computes_its_lanes,
    assert_shipped_checkpoint_writes_python,
    assert_smollm2_answers,
    assert_tells_its_stories,
)

import kogc

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]


@pytest.mark.parametrize("name", LLAMAS)
def test_trained_llamas_write_the_expected_stories(name, tmp_path):
    assert_tells_its_stories(name, tmp_path, "h200")


@pytest.mark.parametrize("name", LANEFORMERS)
def test_laneformers_compute_the_expected_logits(name, tmp_path):
    assert_computes_its_lanes(name, tmp_path, "h200")


def test_the_shipped_checkpoint(tmp_path):
    assert_shipped_checkpoint_writes_python(tmp_path, "h200")


@pytest.mark.smollm2
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_smollm2_passes_its_gate_and_answers(smollm2, dtype, tmp_path):
    path = tmp_path / "smollm2.kog"
    with kogc.compile(smollm2, target="h200", output=path, dtype=dtype, max_context=192) as artifact:
        assert_smollm2_answers(artifact, exact=False)
    path.unlink()
