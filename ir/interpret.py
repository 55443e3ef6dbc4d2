"""Running a graph with numpy: the reference meaning of every program, for tensor and decode level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kogc.ir.graph import Graph, GraphError, Node, where
from kogc.ir.ops import op_row
from kogc.ir.shards import shard_values, uncut
from kogc.ir.types import TensorType
from kogc.ir.weights import WeightSource

MODES = ("fp64", "faithful")
_HALF_TYPES = ("fp16", "bf16")
#: Weights up to this many bytes, as converted, are kept between the steps of one sequence.
KEEP_BYTES = 2 << 30


@dataclass(frozen=True)
class Result:
    """Values by node name (the graph's outputs, or what was wanted) and all caches after the step, by key."""

    values: Mapping[str, np.ndarray]
    caches: Mapping[str, np.ndarray]

    @property
    def output(self) -> np.ndarray:
        """The first value: the logits, unless other nodes were wanted."""
        return next(iter(self.values.values()))


def interpret(
    graph: Graph,
    token: np.ndarray,
    position: np.ndarray,
    weights: WeightSource,
    caches: Mapping[str, np.ndarray],
    mode: str = "fp64",
    overrides: Mapping[str, np.ndarray] | None = None,
    want: Sequence[str] | None = None,
) -> Result:
    """Run one step of ``graph``.

    Args:
        graph: level ``tensor`` or ``decode``.
        token: ids, int64 [T]. A tensor graph takes just the T it was traced with.
        position: context position of each token, int64 [T].
        weights: source of all weights the graph reads.
        caches: cache contents by key, as ``zero_caches`` or an earlier step made them; not changed.
        mode: ``fp64`` computes everything that depends on a weight or a cache in fp64 (complex128) and makes float
            casts there no-ops; what depends on inputs, tables and constants alone (rope angles, masks) is data and
            keeps its declared dtype. ``faithful`` rounds every result to its declared dtype, computing halves in fp32.
        overrides: node name → value to use instead of evaluating that node.
        want: node names to return; only what they need is evaluated. By default the graph's outputs and effects.

    Raises:
        GraphError: a value does not have its recorded shape, or an op cannot be evaluated; names node, op and source.
        KeyError: a weight or cache is missing.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    token, position = np.asarray(token, np.int64), np.asarray(position, np.int64)
    run = _Run(graph, {"token": token, "position": position}, weights, caches, mode, overrides or {})
    names = tuple(want) if want is not None else graph.outputs
    effects = graph.effects if want is None else ()
    with np.errstate(all="ignore"):
        kept = run.evaluate((*names, *effects))
    after = dict(caches) | {cache_key(graph, name): kept[name] for name in effects}
    return Result({name: kept[name] for name in names}, after)


def run_sequence(
    graph: Graph, tokens: Sequence[int], weights: WeightSource, mode: str = "fp64", step_tokens: int | None = None
) -> np.ndarray:
    """Logits [n, vocab] of n token ids fed from position 0 into fresh caches.

    A tensor graph is fed its traced T tokens a step; the last step is filled up with its last token at that token's own
    position, which writes the same values again. A decode graph takes ``step_tokens`` (default: all at once).
    """
    tokens = [int(token) for token in tokens]
    step = graph["token"].type.shape[0] if graph.level == "tensor" else step_tokens or len(tokens)
    kept = _Kept(weights, mode)
    caches: Mapping[str, np.ndarray] = zero_caches(graph, mode)
    logits = []
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        fill = step - len(part) if graph.level == "tensor" else 0
        token = np.array(part + part[-1:] * fill)
        position = np.minimum(np.arange(start, start + len(token)), len(tokens) - 1)
        result = interpret(graph, token, position, kept, caches, mode)
        caches = result.caches
        logits.append(result.output[: len(tokens) - start])
    return np.concatenate(logits)


def zero_caches(graph: Graph, mode: str = "fp64") -> dict[str, np.ndarray]:
    """All caches of ``graph`` by key, filled with zeros, in the dtype of ``mode``."""
    return {
        node.attrs["key"]: np.zeros(node.type.concrete(1), _result_dtype(node.type, mode, static=False))
        for node in graph
        if node.op == "cache"
    }


def cache_key(graph: Graph, effect: str) -> str:
    """Key of the cache that the node ``effect`` is the new version of: follow first operands to the leaf."""
    node = graph[effect]
    while node.op != "cache":
        if not node.inputs:
            raise GraphError(f"effect {effect} of {graph.name} does not write a cache: it comes from {node.name} ({node.op})")
        node = graph[node.inputs[0]]
    return node.attrs["key"]


def leaf_value(leaf: Node, weights: WeightSource) -> np.ndarray:
    """What the weight leaf ``leaf`` shows of ``weights``: of one stored tensor, or of those in attr ``joined`` one after the other.

    Raises KeyError for an unknown key, GraphError when the stored values do not fit.
    """
    if not leaf.attrs.get("joined"):
        return weight_part(leaf, weights.get(leaf.attrs["key"]))
    return weight_part(leaf, np.concatenate([np.asarray(weights.get(key)).reshape(-1) for key in leaf.attrs["joined"]]))


def weight_part(node: Node, stored: np.ndarray) -> np.ndarray:
    """What the leaf ``node`` shows of a stored weight, in the node's shape.

    The stored values fill the node's shape in their order (lanes may be folded into rows or rows into lanes). With attr
    ``transpose`` they are stored as [lanes,] columns, rows. With attr ``rows`` (first, last) they are a vector of which
    that part is taken, from every lane if the part is as long as one lane of the node. With attr ``groups`` (axis, first, size,
    step, count) only indices ``first + i · step + j`` of that axis are shown, i < count and j < size. With attr ``cut`` they are
    shared out over lanes (``kogc.ir.shards``).

    Raises GraphError when the values do not fit.
    """
    if "cut" in node.attrs:
        return shard_values(node, weight_part(uncut(node), stored))
    shape = tuple(node.type.shape)
    rows = node.attrs.get("rows")
    try:
        if node.attrs.get("groups"):
            return _groups_of(node, stored)
        if rows and math.prod(shape) == rows[1] - rows[0]:
            return stored.reshape(-1)[rows[0] : rows[1]].reshape(shape)
        if rows:
            return stored.reshape(shape[0], -1)[:, rows[0] : rows[1]].reshape(shape)
        if node.attrs.get("transpose"):
            return stored.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
        return stored.reshape(shape)
    except ValueError as error:
        raise GraphError(f"weight {node.attrs['key']} {list(stored.shape)} does not make {node.name}: {node.type} ({error})") from error


def _groups_of(node: Node, stored: np.ndarray) -> np.ndarray:
    axis, first, size, step, count = node.attrs["groups"]
    shape = list(node.type.shape)
    shape[axis] = stored.size // (math.prod(shape) // shape[axis])
    attrs = {name: value for name, value in node.attrs.items() if name != "groups"}
    whole = weight_part(node.with_(type=TensorType(tuple(shape), node.type.dtype), attrs=attrs), stored)
    indices = first + step * np.arange(count)[:, None] + np.arange(size)
    return np.take(whole, indices.reshape(-1), axis)


def input_only(graph: Graph) -> frozenset[str]:
    """Names of the nodes that depend on token, position, tables and constants alone: no weight, no cache."""
    computed: set[str] = set()
    for node in graph:
        if node.op in ("weight", "cache") or any(name in computed for name in node.inputs):
            computed.add(node.name)
    return frozenset(node.name for node in graph if node.name not in computed)


class _Run:
    """One evaluation: walks the needed nodes in order and forgets values after their last reader."""

    def __init__(self, graph, inputs, weights, caches, mode, overrides) -> None:
        self.graph = graph
        self.inputs = inputs
        self.weights = weights
        self.caches = caches
        self.mode = mode
        self.overrides = overrides
        self.tokens = len(inputs["token"])
        self.static = input_only(graph) if mode == "fp64" else frozenset()
        self.values: dict[str, Any] = {}

    def evaluate(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        needed = self._needed(names)
        readers = {name: 0 for name in needed}
        for name in needed:
            for operand in self._operands(name):
                readers[operand] += 1
        for name in names:
            readers[name] += 1  # results are never forgotten
        for node in self.graph:
            if node.name not in needed:
                continue
            self.values[node.name] = self._value(node)
            for operand in self._operands(node.name):
                readers[operand] -= 1
                if not readers[operand]:
                    del self.values[operand]
        return self.values

    def _operands(self, name: str) -> tuple[str, ...]:
        return () if name in self.overrides else self.graph[name].inputs

    def _needed(self, names: Iterable[str]) -> set[str]:
        needed: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting.extend(self._operands(name))
        return needed

    def _value(self, node: Node) -> Any:
        if node.name in self.overrides:
            return self._shaped(node, self._cast(node, self.overrides[node.name]))
        if op_row(node.op).role == "leaf":
            return self._shaped(node, self._leaf(node))
        operands = tuple(_widen_half(self.values[name]) for name in node.inputs)
        try:
            value = op_row(node.op).evaluate(operands, node.attrs)
        except Exception as error:
            types = ", ".join(str(operand.type) for operand in self.graph.operands(node))
            raise GraphError(f"{node.name} = {node.op}({types}) cannot be evaluated: {error}{where(node)}") from error
        if isinstance(value, tuple):
            return value  # of an op with several outputs; `getitem` casts the one it takes
        return self._shaped(node, self._cast(node, value))

    def _leaf(self, node: Node) -> np.ndarray:
        if node.op in self.inputs:
            return self.inputs[node.op]
        key = node.attrs["key"]
        if node.op == "table":
            return self.graph.tables[key]
        return self._cast(node, leaf_value(node, self.weights) if node.op == "weight" else self.caches[key])

    def _cast(self, node: Node, value: Any) -> np.ndarray:
        dtype = _result_dtype(node.type, self.mode, node.name in self.static)
        value = np.asarray(value)
        if np.iscomplexobj(value) and dtype.kind != "c":
            value = value.real
        return value.astype(dtype, copy=False)

    def _shaped(self, node: Node, value: np.ndarray) -> np.ndarray:
        expected = node.type.concrete(self.tokens)
        if value.shape != expected:
            raise GraphError(f"{node.name} ({node.op}) has shape {list(value.shape)}, its type is {node.type}{where(node)}")
        return value


def _result_dtype(kind: TensorType, mode: str, static: bool) -> np.dtype:
    if mode == "faithful" or static:
        return kind.numpy_dtype
    if kind.is_float:
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if kind.dtype.startswith("complex") else kind.numpy_dtype


def _widen_half(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_widen_half, value))
    narrow = value.dtype in (TensorType((), name).numpy_dtype for name in _HALF_TYPES)
    return value.astype(np.float32) if narrow else value


class _Kept:
    """A weight source that keeps what it read, converted for ``mode``, as long as it stays small."""

    def __init__(self, weights: WeightSource, mode: str) -> None:
        self._weights = weights
        self._mode = mode
        self._values: dict[str, np.ndarray] = {}
        self._free = KEEP_BYTES

    def keys(self) -> Iterable[str]:
        return self._weights.keys()

    def get(self, key: str) -> np.ndarray:
        if key in self._values:
            return self._values[key]
        value = np.asarray(self._weights.get(key))
        if self._mode == "fp64":
            value = value.astype(np.float64, copy=False)
        if value.nbytes <= self._free:
            self._free -= value.nbytes
            self._values[key] = value
        return value
