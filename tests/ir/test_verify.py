"""The verifier accepts legal graphs and names what is wrong with others."""

import numpy as np
import pytest

from kogc.ir.graph import Graph, GraphError, Node, Ref
from kogc.ir.types import TensorType
from kogc.ir.verify import verify

CACHE = "fp32[1, 8, 4]"


def graph_of(level, nodes, outputs=("y",), effects=("after",), tables=()):
    graph = Graph(level, "tiny")
    for name, op, inputs, kind, attrs in nodes:
        graph.add(Node(name, op, tuple(inputs.split()), TensorType.parse(kind), attrs, f"model.py:9: {name}"))
    graph.outputs, graph.effects, graph.tables = outputs, effects, dict(tables)
    return graph


def decode(replace=None, level="decode", without=(), **more):
    """A legal decode graph with the given nodes replaced: name → (op, inputs, type, attrs)."""
    nodes = {
        "token": ("token", "", "int64[T]", {}),
        "position": ("position", "", "int64[T]", {}),
        "w": ("weight", "", "fp16[5, 4]", {"key": "w"}),
        "cache": ("cache", "", CACHE, {"key": "c"}),
        "x": ("embed", "token w", "fp32[T, 4]", {}),
        "after": ("kv_append", "cache x position", CACHE, {}),
        "y": ("linear", "x w", "fp32[T, 5]", {"rows": None}),
        **(replace or {}),
    }
    return graph_of(level, [(name, *node) for name, node in nodes.items() if name not in without], **more)


def test_legal_graphs_pass():
    graph = decode()
    assert verify(graph) is graph
    args = {"args": (Ref(0), Ref(1)), "kwargs": {}}
    nodes = [
        ("token", "token", "", "int64[2]", {}),
        ("position", "position", "", "int64[2]", {}),
        ("table", "table", "", "fp32[3, 5]", {"key": "t"}),
        ("cache", "cache", "", CACHE, {"key": "c"}),
        ("y", "aten.embedding", "table token", "fp32[2, 5]", args),
        ("after", "aten.mul", "cache cache", CACHE, args),
    ]
    verify(graph_of("tensor", nodes, tables={"t": np.zeros((3, 5), np.float32)}))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (decode(level="stage"), "level 'stage', expected one of tensor, decode"),
        (
            decode({"y": ("lineal", "x w", "fp32[T, 5]", {})}),
            r"unknown op lineal in y = lineal\(x \(embed\): fp32\[T, 4\], w \(weight\): fp16\[5, 4\]\) -> fp32\[T, 5\] \(at model.py:9: y\)",
        ),
        (decode({"y": ("aten.cos", "x", "fp32[T, 4]", {})}), "op aten.cos does not belong into a decode graph"),
        (decode({"y": ("linear", "x", "fp32[T, 5]", {})}), r"1 operands, expected 2 to 3 \(x weight bias\)"),
        (decode({"y": ("add", "x x x", "fp32[T, 4]", {})}), r"3 operands, expected 2 \(a b\)"),
        (decode({"y": ("linear", "x w", "fp32[T, 6]", {})}), r"the operands make fp32\[T, 5\], recorded is another type, in y = linear"),
        (decode({"y": ("linear", "x w", "int64[T, 5]", {})}), "recorded is another type"),
        (decode({"y": ("linear", "x w", "fp32[T, 5]", {"rows": (2, 9)})}), r"rows 2:9 lie outside weight fp16\[5, 4\] in y = linear"),
        (decode({"y": ("scale", "x", "fp32[T, 4]", {})}), r"attributes \[\] are unknown and \['factor'\] are missing"),
        (decode({"y": ("add", "x x", "fp32[T, 4]", {"alpha": 2})}), r"attributes \['alpha'\] are unknown"),
        (decode({"w": ("weight", "", "fp16[5, 4]", {})}), r"attribute key is missing in w = weight\(\)"),
        (decode({"w": ("table", "", "fp16[5, 4]", {"key": "t"})}), "the graph has no table 't'"),
        (decode({"w": ("table", "", "fp16[5, 4]", {"key": "t"})}, tables={"t": np.zeros(3)}), r"table 't' holds float64\[3\]"),
        (decode({"again": ("token", "", "int64[T]", {})}), "tiny has 2 leaves token, expected one"),
        (decode({"token": ("token", "", "int64[3]", {})}), r"token must be \[T\]|token must have the symbolic shape"),
        (decode(without=("y",)), "promises y, which is not in the graph"),
        (decode(outputs=()), "has no outputs"),
        (decode(effects=("x",)), "an effect must write a cache"),
        (decode({"after": ("kv_append", "w x position", "fp32[5, 4]", {})}), "in after = kv_append"),
    ],
)
def test_illegal_graphs_are_named(graph, message):
    with pytest.raises(GraphError, match=message) as caught:
        verify(graph)
    assert "\n" not in str(caught.value)
