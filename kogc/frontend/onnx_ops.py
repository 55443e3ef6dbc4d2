"""ONNX operations as PyTorch calls.

Every function gets the operands (tensors; NumPy arrays for what the file holds as a constant; None for one left out) and the
attributes, and returns the result, or a tuple of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor

Op = Callable[..., Any]
OPS: dict[str, Op] = {}

#: ``TensorProto.DataType`` → dtype.
DTYPES = {
    1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip


class NotPlain(ValueError):
    """An ONNX node that is no plain tensor operation of fixed shape."""


def op(*names: str) -> Callable[[Op], Op]:
    def register(function: Op) -> Op:
        OPS.update(dict.fromkeys(names, function))
        return function

    return register


def tensor(value: Any) -> Tensor:
    return torch.from_numpy(np.asarray(value, order="C")) if isinstance(value, np.ndarray | np.generic) else value


def numbers(value: Any, what: str) -> list[int]:
    """A list of Python numbers. Raises NotPlain where it is computed in the graph."""
    if not isinstance(value, np.ndarray):
        raise NotPlain(f"{what} is computed in the graph; export with fixed shapes")
    return [int(one) for one in value.reshape(-1)]


def _plain(function: Callable[..., Tensor]) -> Op:
    return lambda attrs, *operands: function(*map(tensor, operands))


OPS |= {
    name: _plain(function)
    for name, function in {
        "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal,
        "Neg": torch.neg, "Exp": torch.exp, "Abs": torch.abs, "Erf": torch.erf, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid,
        "Relu": torch.relu, "Cos": torch.cos, "Sin": torch.sin, "And": torch.logical_and, "Or": torch.logical_or, "Not": torch.logical_not,
        "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Equal": torch.eq, "MatMul": torch.matmul,
        "Max": torch.maximum, "Min": torch.minimum,
    }.items()
}  # fmt: skip


@op("Div")
def divide(attrs: Mapping[str, Any], a: Any, b: Any) -> Tensor:
    a, b = tensor(a), tensor(b)
    return torch.div(a, b, rounding_mode=None if a.is_floating_point() or b.is_floating_point() else "trunc")


@op("Pow")
def power(attrs: Mapping[str, Any], x: Any, exponent: Any) -> Tensor:
    return torch.pow(tensor(x), exponent.item() if isinstance(exponent, np.ndarray) and exponent.size == 1 else tensor(exponent))


@op("Identity")
def identity(attrs: Mapping[str, Any], x: Any) -> Any:
    return x


@op("Cast")
def cast(attrs: Mapping[str, Any], x: Any) -> Tensor:
    if attrs["to"] not in DTYPES:
        raise NotPlain(f"a cast to ONNX type {attrs['to']}")
    return tensor(x).to(DTYPES[attrs["to"]])


@op("CastLike")
def cast_like(attrs: Mapping[str, Any], x: Any, like: Any) -> Tensor:
    return tensor(x).to(tensor(like).dtype)


# ── shapes ──


@op("Shape")
def shape(attrs: Mapping[str, Any], x: Any) -> np.ndarray:
    return np.array(tuple(x.shape)[attrs.get("start", 0) : attrs.get("end")], np.int64)


@op("ConstantOfShape")
def constant_of_shape(attrs: Mapping[str, Any], shape: Any) -> Tensor:
    value = numpy_helper.to_array(attrs["value"]) if "value" in attrs else np.zeros(1, np.float32)
    return tensor(np.full(numbers(shape, "a shape"), value.reshape(()), value.dtype))


@op("Range")
def range_(attrs: Mapping[str, Any], start: Any, limit: Any, step: Any) -> Tensor:
    if not all(isinstance(one, np.ndarray) for one in (start, limit, step)):
        raise NotPlain("a range with bounds that depend on the tokens")
    return tensor(np.arange(start.item(), limit.item(), step.item(), start.dtype))


@op("Transpose")
def transpose(attrs: Mapping[str, Any], x: Any) -> Tensor:
    x = tensor(x)
    return x.permute(attrs.get("perm") or list(range(x.dim()))[::-1])


@op("Reshape")
def reshape(attrs: Mapping[str, Any], x: Any, shape: Any) -> Tensor:
    x, wanted = tensor(x), numbers(shape, "a shape")
    return x.reshape([x.shape[axis] if size == 0 and not attrs.get("allowzero") else size for axis, size in enumerate(wanted)])


@op("Flatten")
def flatten(attrs: Mapping[str, Any], x: Any) -> Tensor:
    x, axis = tensor(x), attrs.get("axis", 1)
    return x.reshape(int(np.prod(x.shape[:axis])), -1)


@op("Unsqueeze")
def unsqueeze(attrs: Mapping[str, Any], x: Any, axes: Any = None) -> Tensor:
    x, axes = tensor(x), attrs["axes"] if axes is None else numbers(axes, "an axis")
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@op("Squeeze")
def squeeze(attrs: Mapping[str, Any], x: Any, axes: Any = None) -> Tensor:
    x = tensor(x)
    axes = attrs.get("axes") if axes is None else numbers(axes, "an axis")
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@op("Expand")
def expand(attrs: Mapping[str, Any], x: Any, shape: Any) -> Tensor:
    x, wanted = tensor(x), numbers(shape, "a shape")
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(wanted)))


@op("Tile")
def tile(attrs: Mapping[str, Any], x: Any, repeats: Any) -> Tensor:
    return tensor(x).repeat(numbers(repeats, "a number of repeats"))


@op("Slice")
def slice_(attrs: Mapping[str, Any], x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Tensor:
    x, first, last = tensor(x), numbers(starts, "a begin"), numbers(ends, "an end")
    along = list(range(len(first))) if axes is None else numbers(axes, "an axis")
    by = [1] * len(first) if steps is None else numbers(steps, "a step")
    for axis, begin, end, step in zip(along, first, last, by, strict=True):
        if step < 1:
            raise NotPlain("a slice that runs backwards")
        index = [slice(None)] * x.dim()
        index[axis] = slice(begin, end, step)
        x = x[tuple(index)]
    return x


@op("Concat")
def concat(attrs: Mapping[str, Any], *parts: Any) -> Tensor:
    return torch.cat([tensor(part) for part in parts], attrs["axis"])


@op("Split")
def split(attrs: Mapping[str, Any], x: Any, sizes: Any = None) -> tuple[Tensor, ...]:
    x, axis = tensor(x), attrs.get("axis", 0)
    if sizes is not None:
        return torch.split(x, numbers(sizes, "a size"), axis)
    return torch.split(x, -(-x.shape[axis] // attrs["num_outputs"]), axis)


# ── choosing and writing ──


@op("Gather")
def gather(attrs: Mapping[str, Any], table: Any, indices: Any) -> Tensor:
    table, axis = tensor(table), attrs.get("axis", 0)
    if isinstance(indices, np.ndarray):
        if indices.ndim == 0:
            return table.select(axis, int(indices))
        indices = torch.from_numpy(indices)
    if axis == 0 and table.dim() == 2:
        return F.embedding(indices, table)
    return table[(slice(None),) * (axis % table.dim()) + (indices,)]


@op("GatherND")
def gather_nd(attrs: Mapping[str, Any], x: Any, indices: Any) -> Tensor:
    if attrs.get("batch_dims", 0):
        raise NotPlain("a GatherND with batch dimensions")
    return tensor(x)[tuple(tensor(indices).unbind(-1))]


@op("ScatterND")
def scatter_nd(attrs: Mapping[str, Any], x: Any, indices: Any, updates: Any) -> Tensor:
    x, indices = tensor(x), tensor(indices)
    if attrs.get("reduction", b"none") not in (b"none", "none") or indices.shape[-1] != 1:
        raise NotPlain("a ScatterND over several dimensions, or with a reduction")
    return x.index_put((indices.squeeze(-1),), tensor(updates))


class IsNan:
    """Where a value is NaN: only to put something else there (attention that sees nothing, which a causal one never does)."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.shape = value, value.shape


