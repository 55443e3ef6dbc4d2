"""Real models with expected tokens, from the file to the text."""

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

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


@pytest.mark.parametrize("name", LLAMAS)
def test_trained_llamas_write_the_expected_stories(name, tmp_path):
    assert_tells_its_stories(name, tmp_path, "cpu", workers=2)


@pytest.mark.parametrize("name", LANEFORMERS)
def test_laneformers_compute_the_expected_logits(name, tmp_path):
    assert_computes_its_lanes(name, tmp_path, "cpu", workers=2)


def test_the_shipped_checkpoint(tmp_path):
    assert_shipped_checkpoint_writes_python(tmp_path, "cpu", workers=2)


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def smollm2_artifact(smollm2, tmp_path_factory, request):
    """Compiled from the GGUF file; half a gigabyte, so it does not stay."""
    path = tmp_path_factory.mktemp("smollm2") / "smollm2.kog"
    with kogc.compile(smollm2, target="cpu", output=path, dtype=request.param, workers=2, max_context=192) as artifact:
        yield artifact
    path.unlink()


@pytest.mark.smollm2
def test_smollm2_passes_its_gate_and_answers(smollm2_artifact):
    assert_smollm2_answers(smollm2_artifact, exact=smollm2_artifact.manifest.dtype == "fp32")
