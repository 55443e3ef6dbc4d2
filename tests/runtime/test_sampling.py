"""Sampling parameters: what is refused, and what counts as greedy."""

import math

import pytest

from kogc import SamplingParams
from kogc.errors import BadInput


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number at least 0, not -0.1"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"temperature": math.inf}, "temperature must be"),
        ({"temperature": "warm"}, "temperature must be a number at least 0, not 'warm'"),
        ({"temperature": True}, "temperature must be"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
        ({"top_p": 1.01}, "top_p must be"),
        ({"top_k": -2}, "top_k must be from -1 to 2147483647, not -2"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"min_p": 1.5}, "min_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, not 0"),
        ({"presence_penalty": 2.1}, "presence_penalty must be a number at least -2 and at most 2, not 2.1"),
        ({"frequency_penalty": -3}, "frequency_penalty must be"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 must be"),
        ({"logit_bias": {"5": 1}}, "an id in logit_bias must be a whole number"),
        ({"logit_bias": {-1: 1}}, "an id in logit_bias must be at least 0, not -1"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"seed": 2**64}, "seed must be from"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, not 21"),
        ({"logprobs": -1}, "logprobs must be"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of ids, not 5"),
    ],
)
def test_bad_values_are_one_clear_line(values, message):
    with pytest.raises(BadInput) as caught:
        SamplingParams(**values)
    assert message in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_what_is_greedy():
    assert SamplingParams().greedy and SamplingParams(top_k=3, top_p=0.5, min_p=0.1, seed=1, max_tokens=3).greedy
    drawn = {"temperature": 0.1, "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {0: 1}, "logprobs": 0}
    assert not any(SamplingParams(**{name: value}).greedy for name, value in drawn.items())


def test_explicit_arguments_go_before_the_parameters(engine, expected):
    how = SamplingParams(max_tokens=3, stop_token_ids=[expected([3, 4], 8)[5]])
    assert [token.id for token in engine.generate([3, 4], sampling=how)] == expected([3, 4], 3)
    assert [token.id for token in engine.generate([3, 4], max_tokens=8, sampling=how)] == expected([3, 4], 6)
    assert [token.id for token in engine.generate([1, 62], sampling=SamplingParams(max_tokens=3, ignore_eos=True))] == [63, 62, 60]


def test_ids_outside_the_vocabulary(engine):
    with pytest.raises(BadInput, match="logit_bias names token 64, outside the vocabulary of 64"):
        engine.generate([1], sampling=SamplingParams(logit_bias={64: 1}))
    with pytest.raises(BadInput, match="stop holds 64"):
        engine.generate([1], sampling=SamplingParams(stop_token_ids=[64]))
