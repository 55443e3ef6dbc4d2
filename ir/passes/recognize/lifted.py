"""The lifted graph: decode ops, and helper ops that the rewriting tables still have to understand.

Every value has its canonical shape. Helper ops (``lift.…``) keep that shape too: a mean over the features, say, is
repeated over all of them, so that pointwise ops never broadcast. Equal nodes are made once.

Helpers: ``lift.sub a b``, ``lift.mean x`` and ``lift.sum x`` and ``lift.var x`` (attrs ``group``: how many neighbouring
features are taken together), ``lift.add_scalar x`` (``number``), ``lift.vec_mul x w`` and ``lift.vec_add x w`` (a vector per
feature, or per lane and feature; ``offset`` is added to w), ``lift.fn x`` (``fn``: rsqrt, exp …), ``lift.pow x`` (``exponent``).
Norms carry ``group`` as long as it is not the whole row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kogc.ir.graph import Graph, Node
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.evaluate import frozen
from kogc.ir.passes.recognize.picks import Pick
from kogc.ir.types import T, TensorType

#: Ops whose element i depends on element i of their operands alone.
POINTWISE = frozenset(
    "add mul scale softcap activation gated_activation lift.sub lift.add_scalar lift.fn lift.pow lift.vec_mul lift.vec_add".split()
)


class Builder:
    """Makes nodes of a graph under temporary names; the same op on the same operands gives the same node."""

    def __init__(self, like: Graph, dtype: str = "fp32") -> None:
        self.graph = like.like("lifted")
        self.graph.tables = {}
        self.dtype = dtype
        self._made: dict[object, str] = {}

    def __getitem__(self, name: str) -> Node:
        return self.graph[name]

    def emit(self, op: str, inputs: tuple[str, ...], attrs: Mapping[str, Any], kind: TensorType, origin: Node | None = None) -> str:
        """Name of the node ``op(inputs)``; ``origin`` lends source line and module."""
        attrs = {name: value for name, value in attrs.items() if value is not None}
        identity = (op, inputs, frozen(attrs), kind)
        if identity not in self._made:
            name = f"%{len(self.graph)}"
            source, module = (origin.source, origin.module) if origin else (None, None)
            self.graph.add(Node(name, op, inputs, kind, attrs, source, module))
            self._made[identity] = name
        return self._made[identity]

    def like(self, op: str, inputs: tuple[str, ...], origin: Node | None = None, **attrs: Any) -> str:
        """A node of the same type as its first operand."""
        return self.emit(op, inputs, attrs, self[inputs[0]].type, origin or self[inputs[0]])

    def value_type(self, lanes: int | None, features: int) -> TensorType:
        return TensorType((T, features) if lanes is None else (T, lanes, features), self.dtype)

    def lanes(self, name: str, lanes: int, origin: Node | None = None) -> str:
        """``name`` on every one of ``lanes`` lanes."""
        tokens, features = self[name].type.shape
        kind = TensorType((tokens, lanes, features), self[name].type.dtype)
        return self.emit("lane_broadcast", (name,), {"lanes": lanes}, kind, origin or self[name])

    def narrowed(self, name: str, pick: Pick) -> str:
        """The features ``pick`` of ``name``, pushed down to the rows of the linear ops that make them."""
        node = self[name]
        kind = TensorType((*node.type.shape[:-1], pick.width), node.type.dtype)
        if pick == Pick(0, node.type.shape[-1]):
            return name
        if node.op == "linear":
            return self._narrowed_linear(node, pick, kind)
        if node.op in ("lane_broadcast", "lane_sum", "lane_mean"):
            return self.emit(node.op, (self.narrowed(node.inputs[0], pick),), node.attrs, kind, node)
        if node.op in POINTWISE and not node.attrs.get("group"):
            leaves = ("weight", "table")
            inputs = tuple(
                (self.narrowed_vector if self[name].op in leaves else self.narrowed)(name, pick) for name in node.inputs
            )
            return self.emit(node.op, inputs, node.attrs, kind, node)
        raise NotUnderstood(f"features {pick.first}:{pick.last} of the result of {node.op} are used alone; only linear layers can be taken apart")

    def _narrowed_linear(self, node: Node, pick: Pick, kind: TensorType) -> str:
        x, weight, *bias = node.inputs
        vectors = tuple(self.narrowed_vector(vector, pick) for vector in bias)
        pick = pick.after((node.attrs.get("rows") or (0, 0))[0])
        if pick.is_range:
            return self.emit("linear", (x, weight, *vectors), {"rows": (pick.first, pick.last)}, kind, node)
        return self.emit("linear", (x, self._grouped(weight, pick, axis=-2), *vectors), {}, kind, node)

    def narrowed_vector(self, name: str, pick: Pick) -> str:
        """Elements ``pick`` of a weight vector (or of every lane's): a leaf with ``rows`` or ``groups``."""
        leaf = self[name]
        pick = pick.after((leaf.attrs.get("rows") or (0, 0))[0])
        if not pick.is_range:
            return self._grouped(name, pick, axis=-1)
        kind = TensorType((*leaf.type.shape[:-1], pick.width), leaf.type.dtype)
        return self.emit("weight", (), {**leaf.attrs, "rows": (pick.first, pick.last)}, kind, leaf)

    def _grouped(self, name: str, pick: Pick, axis: int) -> str:
        """A weight leaf that shows ``pick`` along ``axis``."""
        leaf = self[name]
        if leaf.op != "weight" or leaf.attrs.get("groups"):
            raise NotUnderstood("some features of every group are taken from some features of every group")
        shape = list(leaf.type.shape)
        shape[axis] = pick.width
        attrs = {name: value for name, value in leaf.attrs.items() if name != "rows"}
        groups = (axis, pick.first, pick.size, pick.step, pick.count)
        return self.emit("weight", (), {**attrs, "groups": groups}, TensorType(tuple(shape), leaf.type.dtype), leaf)
