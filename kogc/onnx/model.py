"""A decode graph as an ONNX model: standard ops where they exist, functions of the domain ``kogc`` with bodies for the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from kogc.ir.graph import Graph, GraphError, Node
from kogc.ir.types import TensorType
from kogc.ir.weights import WeightSource
from kogc.onnx.body import Body
from kogc.onnx.functions import BUILDERS, STANDARD
from kogc.onnx.store import TensorStore

OPSET = 20
DOMAIN = "kogc"
_TYPES = {"fp32": TensorProto.FLOAT, "fp64": TensorProto.FLOAT, "int64": TensorProto.INT64}


def write_onnx(graph: Graph, weights: WeightSource, path: Path, data: Path, location: str) -> None:
    """Write ``graph`` (level ``decode``, weight leaves as they are stored in ``weights``) to ``path``, and its large tensors to
    ``data``, which will be called ``location`` beside it.

    Inputs are ``token`` and ``position``, int64 [T], and the caches, fp32 [kv_heads, capacity, head_dim]; outputs the logits,
    fp32 [T, vocab], and the caches after the step, called ``NAME.after``. Weights keep their types.

    Raises:
        GraphError: an op has no ONNX form.
        OSError: the file cannot be written.
    """
    with closing(TensorStore(data, location)) as store:
        _Writer(graph, weights, store).write(path)


class _Writer:
    def __init__(self, graph: Graph, weights: WeightSource, store: TensorStore) -> None:
        self.graph, self.weights, self.store = graph, weights, store
        self.body = Body()
        self.names: dict[str, str] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.functions: dict[tuple, onnx.FunctionProto] = {}

    def write(self, path: Path) -> None:
        for node in self.graph:
            self.names[node.name] = self._value(node)
        outputs = [self._output(name, name) for name in self.graph.outputs]
        outputs += [self._output(name, f"{self._cache(name)}.after") for name in self.graph.effects]
        graph = helper.make_graph(self.body.nodes, self.graph.name, self.inputs, outputs, self.store.tensors)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, functions=list(self.functions.values()), producer_name="kogc", ir_version=9)
        onnx.save_model(model, path)

    def _cache(self, name: str) -> str:
        """The name of the cache that an effect is a version of."""
        node = self.graph[name]
        return node.name if node.op == "cache" else self._cache(node.inputs[0])

    def _output(self, value: str, name: str) -> onnx.ValueInfoProto:
        self.body.op("Identity", self.names[value], output=f"{name}.out" if name == value else name)
        return _info(self.body.nodes[-1].output[0], self.graph[value].type)

    # ── values ──

    def _value(self, node: Node) -> str:
        if node.op in ("token", "position", "cache"):
            self.inputs.append(_info(node.name, TensorType(node.type.shape, "int64" if node.op != "cache" else "fp32")))
            return node.name
        if node.op == "weight":
            return self.store.add(node.name, self.weights.get(node.attrs["key"]).reshape(node.type.shape))
        if node.op == "table":
            return self.store.add(node.name, np.asarray(self.graph.tables[node.attrs["key"]], np.float32))
        standard = getattr(self, f"_{node.op}", None)
        made = standard(node, *(self.names[name] for name in node.inputs)) if standard else None
        return made or self._call(node)

    def _call(self, node: Node) -> str:
        """A call of the function for ``node``'s op with its attributes."""
        if node.op not in BUILDERS:
            raise GraphError(f"{node.name} ({node.op}) has no ONNX form")
        types = tuple(operand.type for operand in self.graph.operands(node))
        key = (node.op, tuple(sorted((name, value) for name, value in node.attrs.items() if value is not None)), types, node.type)
        if key not in self.functions:
            count = sum(known[0] == node.op for known in self.functions)
            self.functions[key] = _function(f"{node.op}_{count + 1}" if count else node.op, node, types)
        operands = [self._widened(name) for name in node.inputs]
        return self.body.op(self.functions[key].name, *operands, domain=DOMAIN, output=node.name)

    def _widened(self, name: str) -> str:
        """An operand in fp32; weights may be stored narrower."""
        node = self.graph[name]
        if node.op != "weight" or self.store.is_fp32(self.names[name]):
            return self.names[name]
        wide = f"{name}.fp32"
        if wide not in self.names:
            self.names[wide] = self.body.op("Cast", self.names[name], to=TensorProto.FLOAT, output=wide)
        return self.names[wide]

    # ── standard ops ──

    def _embed(self, node: Node, ids: str, table: str) -> str:
        return self.body.op("Cast", self.body.op("Gather", table, ids, axis=0), to=TensorProto.FLOAT, output=node.name)

    def _linear(self, node: Node, x: str, weight: str, bias: str | None = None) -> str:
        wide = self._widened(node.inputs[1])
        if node.attrs.get("rows"):
            axis = len(self.graph[node.inputs[1]].type.shape) - 2
            wide = self.body.slice(wide, axis, *node.attrs["rows"])
        vectors = [self._widened(name) for name in node.inputs[2:]]
        if len(node.type.shape) == 2:
            return self.body.op("Gemm", x, wide, *vectors, transB=1, output=node.name)
        product = self.body.op("Einsum", x, wide, equation="tlk,lnk->tln", **({} if vectors else {"output": node.name}))
        return self.body.op("Add", product, *vectors, output=node.name) if vectors else product

    def _add(self, node: Node, a: str, b: str) -> str:
        return self.body.op("Add", a, b, output=node.name)

    def _mul(self, node: Node, a: str, b: str) -> str:
        return self.body.op("Mul", a, b, output=node.name)

    def _scale(self, node: Node, x: str) -> str:
        return self.body.op("Mul", x, self.body.number(node.attrs["factor"]), output=node.name)

    def _layer_norm(self, node: Node, x: str, *vectors: str) -> str | None:
        if node.attrs.get("group") or not vectors or any(len(self.graph[name].type.shape) > 1 for name in node.inputs[1:]):
            return None
        wide = [self._widened(name) for name in node.inputs[1:]]
        return self.body.op("LayerNormalization", x, *wide, axis=-1, epsilon=node.attrs["eps"], output=node.name)

    def _activation(self, node: Node, x: str) -> str | None:
        if node.attrs["fn"] not in STANDARD:
            return None
        kind, attributes = STANDARD[node.attrs["fn"]]
        return self.body.op(kind, x, output=node.name, **attributes)

    def _lane_sum(self, node: Node, x: str) -> str:
        return self.body.op("ReduceSum", x, self.body.const([1]), keepdims=0, output=node.name)

    def _lane_mean(self, node: Node, x: str) -> str:
        return self.body.op("ReduceMean", x, self.body.const([1]), keepdims=0, output=node.name)

    def _lane_concat(self, node: Node, x: str) -> str:
        return self.body.op("Reshape", x, self.body.const([0, node.type.shape[-1]]), output=node.name)


def _function(name: str, node: Node, types: tuple[TensorType, ...]) -> onnx.FunctionProto:
    body = Body()
    inputs = [f"in_{number}" for number in range(len(types))]
    build: Callable = BUILDERS[node.op]
    result = build(body, node, types, inputs)
    return helper.make_function(DOMAIN, name, inputs, [result], body.nodes, [helper.make_opsetid("", OPSET)])


def _info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _TYPES.get(kind.dtype, TensorProto.FLOAT), list(kind.shape))
