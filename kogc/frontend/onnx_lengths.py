"""What an ONNX step with growing caches computes from their length alone.

The step is run after several numbers of past tokens, and once with a token more: on shapes where values come from tokens, in full where
they follow from lengths (sizes, ranges, masks of ones). What a value has to do with the length is read off these runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kogc.frontend.errors import FrontendError, first_line
from kogc.frontend.import_fx import to_numpy
from kogc.frontend.onnx_calls import label, plain_call
from kogc.frontend.onnx_file import OnnxFile
from kogc.frontend.onnx_inputs import StepInputs, sizes
from kogc.frontend.onnx_ops import DTYPES
from kogc.frontend.quiet import quiet_torch

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64, "bfloat16": torch.bfloat16}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Follows:
    """An integer value that goes with the number P of past tokens: ``start`` + ``slope`` · P. ``tokens``: the axis of the step's
    tokens, None where there is none. Token t is at position P + t."""

    start: np.ndarray
    slope: np.ndarray
    tokens: int | None


class Lengths:
    """The runs of ``file`` for ``tokens`` tokens, keyed by the number of past ones; ``last`` is the greatest that ``capacity`` allows.

    Raises FrontendError for an operation that is not known, and for a value whose size is neither fixed nor the number of tokens so far.
    """

    def __init__(self, file: OnnxFile, inputs: StepInputs, weights: Iterable[str], capacity: int, tokens: int) -> None:
        self.tokens, self.last, kept = tokens, capacity - tokens, set(weights)
        self._pasts = sorted({1, 2, capacity // 2, max(1, self.last - 1)} - {self.last}) + [self.last]
        with quiet_torch():
            self._runs = {past: _run(file, inputs, kept, past, tokens) for past in self._pasts}
            self._longer = _run(file, inputs, kept, self.last, tokens + 1)
        caches = {cache.name for cache in inputs.caches}
        self._past_sized = set(caches)
        for node in file.nodes:
            if self.seen_through(node) in self._past_sized:
                self._past_sized.add(node.output[0])
        for node in file.nodes:
            if node.op_type != "Concat" and self._past_sized & set(node.input):
                continue  # what reads a past cache as it came in is refused for that
            for name in node.output:
                if name and not self.is_folded(name):
                    self._check_growth(name, f"{file.path}: {node.op_type} ({label(node)})")

    def is_folded(self, name: str) -> bool:
        """Whether the value depends on the length alone."""
        return all(isinstance(run.get(name), np.ndarray) for run in self._runs.values())

    def at_last(self, name: str) -> np.ndarray:
        """A folded value after all but the last position."""
        return self._runs[self.last][name]

    def values(self, name: str) -> dict[int, np.ndarray]:
        """A folded value, by the number of past tokens."""
        return {past: run[name] for past, run in self._runs.items()}

    def shapes(self, name: str) -> dict[int, Shape]:
        """By the number of past tokens; () for what has none."""
        return {past: tuple(getattr(run.get(name), "shape", ())) for past, run in self._runs.items()}

    def growing(self, name: str) -> frozenset[int]:
        """Axes whose size goes with the length."""
        shapes = list(self.shapes(name).values())
        return frozenset(axis for axis in range(len(shapes[0])) if len({shape[axis] for shape in shapes}) > 1)

    def seen_through(self, node: onnx.NodeProto) -> str | None:
        """The operand that ``node`` hands on as it is, in another type or order of its axes."""
        if node.op_type in ("Identity", "Cast", "Transpose"):
            return node.input[0]
        parts = [name for name in node.input if not (self.is_folded(name) and not self.at_last(name).size)]
        return parts[0] if node.op_type == "Concat" and len(parts) == 1 else None

    def token_axis(self, name: str) -> int | None:
        """The axis of the step's tokens; None where there is not exactly one."""
        shape, longer = self.shapes(name)[self.last], tuple(getattr(self._longer.get(name), "shape", ()))
        found = [axis for axis in range(len(shape)) if shape[axis] != longer[axis] and axis not in self.growing(name)]
        return found[0] if len(found) == 1 and shape[found[0]] == self.tokens else None

    def folded(self, name: str) -> np.ndarray | Follows | None:
        """A folded value as a constant, where slot s of a growing axis is always the same, or as one that follows the position.
        None for one that must be computed in every step."""
        values, last = self.values(name), self.at_last(name)
        if all(_agrees(value, last) for value in values.values()):
            return last
        if last.dtype.kind != "i":
            return None
        slope = self._slope(values, last, bool(self.growing(name)))
        if slope is None or not all(_agrees(value, last + slope * (past - self.last)) for past, value in values.items()):
            return None
        return Follows(last - slope * self.last, slope, self.token_axis(name))

    def _slope(self, values: Mapping[int, np.ndarray], last: np.ndarray, grows: bool) -> np.ndarray | None:
        past = self._pasts[0]
        change, rest = np.divmod(_overlap(last, values[past]) - values[past], self.last - past)
        if rest.any() or grows and len(np.unique(change)) != 1:
            return None
        return np.asarray(change.flat[0] if grows else change)

    def _check_growth(self, name: str, where: str) -> None:
        for axis in self.growing(name):
            more = 0 if name in self._past_sized else self.tokens
            if any(shape[axis] != past + more for past, shape in self.shapes(name).items()):
                found = ", ".join(f"{shape[axis]} after {past}" for past, shape in self.shapes(name).items())
                raise FrontendError(f"{where} makes a size that is neither fixed nor the number of tokens so far ({found} tokens)")


