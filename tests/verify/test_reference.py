"""The reference: the same rounding wherever it is done, and the same logits from the middle of a text as from its begin."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

from kogc.frontend.load import load_model
from kogc.reference import fp32_module, module_logits, rounded, rounded_on


class Weights:
    """Every source dtype, with values that show double rounding, subnormals and a read-only array."""

    def __init__(self):
        values = np.random.default_rng(0).normal(size=4096).astype(np.float32) * np.tile(10.0 ** np.arange(-6, 2), 512).astype(np.float32)
        self.values = {"fp32": values, "fp16": values.astype(np.float16), "bf16": values.astype(ml_dtypes.bfloat16), "fp64": values.astype(np.float64)}
        for array in self.values.values():
            array.flags.writeable = False

    def keys(self):
        return self.values.keys()

    def get(self, key):
        return self.values[key]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("source", ["fp32", "fp16", "bf16"])
def test_torch_rounds_as_numpy(source, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for keys in ({source}, set()):
            found = rounded_on("cpu", Weights(), keys, dtype)(source)
            assert found.dtype == torch.float32
            np.testing.assert_array_equal(found.numpy(), rounded(Weights(), keys, dtype)(source))


def test_fp64_is_refused_where_it_would_be_rounded_twice():
    with pytest.raises(ValueError, match="fp64 is fp64"):
        rounded_on("cpu", Weights(), {"fp64"}, "fp16")("fp64")


def test_logits_continue_behind_what_the_caches_hold():
    model = load_model("preset:llama-tiny", random_weights=True, max_context=64)
    ids = np.random.default_rng(1).integers(0, 256, 23).tolist()
    get = rounded(model.weights, set(), "fp32")
    whole = module_logits(fp32_module(model, get), ids)
    module = fp32_module(model, rounded_on("cpu", model.weights, set(), "fp32"), "cpu")
    parts = [module_logits(module, ids[:10]), module_logits(module, ids[10:], 10)]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-5)
