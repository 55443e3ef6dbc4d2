"""The gate's arithmetic on made-up logits."""

import numpy as np
import pytest

from kogc.gate_numbers import LIMITS, Closeness, closeness, next_tokens


def logits(seed: int = 0, shape=(32, 100)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def test_relative_rmse_is_what_was_added():
    reference = logits()
    noise = logits(1)
    noise *= np.sqrt(np.mean(reference**2) / np.mean(noise**2))
    found = closeness(reference + 0.01 * noise, reference)
    assert found.rel_rmse == pytest.approx(0.01)
    assert 1 - found.cosine == pytest.approx(0.5e-4, rel=0.05)


@pytest.mark.parametrize("dtype, limit", LIMITS.items())
def test_limits(dtype, limit):
    reference = logits()
    noise = logits(1)
    noise *= np.sqrt(np.mean(reference**2) / np.mean(noise**2))
    assert closeness(reference + 0.9 * limit * noise, reference).within(limit)
    assert not closeness(reference + 1.1 * limit * noise, reference).within(limit)


def test_a_scaled_copy_is_caught_by_size_and_a_turned_one_by_the_cosine():
    assert not closeness(1.01 * logits(), logits()).within(5e-3)
    assert not Closeness(rel_rmse=0.0, cosine=0.99).within(5e-3)


def test_not_a_number_is_never_within():
    bad = logits()
    bad[3, 4] = np.nan
    assert not closeness(bad, logits()).within(1e9)


def test_zero_reference():
    zeros = np.zeros((2, 3))
    assert closeness(zeros, zeros).within(1e-4)
    assert not closeness(zeros + 1e-9, zeros).within(1.0)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shape"):
        closeness(np.zeros(3), np.zeros(4))


def test_next_token_counts_only_clear_positions():
    reference = np.zeros((3, 10))
    reference[0, 4] = 10.0  # clear
    reference[1, [2, 3]] = 10.0, 9.99  # a tie within the limits
    reference[2, 5] = 10.0  # clear, and wrong in the logits
    seen = reference.copy()
    seen[1, 3] = 11.0
    seen[2, 6] = 12.0
    found = next_tokens(seen, reference, LIMITS["fp16"])
    assert found.checked == 2 and found.wrong == (2,)
