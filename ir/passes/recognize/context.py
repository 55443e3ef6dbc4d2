"""What rules share while a graph is lifted: the values so far, the lifted graph, and ways to make values canonical."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from kogc.ir.graph import Graph, Node
from kogc.ir.ops.tensor import substitute
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Dim, Layout, gaps
from kogc.ir.passes.recognize.lifted import Builder
from kogc.ir.passes.recognize.masks import Masks
from kogc.ir.passes.recognize.picks import Pick, picked
from kogc.ir.passes.recognize.position import PositionFunctions
from kogc.ir.passes.recognize.values import Act, Cache, Pending, Scores, Space, Static, Token, Value, Weight
from kogc.ir.types import TensorType

#: A rule gets the context, the tensor node and the call's arguments with values in place of operands.
Rule = Callable[..., Value]
RULES: dict[str, Rule] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a function ``(context, node, *args, **kwargs) -> Value`` as the meaning of tensor ops."""

    def register(function: Rule) -> Rule:
        for op in ops:
            name = op if op == "getitem" else f"aten.{op}"
            if name in RULES:
                raise ValueError(f"op {name} has two rules")
            RULES[name] = function
        return function

    return register


class Context:
    """The state of one lift."""

    def __init__(self, graph: Graph, dtype: str, capacity: int) -> None:
        self.graph = graph
        self.tokens: int = graph["token"].type.shape[0]
        self.capacity = capacity
        self.functions = PositionFunctions(graph, self.tokens, self.capacity)
        self.masks = Masks(self.functions)
        self.builder = Builder(graph, dtype)
        self.values: dict[str, Value] = {}
        #: Atoms along which a lifted node is constant (results of reductions).
        self.constant: dict[str, Dim] = {}
        #: What resolving a pending value has found, by structure.
        self.rotations: dict[object, Any] = {}
        self.made_tables: list[str] = []
        self._weights = {node.attrs["key"]: node.type.dtype for node in graph if node.op == "weight"}

    # ── making activations ──

    def act(
        self, op: str, inputs: tuple[str, ...], attrs: dict, space: Space, layout: Layout, origin: Node, repeats: bool = False
    ) -> Act:
        """A new lifted node through ``layout``; see ``seen``."""
        name = self.builder.emit(op, inputs, attrs, self.builder.value_type(space.lanes, space.features), origin)
        return self.seen(name, space, layout, repeats)

    def seen(self, name: str, space: Space, layout: Layout, repeats: bool = False) -> Act:
        """All of the lifted node ``name`` through ``layout``.

        ``repeats`` says that the node is constant along whatever the layout leaves out, as results of reductions are.
        """
        missing = gaps(layout.atoms, space.total)
        if missing is None or layout.offset or (missing and not repeats):
            raise NotUnderstood("a result holds other than all tokens and features of its operands")
        if missing:
            self.constant[name] = missing
        return Act(name, space, layout)

    # ── reading values ──

    def whole(self, value: Value) -> Act:
        """``value`` as a view of a complete lifted node.

        Rotary embeddings are resolved, feature slices become linear ops of their own. Raises NotUnderstood otherwise.
        """
        if isinstance(value, Pending):
            from kogc.ir.passes.recognize.rope import resolved

            value = resolved(self, value)
        if not isinstance(value, Act):
            raise NotUnderstood(f"an activation is needed here, this is {describe(value)}")
        if self.is_whole(value):
            return value
        pick = self.features(value.layout, value.space, self.constant.get(value.node, ()))
        space = Space(value.space.tokens, value.space.lanes, pick.width)
        node = self.builder.narrowed(value.node, pick)
        return self.seen(node, space, pick.of(value.layout, value.space), repeats=bool(self.constant.get(value.node)))

    def is_whole(self, value: Act) -> bool:
        missing = gaps((*value.layout.atoms, *self.constant.get(value.node, ())), value.space.total)
        return missing == () and value.layout.offset == 0

    def features(self, layout: Layout, space: Space, constant: Dim = ()) -> Pick:
        """The features that a view of all tokens and lanes takes. Raises NotUnderstood for any other view."""
        parts = [part for atom in (*layout.atoms, *constant) if atom.stride for part in space.by_axis(atom)]
        inside = [atom for axis, atom in parts if axis == "F"]
        outside = [atom for axis, atom in parts if axis != "F"]
        rows = [atom._replace(stride=atom.stride // space.features) for atom in outside]
        if gaps(rows, space.total // space.features) != ():
            raise NotUnderstood("the features used here are not the same of every token")
        return picked(inside, layout.offset, space.features)

    def with_lanes(self, value: Act, lanes: int, origin: Node) -> Act:
        """``value`` repeated on every lane, unless it has lanes already."""
        if value.space.lanes is not None:
            return value
        space = Space(value.space.tokens, lanes, value.space.features)
        node = self.builder.lanes(value.node, lanes, origin)
        layout = value.space.moved(value.layout, space)
        constant = value.space.moved(Layout((self.constant.get(value.node, ()),)), space).dims[0]
        self.constant[node] = (*constant, space.lane_atom)
        return Act(node, space, layout)

    def number(self, value: Any) -> float | None:
        """A Python number, or the value of a one-element position-independent tensor; None for anything else."""
        if isinstance(value, bool):
            return None
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, Static) and not self.functions.depends_on_position(value.name):
            shape = self.graph[value.name].type.shape
            if all(size == 1 for size in shape):
                found = self.functions.constant(value.name).reshape(-1)[0]
                return float(found) if found.dtype.kind in "fiu" or found.dtype.name == "bfloat16" else None
        return None

    # ── leaves ──

    def leaf(self, op: str, key: str | None = None, kind: TensorType | None = None, **attrs: Any) -> str:
        """The lifted leaf; ``token`` and ``position`` need no key."""
        if op in ("token", "position"):
            return self.builder.emit(op, (), {}, TensorType(("T",), "int64"))
        return self.builder.emit(op, (), {"key": key, **attrs}, kind)


    def graph_dtype(self, key: str) -> str:
        """Stored dtype of a weight."""
        return self._weights[key]

    def table(self, name: str, values: np.ndarray) -> str:
        """A table leaf with these values; equal tables become one."""
        for key in self.made_tables:
            if key.rstrip("0123456789_") == name and np.array_equal(self.builder.graph.tables[key], values):
                break
        else:
            taken = self.builder.graph.tables
            key = next(k for k in (name + (f"_{n}" if n else "") for n in count()) if k not in taken)
            taken[key] = values
            self.made_tables.append(key)
        dtype = "fp64" if values.dtype == np.float64 else "fp32"
        return self.leaf("table", key, TensorType(values.shape, dtype))


def arguments(node: Node, values: tuple[Value, ...]) -> tuple[tuple, dict[str, Any]]:
    """The recorded call of a tensor node with symbolic values in place of operands."""
    kwargs = {name: substitute(value, values) for name, value in node.attrs["kwargs"].items()}
    return substitute(node.attrs["args"], values), kwargs


_WORDS = {
    Act: "an activation",
    Cache: "a KV cache",
    Pending: "an unfinished rotary embedding",
    Scores: "attention scores",
    Static: "a function of the position",
    Token: "token ids",
    Weight: "a weight",
}


def describe(value: Any) -> str:
    """What a value is, in words."""
    if not isinstance(value, Value):
        return "a number"
    return _WORDS.get(type(value), type(value).__name__.lower())
