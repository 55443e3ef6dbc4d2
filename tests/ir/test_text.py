"""Graphs printed and read back."""

import math

import numpy as np
import pytest

from kogc.ir.graph import Graph, Node, Ref
from kogc.ir.text import TextError, parse, to_text
from kogc.ir.types import TensorType


def small_graph() -> Graph:
    graph = Graph("decode", "tiny model")
    graph.meta |= {"capacity": 16, "caches": {"k": TensorType((2, 16, 8), "fp16")}, "note": "a = 'b' c=1"}
    graph.tables = {"cos": np.linspace(0, 1, 64, dtype=np.float32).reshape(16, 4)}
    kind = TensorType(("T", 16), "fp32")
    graph.add(Node("token", "token", (), TensorType(("T",), "int64")))
    graph.add(Node("embed.weight", "weight", (), TensorType((32, 16), "bf16"), {"key": "model.embed.weight"}))
    graph.add(Node("x", "embed", ("token", "embed.weight"), kind, {}, "m.py:3: x = self.embed(token)", "model.embed"))
    attrs = {"rows": (0, 16), "fn": "it's (a) b=2 # {}", "none": None, "flag": True, "inf": -math.inf, "one": (1,), "list": [1, [2.5]]}
    graph.add(Node("y", "add", ("x", "x"), kind, attrs, "m.py:4: y = x + x  # -- twice --", "model.layers.0"))
    args = {"args": (Ref(0), (), Ref(1)), "kwargs": {"alpha": 1e-5, "inner": {"deep": (Ref(1),)}}}
    graph.add(Node("z", "aten.add", ("x", "y"), kind, args))
    graph.outputs, graph.effects = ("z",), ("y", "x")
    return graph


def same(a: Graph, b: Graph) -> bool:
    return (
        list(a) == list(b)
        and (a.level, a.name, a.meta, a.outputs, a.effects) == (b.level, b.name, b.meta, b.outputs, b.effects)
        and a.tables.keys() == b.tables.keys()
        and all(np.array_equal(a.tables[key], b.tables[key]) for key in a.tables)
    )


def test_round_trip():
    graph = small_graph()
    text = to_text(graph)
    assert same(parse(text, graph.tables), graph)
    assert to_text(parse(text, graph.tables)) == text


def test_without_tables_the_structure_is_there():
    back = parse(to_text(small_graph()))
    assert list(back) == list(small_graph()) and not back.tables


def test_a_foreign_table_is_refused():
    graph = small_graph()
    with pytest.raises(TextError, match="line 5: the given table cos is not the one"):
        parse(to_text(graph), {"cos": graph.tables["cos"] + 1})


@pytest.mark.parametrize(
    "change, message",
    [
        (("graph decode", "grraph decode"), "line 1: a graph begins"),
        (("add(x, x)", "add(x, q)"), "reads q"),
        (("rows=(0, 16)", "rows=(0, 16"), "not a value"),
        (("rows=(0, 16)", "rows=__import__('os')"), "not a value"),
        (("outputs z", "outputs q"), "result q"),
    ],
)
def test_bad_text_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        parse(to_text(small_graph()).replace(*change))


def test_empty_text():
    with pytest.raises(TextError, match="empty"):
        parse("\n")
