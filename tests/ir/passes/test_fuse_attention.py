"""Split attention: however the context is cut, partial results combine to the whole."""

import numpy as np
import pytest

from kogc.ir.ops import op_row
from kogc.ir.types import TensorType

HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 4, 2, 6, 20


def attention_case(position, lanes, window, softcap):
    random = np.random.default_rng(len(position))
    features = HEADS * HEAD_DIM
    q = random.standard_normal((len(position), features))
    if lanes:
        q = q.reshape(len(position), lanes, features // lanes)
    keys, values = random.standard_normal((2, KV_HEADS, CAPACITY, HEAD_DIM))
    attrs = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "scale": 3.0, "window": window, "softcap": softcap}
    return (q, keys, values, np.array(position)), attrs


@pytest.mark.parametrize("position", [[0], [11], [3, 4, 5, 6]])
@pytest.mark.parametrize(("lanes", "window", "softcap"), [(0, None, None), (2, 3, None), (0, 30, 2.0)])
@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_partials_combine_to_attention(position, lanes, window, softcap, splits):
    operands, attrs = attention_case(position, lanes, window, softcap)
    whole = op_row("attention").evaluate(operands, attrs)
    with np.errstate(all="raise"):
        partial = op_row("attention_partial").evaluate(operands, {**attrs, "splits": splits})
        combined = op_row("attention_combine").evaluate((partial,), {"head_dim": HEAD_DIM, "splits": splits})
    np.testing.assert_allclose(combined, whole, atol=1e-12)


def test_an_empty_split_is_zero_with_maximum_minus_infinity():
    operands, attrs = attention_case([1], 0, None, None)
    partial = op_row("attention_partial").evaluate(operands, {**attrs, "splits": 4})
    records = partial.reshape(HEADS, 4, HEAD_DIM + 2)
    assert np.isneginf(records[:, 2:, HEAD_DIM]).all()
    assert not records[:, 2:, :HEAD_DIM].any()
    assert not records[:, 2:, HEAD_DIM + 1].any()


def test_a_split_holds_accumulated_values_then_maximum_then_sum():
    operands, attrs = attention_case([4], 0, None, None)
    records = op_row("attention_partial").evaluate(operands, {**attrs, "splits": 1}).reshape(HEADS, HEAD_DIM + 2)
    q, keys, values, _ = operands
    scores = keys[1, :5] @ q.reshape(HEADS, HEAD_DIM)[3] * 3.0
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(records[3], [*(weights @ values[1, :5]), scores.max(), weights.sum()])


def test_shapes_of_partial_results():
    q = TensorType(("T", 2, 12), "fp16")
    cache = TensorType((KV_HEADS, CAPACITY, HEAD_DIM), "fp16")
    attrs = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "scale": 1.0, "splits": 3}
    partial = op_row("attention_partial").shape((q, cache, cache, TensorType(("T",), "int64")), attrs)
    assert str(partial) == "fp32[T, 2, 48]"
    combined = op_row("attention_combine").shape((partial,), {"head_dim": HEAD_DIM, "splits": 3})
    assert str(combined) == "fp32[T, 2, 12]"
    with pytest.raises(ValueError, match="not a whole number of heads"):
        op_row("attention_combine").shape((partial,), {"head_dim": HEAD_DIM, "splits": 5})