def _overlap(value: np.ndarray, like: np.ndarray) -> np.ndarray:
    return value[tuple(slice(0, size) for size in like.shape)]


def _agrees(value: np.ndarray, last: np.ndarray) -> bool:
    """Whether ``last`` continues ``value``: they are the same where both are."""
    return value.ndim == last.ndim and np.array_equal(value, _overlap(last, value))


# ── one run ──


def _run(file: OnnxFile, inputs: StepInputs, weights: set[str], past: int, tokens: int) -> dict[str, Any]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[str, Any] = {"": None}
    with mode:
        for name, value in file.tensors.items():
            shape = tuple(value.shape)
            values[name] = torch.empty(shape, dtype=_FLOATS[value.dtype.name]) if name in weights else value
        values |= _given(inputs, past, tokens)
    for node in file.nodes:
        call = plain_call(node, file.path)
        operands = [values[name] for name in node.input]
        try:
            results = _result(call.function, operands, mode)
        except FrontendError:
            raise
        except Exception as error:  # whatever PyTorch says to shapes that do not fit
            raise FrontendError(f"{file.path}: {node.op_type} ({label(node)}) cannot be read: {first_line(error)}") from error
        values.update(zip(node.output, results if isinstance(results, tuple) else (results,), strict=False))
    return values


def _given(inputs: StepInputs, past: int, tokens: int) -> dict[str, Any]:
    shape = (1, tokens) if inputs.batched else (tokens,)
    given: dict[str, Any] = {one.name: torch.empty(shape, dtype=torch.int64) for one in (inputs.token, inputs.position) if one is not None}
    if inputs.mask is not None:
        given[inputs.mask.name] = np.ones((1, past + tokens), np.int32 if inputs.mask.type.tensor_type.elem_type == 6 else np.int64)
    for cache, grows in zip(inputs.caches, inputs.grows, strict=True):
        shape = tuple(past if axis == grows else size or 1 for axis, size in enumerate(sizes(cache)))
        given[cache.name] = torch.empty(shape, dtype=DTYPES[cache.type.tensor_type.elem_type])
    return given


def _result(function: Any, operands: list[Any], mode: FakeTensorMode) -> Any:
    """NumPy arrays of nothing but NumPy arrays; otherwise what the operation makes of shapes."""
    if any(isinstance(operand, FakeTensor) or not isinstance(operand, np.ndarray | None) for operand in operands):
        with mode:
            return function(*operands)
    results = function(*operands)
    if isinstance(results, tuple):
        return tuple(map(_array, results))
    return _array(results)


def _array(value: Any) -> Any:
    return to_numpy(value) if isinstance(value, torch.Tensor) else value
