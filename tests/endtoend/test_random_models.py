"""Random shapes through the whole pipeline: the compiled model computes what PyTorch computes.

``KOGC_SEEDS`` is the number of models of each family; when it is set they differ from run to run.
"""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from against_torch import (
    LIMITS,
    assert_close,
    assert_equal_bits,
    assert_greedy,
    compile_quickly,
    generated,
    random_ids,
    random_model,
    relative_rmse,
    torch_logits,
)
from hypothesis import HealthCheck, Phase, given, settings
from random_shapes import Case, cases, laneformer_config, llama_config, on_ranks

from kogc.runtime.engine import Engine

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

SEEDS = os.environ.get("KOGC_SEEDS")
#: Without shrinking: every try costs a compile, and a failing case is small enough as it is.
MODELS = settings(
    max_examples=int(SEEDS or 10), deadline=None, suppress_health_check=list(HealthCheck), derandomize=not SEEDS,
    database=None, phases=(Phase.explicit, Phase.generate),
)  # fmt: skip


@MODELS
@given(case=cases(llama_config))
def test_llamas(case: Case):
    check(case)


@MODELS
@given(case=cases(laneformer_config))
def test_laneformers(case: Case):
    check(case)


@settings(MODELS, max_examples=int(SEEDS or 4))
@given(case=on_ranks(llama_config))
def test_llamas_cut_over_ranks(case: Case):
    check(case)


@settings(MODELS, max_examples=int(SEEDS or 4))
@given(case=on_ranks(laneformer_config))
def test_laneformers_on_ranks(case: Case):
    check(case)


def check(case: Case) -> None:
    module = random_model(case.config, case.capacity, case.dtype, case.seed)
    with tempfile.TemporaryDirectory() as folder, compiled(case, module, Path(folder)) as artifact, artifact.engine() as engine:
        ids = random_ids(case.config["vocab_size"], case.capacity, case.seed)
        logits = engine.logits(ids)
        assert_close(logits, torch_logits(module, ids), case.dtype)
        assert_equal_bits(engine.logits(ids), logits)
        for length in case.prompts:
            check_prompt(case, module, engine, ids[:length], logits)


def compiled(case: Case, module: torch.nn.Module, folder: Path):
    options = {"dtype": case.dtype, "workers": case.workers, "tp": case.ranks}
    if not case.as_file:
        return compile_quickly(module, folder, **options)
    torch.save({"config": case.config, "state_dict": module.state_dict()}, folder / "model.pt")
    return compile_quickly(folder / "model.pt", folder, max_context=case.capacity, **options)


def check_prompt(case: Case, module: torch.nn.Module, engine: Engine, prompt: list[int], logits) -> None:
    """A short prompt: its last step may hold fewer than four tokens; then tokens come one by one, up to the context's end."""
    part = engine.logits(prompt)
    # Steps of one token and of four add up in another order, which may round a cached value the other way.
    assert relative_rmse(part, logits[: len(prompt)]) <= LIMITS[case.dtype] / 4
    tokens = generated(engine, prompt, case.capacity + 9)
    assert len(tokens) == case.capacity - len(prompt) + 1
    assert generated(engine, prompt, case.capacity + 9) == tokens
    text = prompt + tokens[:-1]
    after = slice(len(prompt) - 1, None)
    assert_greedy(tokens, torch_logits(module, text)[after], case.dtype)
    # The same tokens in steps of four instead of one by one.
    assert_greedy(tokens, engine.logits(text)[after], case.dtype)
