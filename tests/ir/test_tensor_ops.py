"""Every tensor op computes what PyTorch's op of that name computes."""

import math

import numpy as np
import pytest
import torch

from kogc.ir.graph import Ref
from kogc.ir.ops import all_rows, op_row

torch.set_num_threads(1)
torch.manual_seed(0)
X = torch.randn(3, 4, 6, dtype=torch.float64)
Y = torch.randn(4, 6, dtype=torch.float64)
POSITIVE = X.abs() + 0.1
M = torch.randn(5, 6, dtype=torch.float64)
B = torch.randn(5, dtype=torch.float64)
INT = torch.tensor([[2, 0, 1, 2], [1, 1, 0, 3]])
INDEX = torch.tensor([2, 0])
MASK = X > 0
Q, K = torch.randn(2, 4, 3, 6, dtype=torch.float64), torch.randn(2, 2, 5, 6, dtype=torch.float64)
SEEN = torch.tensor([[1, 0, 0, 1, 1], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
C = torch.complex(X, X.flip(0))
F64 = {"dtype": torch.float64}

# op: argument lists; a dict at the end is keywords.
CASES = {
    "to": [(X, torch.float64)],
    "contiguous": [(X,)], "clone": [(X,)], "alias": [(X,)], "detach": [(X,)], "lift_fresh_copy": [(X,)],
    "dropout": [(X, 0.5, False)],
    "view": [(X, [12, -1]), (X, [3, 2, 2, 6])], "reshape": [(X, [-1])], "_unsafe_view": [(X, [6, 12])],
    "view_as": [(X, torch.zeros(12, 6))], "reshape_as": [(X, torch.zeros(12, 6))],
    "flatten": [(X,), (X, 1), (X, -3, -2)], "unflatten": [(X, -1, [2, 3]), (X, 1, [-1, 2])],
    "squeeze": [(X[:, :1],), (X[:, :1], 1), (X, 1), (X[:1, :1], [0, 1])], "unsqueeze": [(X, 0), (X, -1)],
    "transpose": [(X, 0, -1)], "swapaxes": [(X, 0, 1)], "swapdims": [(X, 0, 1)], "movedim": [(X, 0, 2), (X, [0, 1], [1, 2])],
    "permute": [(X, [2, 0, 1]), (X, [-1, 0, 1])], "t": [(Y,), (B,)], "numpy_T": [(Y,)], "mT": [(X,)],
    "expand": [(Y[:, :1], [2, 4, 3]), (Y, [3, -1, -1])], "expand_as": [(Y[:1], X)],
    "repeat": [(Y, [2, 1]), (Y, [2, 1, 3])], "tile": [(Y, [2])],
    "repeat_interleave": [(Y, 2, 0), (Y, 3), (Y, torch.tensor([1, 0, 2, 1]), 0)],
    "flip": [(X, [0, 2])], "roll": [(X, [1], [2]), (X, [2])],
    "slice": [(X, 2, 1, 5), (X, 1, -2), (X, 0, 0, 2**63 - 1), (X, 2, None, None, 2), (X, 1, 1, -1)],
    "select": [(X, 1, -1), (X, 2, 3)], "narrow": [(X, 1, 1, 2), (X, 1, -3, 2)],
    "index": [(X, [INDEX]), (X, [None, INDEX]), (X, [INDEX, None, INDEX]), (X, [MASK])],
    "index_select": [(X, 1, INDEX)], "gather": [(Y, 1, INT.reshape(4, 2)), (Y, 0, INT)],
    "embedding": [(M, INT), (M, INT, 0)],
    "cat": [([X, X[:1]],), ([X, X], -1)], "concat": [([X, X], 1)], "stack": [([Y, Y],), ([Y, Y], -1)],
    "split": [(X, 4, 2), (X, 2)], "split.sizes": [(X, [1, 5], 2)], "split_with_sizes": [(X, [1, 3], 1)],
    "chunk": [(X, 2, -1), (X, 2), (X, 4)], "unbind": [(X,), (X, -1)],
    "index_copy": [(X, 2, INDEX, X[:, :, :2] * 9)],
    "index_put": [(X, [None, INDEX], Y[:2]), (X, [INDEX], Y), (X, [torch.tensor([1, 1])], X[:2], True)],
    "copy": [(X, Y)],
    "slice_scatter": [(X, X[:, 1:3] * 2, 1, 1, 3)], "select_scatter": [(X, Y * 2, 0, 1)],
    "scatter": [(Y, 1, INT.reshape(4, 2)[:, :1], Y), (Y, 1, INT.reshape(4, 2)[:, :1], 3.0)],
    "fill": [(X, 2.5)], "zero": [(X,)],
    "arange": [(5, F64), (2, 5, F64), (1, 6, 2, F64)],
    "zeros": [([2, 3], F64)], "ones": [([2], F64)], "full": [([2, 3], -math.inf, F64)],
    "zeros_like": [(X,)], "ones_like": [(X,)], "full_like": [(X, 7)],
    "new_zeros": [(X, [2])], "new_ones": [(X, [2])], "new_full": [(X, [2], 3.0)],
    "scalar_tensor": [(2.5, F64)], "tril": [(X,), (X, -1)], "triu": [(X, 2)],
    "linear": [(X, M), (X, M, B)], "einsum": [("tlk, nk -> tln", [X, M]), ("...k,nk->...n", [X, M])],
    "addmm": [(B, Y, M.T), (B, Y, M.T, {"beta": 2, "alpha": 3})],
    "matmul": [(X, M.T), (X, X.mT), (Y, Y[0])], "mm": [(Y, M.T)], "bmm": [(X, X.mT)], "mv": [(M, Y[0])], "dot": [(B, B)],
    "outer": [(B, Y[0])],
    "scaled_dot_product_attention": [
        (Q, Q, Q), (Q, Q, Q, None, 0.0, True), (Q, K, K, SEEN, {"enable_gqa": True}),
        (Q, K, K, torch.where(SEEN, 0.0, -1e9).double(), {"enable_gqa": True, "scale": 0.3}),
        (Q, K, K, SEEN & (torch.arange(3) > 0)[:, None], {"enable_gqa": True}),
    ],
    "add": [(X, Y), (X, 2, {"alpha": 3}), (MASK, MASK)], "sub": [(X, Y), (X, Y, {"alpha": 2})], "rsub": [(X, 1)],
    "subtract": [(X, Y)], "multiply": [(X, Y)], "divide": [(X, Y)], "true_divide": [(X, 2)], "glu": [(X,), (X, 1)], "erf": [(X,)],
    "baddbmm": [(X[:, :, :4], X, X.mT)], "conj": [(C,)],
    "mul": [(X, Y), (X, -2), (MASK, MASK), (MASK, X)],
    "div": [(X, Y), (X, 3, {"rounding_mode": "floor"}), (X, 0.3, {"rounding_mode": "trunc"}), (INT, 2)],
    "floor_divide": [(INT, 2), (X, 0.3)], "remainder": [(INT, 2), (-X, 0.3)],
    "pow": [(X, 2), (X, 3.0), (POSITIVE, -0.5), (2.0, X), (X, -2), (POSITIVE, POSITIVE)],
    **{name: [(X,)] for name in "square neg abs round sigmoid silu relu tanh sin cos floor ceil trunc sign exp exp2".split()},
    **{name: [(POSITIVE,)] for name in "rsqrt reciprocal sqrt log log2 log1p".split()},
    "isnan": [(X / 0,)], "isinf": [(X / 0,)],
    "gelu": [(X,), (X, {"approximate": "tanh"})], "softplus": [(X,), (30 * X, 2, 10)],
    "maximum": [(X, Y)], "minimum": [(X, Y)],
    "clamp": [(X, -0.5, 0.5), (X, {"max": 0.1}), (X, Y)], "clip": [(X, 0.0)], "clamp_min": [(X, 0)], "clamp_max": [(X, 0)],
    "where": [(MASK, X, Y), (MASK, X, 0.0)], "masked_fill": [(X, MASK, -math.inf), (X, MASK, torch.tensor(1.0, dtype=torch.float64))],
    **{f"logical_{name}": [(MASK, ~MASK), (X, Y)] for name in ("and", "or", "xor")}, "logical_not": [(MASK,)],
    **{f"bitwise_{name}": [(MASK, ~MASK), (INT, INT + 1)] for name in ("and", "or", "xor")}, "bitwise_not": [(MASK,)],
    **{f"__{name}__": [(MASK, ~MASK)] for name in ("and", "or", "xor")},
    **{name: [(INT, 1), (INT, INT.flip(0))] for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "polar": [(POSITIVE, X)], "complex": [(X, X)], "real": [(C,)], "imag": [(C,)],
    "view_as_complex": [(X.reshape(3, 4, 3, 2),)], "view_as_real": [(C,)],
    "sum": [(X,), (X, [1]), (X, [0, 2], True), (MASK, [1])], "mean": [(X,), (X, [-1], True)],
    "amax": [(X, [1]), (X,)], "amin": [(X, [1], True)], "prod": [(X, 1)], "any": [(MASK,), (MASK, 1)], "all": [(MASK, 1, True)],
    "argmax": [(X,), (X, -1), (X, 1, True)],
    "var": [(X, [1]), (X, [-1], {"correction": 0, "keepdim": True}), (X, False), (X, [1], False)],
    "max": [(X,), (X, -X)], "min": [(X,), (X, -X)], "max.dim": [(X, 1), (X, -1, True)], "min.dim": [(X, 0)],
    "cumsum": [(X, 1)], "softmax": [(X, -1), (X, 1, torch.float64)], "_softmax": [(X, 1, False)],
    "log_softmax": [(X, 1)], "_log_softmax": [(X, -1, False)],
    "rms_norm": [(X, [6], Y[0], 1e-5), (X, [4, 6], None, 1e-3)],
    "layer_norm": [(X, [6]), (X, [6], Y[0], Y[1], 1e-3), (X, [4, 6], Y)],
}  # fmt: skip
#: Values are arbitrary.
UNSPECIFIED = {"empty": ([2, 3],), "empty_like": (X,), "new_empty": (X, [2, 3])}


def recorded(arguments):
    """Operands and attrs as the frontend records a call."""
    operands = []

    def plain(value):
        if isinstance(value, torch.Tensor):
            operands.append(value.numpy())
            return Ref(len(operands) - 1)
        if isinstance(value, list):
            return tuple(map(plain, value))
        return str(value) if isinstance(value, torch.dtype) else value

    *args, last = arguments
    kwargs = last if isinstance(last, dict) else {}
    args = args if isinstance(last, dict) else arguments
    args = tuple(map(plain, args))
    return tuple(operands), {"args": args, "kwargs": {name: plain(value) for name, value in kwargs.items()}}


def by_torch(name, arguments):
    *args, last = arguments
    args, kwargs = (args, last) if isinstance(last, dict) else (arguments, {})
    packet, _, overload = name.partition(".")
    op = getattr(torch.ops.aten, packet)
    result = (getattr(op, overload) if overload else op)(*args, **kwargs)
    return result.resolve_conj() if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("name", CASES)
def test_op_is_torchs(name):
    for arguments in CASES[name]:
        before = [t.clone() for t in arguments if isinstance(t, torch.Tensor)]
        want = by_torch(name, arguments)
        got = op_row(f"aten.{name}").evaluate(*recorded(arguments))
        pairs = [(got, want)] if isinstance(want, torch.Tensor) else list(zip(got, want, strict=True))
        for mine, theirs in pairs:
            assert mine.shape == tuple(theirs.shape), arguments
            if theirs.dtype != torch.float64:
                mine = mine.astype(theirs.numpy().dtype)  # the recorded type does this in a graph
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-12, atol=1e-13, err_msg=f"{name}{arguments}")
        after = [t for t in arguments if isinstance(t, torch.Tensor)]
        assert all(map(torch.equal, before, after)), "an operand was written"


@pytest.mark.parametrize("name", UNSPECIFIED)
def test_unwritten_memory_has_its_shape(name):
    got = op_row(f"aten.{name}").evaluate(*recorded(UNSPECIFIED[name]))
    assert got.shape == tuple(by_torch(name, UNSPECIFIED[name]).shape)


def test_every_op_is_tried():
    tried = {f"aten.{name}" for name in (*CASES, *UNSPECIFIED)} | {"getitem"}
    assert {row.name for row in all_rows() if row.role == "tensor"} == tried
