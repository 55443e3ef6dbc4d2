"""Real models and what they are expected to say, on any target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from against_torch import LIMITS, generated
from data import data_dir, golden
from llama2c import read_llama2c

import kogc
import kogc.models
from kogc.artifact import Artifact
from kogc.verify import verify_artifact

LLAMAS = ("stories260K", "babyllama_tok105")
LANEFORMERS = ("lane4_delay2_window", "lane2_delay1_lanehead_lanenorms", "lane8_delay2_vocabparallel")
PYLANE = Path(kogc.models.__file__).parent / "checkpoints" / "pylane.pt"


def assert_tells_its_stories(name: str, folder: Path, target: str, **options: Any) -> None:
    """One of ``LLAMAS`` in fp32 passes the gate and continues its prompts with the expected tokens."""
    config, state = read_llama2c(data_dir() / f"{name}.bin")
    torch.save({"config": config, "state_dict": state}, folder / "model.pt")
    artifact = kogc.compile(folder / "model.pt", target=target, output=folder / "model.kog", dtype="fp32", **options)
    assert artifact.manifest.gate["passed"]
    cases = golden("golden.json")[name]
    with artifact.engine() as engine:
        for case in cases:
            assert generated(engine, case["ids"], len(case["out"])) == case["out"]
            first = engine.logits(case["ids"])[-1]
            for token, value in case["first_top8"]:
                assert abs(first[token] - value) < 1e-3
    assert len(cases) == 3


def assert_computes_its_lanes(name: str, folder: Path, target: str, **options: Any) -> None:
    """One of ``LANEFORMERS`` in fp32. Expected values come from an independent implementation in fp64."""
    expected = golden("laneformer_golden.json")[name]
    path = data_dir() / f"laneformer_{name}.pt"
    artifact = kogc.compile(path, target=target, output=folder / "model.kog", dtype="fp32", max_context=40, **options)
    with artifact.engine() as engine:
        logits = engine.logits(expected["ids"])
        for row, key in ((0, "logits_first"), (-1, "logits_last")):
            wanted = np.array(expected[key])
            error = np.sqrt(np.mean((logits[row] - wanted) ** 2) / np.mean(wanted**2))
            assert error < LIMITS["fp32"] / 10
        assert logits.argmax(-1).tolist() == expected["argmax"]
        assert generated(engine, expected["prompt"], len(expected["greedy"])) == expected["greedy"]


def assert_shipped_checkpoint_writes_python(folder: Path, target: str, **options: Any) -> None:
    """In its own dtype: the gate with every stage probed, and text that looks like Python."""
    artifact = kogc.compile(PYLANE, target=target, output=folder / "pylane.kog", **options)
    assert artifact.manifest.dtype == "fp16" and artifact.manifest.gate["passed"]
    result = verify_artifact(artifact, PYLANE)
    assert result.passed and result.positions >= 32 and result.runs == 3
    # The last two make the logits, which the gate compares anyway, and the token.
    assert [check.stage for check in result.stages] == list(artifact.manifest.stages[:-2])
    with artifact.engine() as engine:
        generation = engine.generate("class Counter:\n    def __init__(self", max_tokens=60)
        text = "".join(token.text for token in generation)
    assert "self." in text and ":\n" in text and generation.finish_reason in ("length", "stop")


def assert_smollm2_answers(artifact: Artifact, exact: bool) -> None:
    """Every expected token follows the expected text before it; free-running, too, up to the first doubtful one, or
    with ``exact`` to the end."""
    dtype, gate = artifact.manifest.dtype, artifact.manifest.gate
    assert gate["passed"] and gate["positions"] >= 32 and gate["argmax_checked"] > 0
    with artifact.engine() as engine:
        for case in golden("golden.json")["smollm2-135m-instruct-q4_1"]:
            logits = engine.logits(case["ids"] + case["out"][:-1])[len(case["ids"]) - 1 :]
            # Golden logits are those of the unrounded weights: rounding them may move each by the limit of its dtype.
            doubtful = 6 * LIMITS[dtype] * np.sqrt(np.mean(logits.astype(np.float64) ** 2, axis=-1))
            clear = np.array(case["margins"]) > doubtful
            assert (logits.argmax(-1) == case["out"])[clear].all() and clear.sum() > len(clear) / 2
            until = len(clear) if clear.all() else int(np.argmin(clear))
            generation = engine.generate(case["prompt"], max_tokens=len(case["out"]))
            text = "".join(token.text for token in generation)
            assert generation.prompt_ids == case["ids"]
            assert generation.ids[:until] == case["out"][:until]
            if until == len(clear):
                assert generation.ids == case["out"] and text == case["text"].removesuffix("<|im_end|>")
            if exact:
                assert generation.ids == case["out"]
