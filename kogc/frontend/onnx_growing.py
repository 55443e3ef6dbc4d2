"""An ONNX step whose caches grow, as a step over caches of fixed length.

Optimum and others export ``past [.., P, ..] → present [.., P + T, ..]`` by Concat. Here a cache has all its positions from the start:
the Concat becomes a write at the tokens' positions, slot s of everything that counts positions stays slot s, and a softmax over slots
hides those behind a token's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from kogc.frontend.errors import FrontendError
from kogc.frontend.onnx_calls import Call, attributes, label, plain_call, shown
from kogc.frontend.onnx_file import OnnxFile
from kogc.frontend.onnx_inputs import StepInputs
from kogc.frontend.onnx_lengths import Follows, Lengths
from kogc.frontend.onnx_ops import tensor

#: Operands that say a size, an axis or a place and are no values: all behind the first one.
_SIZED = {"Reshape", "Expand", "Tile", "Slice", "Split", "Unsqueeze", "Squeeze", "ReduceMean", "ReduceSum"}
#: What may go over all slots and leave none: the recogniser knows whether it is attention.
_OVER_SLOTS = {"MatMul", "Gemm", "Einsum", "Slice", "Gather"}
#: The name of the position where the file has no such input.
POSITION = "\0position"


class FixedLength:
    """``calls`` of the step of ``tokens`` tokens over caches of ``capacity`` positions, ``constants`` for them, ``outputs`` (the logits, and one
    cache for each that goes in) and ``position``, the name under which the calls get it.

    Raises FrontendError for what has no such form: one line that names the operation.
    """

    def __init__(self, file: OnnxFile, inputs: StepInputs, weights: list[str], capacity: int, tokens: int) -> None:
        self._file, self._weights, self._capacity = file, set(weights), capacity
        self._lengths = Lengths(file, inputs, weights, capacity, tokens)
        self.position = POSITION if inputs.position is None else inputs.position.name
        self.constants: dict[str, np.ndarray] = {}
        self.calls: list[Call] = []
        self._known = {inputs.token.name, self.position, *weights}
        self._past = {cache.name: (cache.name, axis) for cache, axis in zip(inputs.caches, inputs.grows, strict=True)}
        self._cache_in: dict[str, str] = {}
        for node in file.nodes:
            if not all(self._lengths.is_folded(name) for name in node.output if name):
                self._add(node)
        self.outputs = self._results(inputs)

    def _results(self, inputs: StepInputs) -> tuple[str, ...]:
        written = {self._cache_in[name]: name for name in self._file.outputs if name in self._cache_in}
        others = [name for name in self._file.outputs if name not in self._cache_in]
        missing = next((cache.name for cache in inputs.caches if cache.name not in written), None)
        if missing is not None or len(others) != 1 or others[0] not in self._known:
            what = f"cache {missing} does not come back with one token more" if missing else "there is not one output of logits"
            expected = "logits and, for every past cache, itself with the new keys or values behind (Concat)"
            raise FrontendError(f"{self._file.path}: {what}; expected {expected}")
        return (others[0], *(written[cache.name] for cache in inputs.caches))

    # ── nodes ──

    def _add(self, node: onnx.NodeProto) -> None:
        if any(name in self._past for name in node.input):
            self._add_past(node)
        elif node.op_type == "Softmax":
            self._add_softmax(node)
        elif node.op_type == "Slice":
            self._add_slice(node)
        else:
            self._refuse_over_slots(node)
            inputs = tuple(self._operand(name, at > 0 and node.op_type in _SIZED) for at, name in enumerate(node.input))
            self._emit(node, plain_call(node, self._file.path).function, inputs)
        if node.op_type == "Identity" and node.input[0] in self._cache_in:
            self._cache_in[node.output[0]] = self._cache_in[node.input[0]]

    def _emit(self, node: onnx.NodeProto, function: Callable[..., Any], inputs: tuple[str, ...]) -> None:
        self.calls.append(Call(function, inputs, tuple(node.output), shown(node)))
        self._known.update(node.output)

    def _refuse(self, node: onnx.NodeProto, why: str) -> FrontendError:
        return FrontendError(f"{self._file.path}: {node.op_type} ({label(node)}) {why}")

    def _refuse_over_slots(self, node: onnx.NodeProto) -> None:
        grown = any(self._lengths.growing(name) for name in node.input if name and name not in self._weights)
        if node.op_type in _OVER_SLOTS or not grown:
            if node.op_type == "Gather" and self._counts_from_the_end(node):
                raise self._refuse(node, "counts from the end of what grows; only attention may look at all tokens so far")
            return
        if not any(self._lengths.growing(name) for name in node.output if name):
            raise self._refuse(node, "goes over all tokens so far; only attention may")

    def _counts_from_the_end(self, node: onnx.NodeProto) -> bool:
        table, index = node.input[:2]
        axis = attributes(node).get("axis", 0) % max(1, len(self._lengths.shapes(table)[self._lengths.last]))
        return axis in self._lengths.growing(table) and self._lengths.is_folded(index) and bool((self._lengths.at_last(index) < 0).any())

    # ── operands ──

    def _operand(self, name: str, size: bool = False) -> str:
        """The name under which the step's calls get value ``name``, made where it must be. A ``size`` is that of the whole capacity."""
        if not name or name in self._known:
            return name
        if size:
            return self._constant(f"{name}\0size", self._lengths.at_last(name))
        found = self._lengths.folded(name)
        if isinstance(found, np.ndarray):
            return self._constant(name, found)
        if isinstance(found, Follows):
            function = _following(found, self._lengths.tokens)
            self.calls.append(Call(function, (self.position,), (name,), f"{name} = a length that grows"))
        else:
            self._compute_anew(name)
        self._known.add(name)
        return name

    def _constant(self, name: str, value: np.ndarray) -> str:
        self.constants[name] = value
        self._known.add(name)
        return name

    def _compute_anew(self, name: str) -> None:
        """A value that depends on the length in another way: computed in every step from what it is made of."""
        node = next(node for node in self._file.nodes if name in node.output)
        self._refuse_over_slots(node)
        inputs = tuple(self._operand(one, at > 0 and node.op_type in _SIZED) for at, one in enumerate(node.input))
        self._emit(node, plain_call(node, self._file.path).function, inputs)

    # ── caches, slots ──

    def _add_past(self, node: onnx.NodeProto) -> None:
        seen = self._lengths.seen_through(node)
        cache, axis = self._past.get(seen or node.input[0], ("", 0))
        self._known.update(name for name in node.input if name in self._past)
        if seen is not None:
            self._see_through(node, seen)
            return
        rank = len(self._lengths.shapes(node.output[0])[self._lengths.last])
        along = attributes(node).get("axis", 0) % max(1, rank)
        if node.op_type != "Concat" or not cache or along != axis or len(node.input) != 2 or node.input[1] in self._past:
            raise self._refuse(node, "reads a past cache before the new token's keys or values are behind it (by Concat)")
        self._emit(node, _appending(axis), (node.input[0], self._operand(node.input[1]), self.position))
        self._cache_in[node.output[0]] = cache

    def _see_through(self, node: onnx.NodeProto, seen: str) -> None:
        """A view of a past cache, whose positions are now counted by the axis that comes of theirs."""
        cache, axis = self._past[seen]
        rank = len(self._lengths.shapes(seen)[self._lengths.last])
        order = list(attributes(node).get("perm") or range(rank)[::-1]) if node.op_type == "Transpose" else list(range(rank))
        self._past[node.output[0]] = (cache, order.index(axis))
        function = (lambda past: past) if node.op_type == "Concat" else plain_call(node, self._file.path).function
        self._emit(node, function, (seen,))

    def _add_softmax(self, node: onnx.NodeProto) -> None:
        grown = self._lengths.growing(node.input[0])
        rank = len(self._lengths.shapes(node.input[0])[self._lengths.last])
        axis = attributes(node).get("axis", -1) % rank
        function = plain_call(node, self._file.path).function
        if axis not in grown:
            self._emit(node, function, (self._operand(node.input[0]),))
        elif (tokens := self._lengths.token_axis(node.input[0])) is None:
            raise self._refuse(node, "goes over all tokens so far, but not for every token of the step")
        else:
            shape = [self._lengths.tokens if at == tokens else self._capacity if at == axis else 1 for at in range(rank)]
            self._emit(node, _softmax_up_to_here(function, shape, tokens, axis), (self._operand(node.input[0]), self.position))

    def _add_slice(self, node: onnx.NodeProto) -> None:
        """Plain where it takes what is always in the same place, all slots, or rows at the token's own position."""
        moved = [one for one in self._places(node) if one is not None]
        plain = tuple(self._operand(name, at > 0) for at, name in enumerate(node.input))
        if not moved:
            self._emit(node, plain_call(node, self._file.path).function, plain)
        elif len(moved) == len(self._axes(node)):
            self._emit(node, _rows_here(moved), (plain[0], self.position))
        else:
            raise self._refuse(node, "takes what moves with the position and what does not in one go")

    def _axes(self, node: onnx.NodeProto) -> list[int]:
        named = len(node.input) > 3 and node.input[3]
        count = self._lengths.at_last(node.input[1]).size
        return [int(axis) for axis in (self._lengths.at_last(node.input[3]).reshape(-1) if named else range(count))]

    def _places(self, node: onnx.NodeProto) -> list[tuple[int, int] | None]:
        """For every sliced axis: None, or (axis, slot − position) of slots that move with the tokens' positions."""
        if not all(self._lengths.is_folded(name) for name in node.input[1:] if name):
            raise self._refuse(node, "takes a part that depends on the tokens")
        shapes, out = self._lengths.shapes(node.input[0]), self._lengths.growing(node.output[0])
        axes = [axis % len(shapes[self._lengths.last]) for axis in self._axes(node)]
        return [self._place(node, at, axis, axis in out) for at, axis in enumerate(axes)]

    def _place(self, node: onnx.NodeProto, at: int, axis: int, grows: bool) -> tuple[int, int] | None:
        begins = {past: int(value.reshape(-1)[at]) for past, value in self._lengths.values(node.input[1]).items()}
        sizes = {past: shape[axis] for past, shape in self._lengths.shapes(node.input[0]).items()}
        first = {past: min(max(begin + sizes[past] if begin < 0 else begin, 0), sizes[past]) for past, begin in begins.items()}
        if len(set(first.values())) == 1 and not (grows and first[self._lengths.last]):
            return None
        offsets = {begin - past for past, begin in first.items()}
        steps = self._lengths.at_last(node.input[4]).reshape(-1)[at] if len(node.input) > 4 and node.input[4] else 1
        if grows or len(offsets) != 1 or steps != 1 or self._lengths.token_axis(node.output[0]) != axis:
            raise self._refuse(node, "takes some of the tokens so far; only attention may choose among them, by a mask")
        return axis, offsets.pop()


