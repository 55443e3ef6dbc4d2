"""The gate's verdicts, and that a wrong stage is found and named."""

import dataclasses

import numpy as np
import pytest
from tiny_model import save_tiny

from kogc.artifact import Artifact, load
from kogc.compiler import compile_model
from kogc.gate_stages import check_stages
from kogc.verify import judge, verify_artifact, with_stages


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(32, 50)).astype(np.float32)


def test_equal_logits_pass():
    found = judge([logits()] * 3, logits(), "fp32", "a reference")
    assert found.passed and found.problem is None and found.argmax_wrong == 0


def test_runs_that_differ_in_one_bit_fail():
    other = logits()
    other.view(np.uint32)[3, 4] ^= 1
    found = judge([logits(), other, logits()], logits(), "fp32", "a reference")
    assert not found.passed and "different logits" in found.problem


def test_logits_that_are_off_fail_with_figure_and_limit():
    found = judge([logits() * 1.01] * 3, logits(), "fp32", "a reference")
    assert not found.passed and "1.00e-02" in found.problem and "1e-04" in found.problem


def test_another_next_token_fails_even_within_the_rmse():
    wanted = np.zeros((32, 20_000), np.float32)
    wanted[:] = logits(1)[0, 0] * np.sign(np.random.default_rng(2).normal(size=wanted.shape))
    wanted[:, 7] = 4 * np.abs(wanted).max()
    seen = wanted.copy()
    seen[5, 7] = 0
    found = judge([seen] * 3, wanted, "bf16", "a reference")
    assert found.rel_rmse < found.limit and "position 5" in found.problem


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("gate")
    return compile_model(save_tiny(folder / "tiny.pt"), output=folder / "tiny.kog", workers=2, gate=False).artifact


@pytest.mark.compiler
def test_every_stage_of_a_right_kernel_is_within_the_limits(tiny):
    found = verify_artifact(tiny)
    assert found.passed and found.first_bad_stage is None
    assert [check.stage for check in found.stages][0] == tiny.program.segments[0].stages[0].name


@pytest.mark.compiler
def test_the_first_stage_that_is_off_is_named(tiny):
    """The kernel is right and the program it is held against has one wrong number: the same as the other way round."""
    changed = load(tiny.path)
    changed.__dict__["program"], name = with_other_eps(tiny.program)
    checks = check_stages(changed, list(range(1, 10)), 1e-4)
    verdict = with_stages(judge([logits()] * 3, logits(), "fp32", "a reference"), checks)
    assert verdict.first_bad_stage == name and name in verdict.problem and not verdict.passed


def with_other_eps(program):
    """The program with another eps in the last norm before the head (whose logits the gate itself judges), and that stage's name."""
    segments = list(program.segments)
    normed = [
        (number, index)
        for number, segment in enumerate(segments)
        for index, stage in enumerate(segment.stages)
        if any("eps" in op.attrs for op in stage.prologue) and all(out.kind != "logits" for part in stage.parts for out in part.outputs)
    ]
    number, index = normed[-1]
    stages = list(segments[number].stages)
    stage = stages[index]
    prologue = tuple(dataclasses.replace(op, attrs={**op.attrs, "eps": 1e3}) if "eps" in op.attrs else op for op in stage.prologue)
    stages[index] = dataclasses.replace(stage, prologue=prologue)
    segments[number] = dataclasses.replace(segments[number], stages=tuple(stages))
    return dataclasses.replace(program, segments=tuple(segments)), stage.name
