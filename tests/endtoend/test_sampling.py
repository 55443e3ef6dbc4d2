"""Whole generations that draw their tokens: the same for any number of workers and ranks, and from the model's own probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from against_torch import compile_quickly, random_model

from kogc import SamplingParams
from kogc.errors import NumericError

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

CAPACITY = 64
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
PROMPT = [5, 9, 2, 40, 7, 7]
EVERYTHING = dict(
    temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
    logit_bias={3: 1.0, 11: -2.0}, max_tokens=40,
)  # fmt: skip


def ids(generation) -> list[int]:
    return [token.id for token in generation]


def compiled(folder: Path, vocab: int, **options: Any):
    return compile_quickly(random_model(LLAMA | {"vocab_size": vocab}, CAPACITY), folder, **options)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with compiled(tmp_path_factory.mktemp("sampling"), 53, workers=2) as artifact, artifact.engine() as engine:
        yield engine


@pytest.mark.parametrize("vocab", [53, 56])  # words that two ranks do not divide, and words that they do
def test_a_seed_draws_the_same_tokens_everywhere(vocab, tmp_path):
    drawn = set()
    for ranks, workers in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)):
        folder = tmp_path / f"{ranks}-{workers}"
        folder.mkdir()
        with compiled(folder, vocab, tp=ranks, workers=workers) as artifact, artifact.engine() as engine:
            for seed in (1, 2**63 + 5):
                made = engine.generate(PROMPT, sampling=SamplingParams(seed=seed, **EVERYTHING))
                drawn.add((seed, tuple(ids(made))))
                assert made.seed == seed and len(made.ids) == 40
    assert len(drawn) == 2 and len({tokens for _, tokens in drawn}) == 2, "one sequence for each seed"


def test_without_a_seed_tokens_differ_and_can_be_drawn_again(engine):
    how = SamplingParams(temperature=1.5, max_tokens=30)
    one, other = engine.generate(PROMPT, sampling=how), engine.generate(PROMPT, sampling=how)
    assert ids(one) != ids(other)
    assert ids(engine.generate(PROMPT, sampling=how.with_changes(seed=one.seed))) == one.ids


def test_greedy_is_what_it_was(engine):
    plain = ids(engine.generate(PROMPT, max_tokens=30))
    logits = engine.logits(PROMPT + plain)
    assert logits.argmax(1)[len(PROMPT) - 1 : -1].tolist() == plain
    for values in ({}, {"top_k": 5, "seed": 3}, {"logprobs": 0}, {"temperature": 1, "top_k": 1}, {"temperature": 1e-6}):
        assert ids(engine.generate(PROMPT, max_tokens=30, sampling=SamplingParams(**values))) == plain
    assert engine.generate(PROMPT, max_tokens=1).seed is None


def test_first_tokens_have_the_models_probabilities(engine):
    x = engine.logits(PROMPT)[-1].astype(float)
    p = np.exp(x - x.max())
    p /= p.sum()
    count, how = 2000, SamplingParams(temperature=1, max_tokens=1)
    seen = np.bincount([next(engine.generate(PROMPT, sampling=how.with_changes(seed=seed))).id for seed in range(count)], minlength=53)
    likely = p * count > 8
    observed, expected = np.r_[seen[likely], seen[~likely].sum()], count * np.r_[p[likely], p[~likely].sum()]
    freedom = len(observed) - 1
    assert freedom > 5 and ((observed - expected) ** 2 / expected).sum() < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_log_probabilities_are_those_of_the_logits(engine, temperature):
    how = SamplingParams(temperature=temperature, seed=8, logprobs=5, max_tokens=20, presence_penalty=1, logit_bias={4: 3})
    tokens = list(engine.generate(PROMPT, sampling=how))
    x = engine.logits(PROMPT + [token.id for token in tokens])[len(PROMPT) - 1 : -1].astype(float)
    expected = x - x.max(1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(1, keepdims=True))
    for token, row in zip(tokens, expected, strict=True):
        assert abs(token.logprobs.chosen - row[token.id]) < 2e-5
        best = np.argsort(-row, kind="stable")[:5]
        assert [one for one, _ in token.logprobs.top] == best.tolist()
        assert np.abs(np.array([value for _, value in token.logprobs.top]) - row[best]).max() < 2e-5


def test_penalties_and_bias_against_a_reference(engine):
    how = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={4: 1.5, 9: -1.5}, max_tokens=40)
    made = ids(engine.generate(PROMPT, sampling=how))
    rows = engine.logits(PROMPT + made)[len(PROMPT) - 1 : -1]
    assert made != rows.argmax(1).tolist()
    for step, row in enumerate(rows):
        times = np.bincount(made[:step], minlength=53)
        seen = (times > 0) | np.isin(np.arange(53), PROMPT)
        x = np.where(seen, np.where(row > 0, row / 1.3, row * 1.3), row) - 0.4 * times - 0.5 * (times > 0)
        x[4] += 1.5
        x[9] -= 1.5
        assert x.argmax() == made[step], f"token {step}"


def test_turns_of_a_session_draw_what_the_whole_text_draws(engine):
    how = SamplingParams(temperature=1, seed=6, repetition_penalty=1.2, max_tokens=9)
    with engine.session() as session:
        answer = ids(engine.generate(PROMPT, session=session, sampling=how))
        second = ids(engine.generate([11, 12], session=session, sampling=how))
    assert second == ids(engine.generate([*PROMPT, *answer, 11, 12], sampling=how))


def test_a_cancelled_draw_leaves_nothing_behind(engine):
    how = SamplingParams(temperature=1, seed=6, frequency_penalty=0.5, logprobs=1, max_tokens=20)
    expected = ids(engine.generate(PROMPT, sampling=how))
    for count in range(3):
        with engine.generate([9] * (3 * count + 1), sampling=how, max_tokens=50) as generation:
            for _ in range(count):
                next(generation)
        assert ids(engine.generate(PROMPT, sampling=how)) == expected


def test_a_nan_is_an_error_and_no_token(tmp_path):
    module = random_model(LLAMA | {"vocab_size": 53}, CAPACITY)
    with torch.no_grad():
        module.lm_head.weight[30] = 3e38  # overflows both ways: ∞ − ∞
    with compile_quickly(module, tmp_path, workers=2) as artifact, artifact.engine() as engine:
        for how in (SamplingParams(), SamplingParams(temperature=1, top_k=3), SamplingParams(logprobs=2)):
            with pytest.raises(NumericError, match="hold a NaN, found by stage sample"):
                ids(engine.generate(PROMPT, sampling=how))


def test_stop_ids_and_the_context_end_it(engine):
    how = SamplingParams(temperature=1, seed=6, max_tokens=30)
    whole = ids(engine.generate(PROMPT, sampling=how))
    at = next(i for i in range(4, 30) if whole[i] not in whole[:i])
    short = engine.generate(PROMPT, sampling=how.with_changes(stop_token_ids=[whole[at]]))
    assert ids(short) == whole[: at + 1] and short.finish_reason == "stop"
    full = engine.generate(PROMPT, sampling=how, max_tokens=1000)
    assert len(ids(full)) == CAPACITY - len(PROMPT) + 1 and full.finish_reason == "context"


def test_stop_strings_never_show(tmp_path):
    """On text that a trained model draws: the same seed tells where the string would come."""
    model = Path(__file__).parents[2] / "models" / "checkpoints" / "pylane.pt"
    with compile_quickly(model, tmp_path, workers=2) as artifact, artifact.engine() as engine:
        how = SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=60, ignore_eos=True)
        whole = "".join(token.text for token in engine.generate("def fib(n):", sampling=how))
        for at in (11, 29):
            stop = whole[at : at + 5]
            generation = engine.generate("def fib(n):", sampling=how.with_changes(stop=["never to be found", stop]))
            shown = ""
            for token in generation:
                shown += token.text
                assert stop not in shown and whole.startswith(shown)
            assert shown == whole[: whole.index(stop)] and generation.finish_reason == "stop"