@op("IsNaN")
def is_nan(attrs: Mapping[str, Any], x: Any) -> IsNan:
    return IsNan(tensor(x))


def _number_or_tensor(value: Any) -> Any:
    return float(value) if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind == "f" else tensor(value)


@op("Where")
def where(attrs: Mapping[str, Any], condition: Any, one: Any, other: Any) -> Tensor:
    if isinstance(condition, IsNan):
        if other is not condition.value:
            raise NotPlain("a choice by NaN that is no guard of the value itself")
        return other
    chosen = torch.where(tensor(condition), *map(_number_or_tensor, (one, other)))
    return chosen.to(tensor(one).dtype) if isinstance(one, np.ndarray) else chosen  # two numbers make fp32


# ── sums, norms and activations ──


def _reduction(function: Callable[..., Tensor]) -> Op:
    def reduce(attrs: Mapping[str, Any], x: Any, axes: Any = None) -> Tensor:
        x = tensor(x)
        chosen = attrs.get("axes") if axes is None else numbers(axes, "an axis")
        return function(x, tuple(chosen) if chosen else tuple(range(x.dim())), keepdim=bool(attrs.get("keepdims", 1)))

    return reduce


OPS |= {"ReduceMean": _reduction(torch.mean), "ReduceSum": _reduction(torch.sum)}


@op("CumSum")
def cumulative_sum(attrs: Mapping[str, Any], x: Any, axis: Any) -> Tensor:
    if attrs.get("exclusive") or attrs.get("reverse"):
        raise NotPlain("a CumSum that is exclusive or runs backwards")
    return torch.cumsum(tensor(x), numbers(axis, "an axis")[0], dtype=tensor(x).dtype)


@op("Softmax")
def softmax(attrs: Mapping[str, Any], x: Any) -> Tensor:
    return torch.softmax(tensor(x), attrs.get("axis", -1))


@op("Gelu")
def gelu(attrs: Mapping[str, Any], x: Any) -> Tensor:
    return F.gelu(tensor(x), approximate=_text(attrs.get("approximate", "none")))


@op("LayerNormalization")
def layer_norm(attrs: Mapping[str, Any], x: Any, scale: Any = None, bias: Any = None) -> Tensor:
    x = tensor(x)
    shape = x.shape[attrs.get("axis", -1) % x.dim() :]
    return F.layer_norm(x, shape, *(None if one is None else tensor(one) for one in (scale, bias)), eps=attrs.get("epsilon", 1e-5))


@op("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(attrs: Mapping[str, Any], x: Any, scale: Any) -> Tensor:
    x = tensor(x)
    return F.rms_norm(x, x.shape[attrs.get("axis", -1) % x.dim() :], tensor(scale), attrs.get("epsilon", 1e-5))


@op("Gemm")
def gemm(attrs: Mapping[str, Any], a: Any, b: Any, c: Any = None) -> Tensor:
    a, b = (tensor(one).T if attrs.get(flag) else tensor(one) for one, flag in ((a, "transA"), (b, "transB")))
    product = torch.matmul(a, b)
    if attrs.get("alpha", 1.0) != 1.0:
        product = product * attrs["alpha"]
    if c is None:
        return product
    return product + (tensor(c) if attrs.get("beta", 1.0) == 1.0 else tensor(c) * attrs["beta"])


@op("Einsum")
def einsum(attrs: Mapping[str, Any], *operands: Any) -> Tensor:
    return torch.einsum(_text(attrs["equation"]), *map(tensor, operands))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value
