"""Real models with expected tokens, cut over two cpu ranks: nothing about them changes for who runs them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_torch import LIMITS, generated
from data import data_dir, golden
from llama2c import read_llama2c

import kogc
from kogc.demo import checkpoint_path
from kogc.verify import verify_artifact

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


def test_the_shipped_checkpoint(tmp_path):
    """In its own dtype: the gate with every stage probed, and word by word the text of one rank."""
    texts = []
    for tp in (1, 2):
        artifact = kogc.compile(checkpoint_path(), target="cpu", output=tmp_path / f"{tp}.kog", tp=tp, workers=1)
        with artifact.engine() as engine:
            texts.append("".join(token.text for token in engine.generate("class Counter:\n    def __init__(self", max_tokens=40)))
    assert texts[0] == texts[1] and "self." in texts[0]
    assert artifact.manifest.ranks == 2 and artifact.manifest.gate["passed"]
    result = verify_artifact(artifact)
    assert result.passed and [check.stage for check in result.stages] == list(artifact.manifest.stages[:-2])


def test_a_trained_llama_writes_the_expected_stories(tmp_path):
    config, state = read_llama2c(data_dir() / "stories260K.bin")
    torch.save({"config": config, "state_dict": state}, tmp_path / "model.pt")
    artifact = kogc.compile(tmp_path / "model.pt", target="cpu", output=tmp_path / "model.kog", dtype="fp32", tp=2, workers=1)
    assert artifact.manifest.ranks == 2 and artifact.manifest.gate["passed"]
    with artifact.engine() as engine:
        for case in golden("golden.json")["stories260K"]:
            assert generated(engine, case["ids"], len(case["out"])) == case["out"]


@pytest.mark.parametrize(
    ("name", "ranks"), [("lane4_delay2_window", 4), ("lane2_delay1_lanehead_lanenorms", 2), ("lane8_delay2_vocabparallel", 8)]
)
def test_laneformers_compute_the_expected_logits_with_a_lane_a_rank(name, ranks, tmp_path):
    expected = golden("laneformer_golden.json")[name]
    path = data_dir() / f"laneformer_{name}.pt"
    artifact = kogc.compile(path, target="cpu", output=tmp_path / "model.kog", dtype="fp32", tp=ranks, workers=1, max_context=40)
    with artifact.engine() as engine:
        logits = engine.logits(expected["ids"])
        for row, key in ((0, "logits_first"), (-1, "logits_last")):
            wanted = np.array(expected[key])
            assert np.sqrt(np.mean((logits[row] - wanted) ** 2) / np.mean(wanted**2)) < LIMITS["fp32"] / 10
        assert logits.argmax(-1).tolist() == expected["argmax"]
        assert generated(engine, expected["prompt"], len(expected["greedy"])) == expected["greedy"]