# ── what the calls do ──


def _following(value: Follows, tokens: int) -> Callable[[Tensor], Tensor]:
    """P is every token's position less its place in the step."""
    shape = [tokens if axis == value.tokens else 1 for axis in range(value.start.ndim)]
    places = np.arange(tokens).reshape(shape) if value.tokens is not None else 0
    start, slope = value.start - value.slope * places, np.broadcast_to(value.slope, value.start.shape)

    def follow(position: Tensor) -> Tensor:
        here = position.reshape(-1) if value.tokens is not None else position.reshape(-1)[:1]
        return tensor(start.astype(np.int64)) + tensor(slope.astype(np.int64)) * here.reshape(shape)

    return follow


def _appending(axis: int) -> Callable[[Tensor, Any, Tensor], Tensor]:
    return lambda cache, new, position: cache.index_copy(axis, position.reshape(-1), tensor(new).to(cache.dtype))


def _softmax_up_to_here(softmax: Callable[[Tensor], Tensor], shape: list[int], tokens: int, slots: int) -> Callable[[Tensor, Tensor], Tensor]:
    """``shape`` of the mask: its axes ``tokens`` and ``slots`` are those of the scores, the others 1."""
    here, slot = ([size if axis == own else 1 for axis, size in enumerate(shape)] for own in (tokens, slots))

    def masked(scores: Tensor, position: Tensor) -> Tensor:
        hidden = torch.arange(shape[slots]).reshape(slot) > position.reshape(here)
        return softmax(scores + torch.zeros(shape, dtype=scores.dtype).masked_fill(hidden, float("-inf")))

    return masked


def _rows_here(places: list[tuple[int, int]]) -> Callable[[Any, Tensor], Tensor]:
    def take(x: Any, position: Tensor) -> Tensor:
        x = tensor(x)
        for axis, offset in places:
            x = x.index_select(axis, position.reshape(-1) + offset)
        return x

    return take
