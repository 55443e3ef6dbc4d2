"""The recogniser's parts on graphs built by hand, without PyTorch."""

import numpy as np
import pytest

from kogc.ir.graph import Graph, Node, Ref
from kogc.ir.passes.recognize import UnrecognizedOp, recognize
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.lifted import Builder
from kogc.ir.passes.recognize.masks import Masks
from kogc.ir.passes.recognize.match import Bind, match, p, rewritten
from kogc.ir.passes.recognize.position import PositionFunctions
from kogc.ir.passes.recognize.tables import TABLES
from kogc.ir.types import T, TensorType

TOKENS, CAPACITY = 4, 12


class Tensors:
    """A tensor graph by calls: ``t.call("aten.mul", shape, dtype, a, 2.0)``; operands are node names."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.graph = Graph("tensor", "hand-built")
        self.capacity = capacity
        self.leaf("token", (TOKENS,), "int64")
        self.leaf("position", (TOKENS,), "int64")

    def leaf(self, op: str, shape: tuple, dtype: str = "fp64", key: str | None = None) -> str:
        attrs = {} if key is None else {"key": key}
        return self.graph.add(Node(key or op, op, (), TensorType(shape, dtype), attrs)).name

    def table(self, key: str, values: np.ndarray) -> str:
        self.graph.tables[key] = values
        dtype = {"float64": "fp64", "float32": "fp32", "bool": "bool", "int64": "int64"}[values.dtype.name]
        return self.leaf("table", values.shape, dtype, key)

    def call(self, op: str, shape: tuple, dtype: str, *args) -> str:
        inputs: list[str] = []

        def plain(arg):
            if isinstance(arg, str) and arg in self.graph:
                inputs.append(arg)
                return Ref(len(inputs) - 1)
            return tuple(map(plain, arg)) if isinstance(arg, tuple) else arg

        attrs = {"args": tuple(map(plain, args)), "kwargs": {}}
        name = f"n{len(self.graph)}"
        return self.graph.add(Node(name, op, tuple(inputs), TensorType(shape, dtype), attrs, f"model.py:{len(self.graph)}: {op}", "m")).name

    @property
    def functions(self) -> PositionFunctions:
        return PositionFunctions(self.graph, TOKENS, self.capacity)


# ── position functions ──


def test_tables_of_positions():
    t = Tensors()
    table = t.table("angles", np.random.default_rng(0).random((CAPACITY, 3)))
    row = t.call("aten.index", (TOKENS, 3), "fp64", table, ("position",))
    view = t.call("aten.unsqueeze", (1, TOKENS, 3), "fp64", row, 0)
    assert t.functions.token_axis(view) == 1
    assert np.array_equal(t.functions.tabulate(view)[:, 0], t.graph.tables["angles"])


def test_baked_token_count_is_tabulated_step_by_step():
    t = Tensors(capacity=10)
    column = t.call("aten.view", (TOKENS, 1), "int64", "position", (TOKENS, 1))
    double = t.call("aten.mul", (TOKENS, 1), "int64", column, 2)
    assert np.array_equal(t.functions.tabulate(double)[:, 0], 2 * np.arange(10))


def test_position_itself_is_known_behind_casts_and_views():
    t = Tensors()
    cast = t.call("aten.to", (TOKENS,), "int32", "position", "int32")
    later = t.call("aten.add", (TOKENS,), "int64", "position", 1)
    assert t.functions.is_position(cast) and not t.functions.is_position(later)


def test_equal_subgraphs_have_equal_keys():
    t = Tensors()
    one, two, three = (t.call("aten.mul", (TOKENS,), "int64", "position", factor) for factor in (2, 2, 2.0))
    functions = t.functions
    assert functions.key(one) == functions.key(two) != functions.key(three)


# ── masks ──


def mask(t: Tensors, window: int | None) -> str:
    slots = t.call("aten.arange", (t.capacity,), "int64", t.capacity)
    column = t.call("aten.unsqueeze", (TOKENS, 1), "int64", "position", 1)
    age = t.call("aten.sub", (TOKENS, t.capacity), "int64", column, slots)
    shown = t.call("aten.ge", (TOKENS, t.capacity), "bool", age, 0)
    if window is None:
        return shown
    inside = t.call("aten.lt", (TOKENS, t.capacity), "bool", age, window)
    return t.call("aten.logical_and", (TOKENS, t.capacity), "bool", shown, inside)


@pytest.mark.parametrize("capacity", [CAPACITY, 3000])
@pytest.mark.parametrize("window", [None, 1, 5, 11, 12, 50])
def test_masks_are_classified_by_value(capacity, window):
    t = Tensors(capacity)
    name = mask(t, window)
    expected = window if window is not None and window < capacity else None
    assert Masks(t.functions).window(name, lambda value: value, "bool") == expected


def test_a_mask_that_is_not_causal_is_an_error():
    t = Tensors()
    name = mask(t, 5)
    flipped = t.call("aten.logical_not", (TOKENS, CAPACITY), "bool", name)
    with pytest.raises(NotUnderstood, match="neither causal nor a causal window"):
        Masks(t.functions).window(flipped, lambda value: value, "bool")


# ── patterns ──


def lifted() -> Builder:
    return Builder(Graph("lifted"), "fp64")


def leaf(builder: Builder, key: str, *shape) -> str:
    return builder.emit("weight", (), {"key": key}, TensorType(shape, "fp64"))


def value(builder: Builder, key: str, *shape) -> str:
    """Some activation."""
    token = builder.emit("token", (), {}, TensorType((T,), "int64"))
    return builder.emit("embed", (token, leaf(builder, key, 9, shape[-1])), {}, TensorType((T, *shape), "fp64"))


def test_matching_knows_commutativity_and_repeated_variables():
    builder = lifted()
    x, y = value(builder, "x", 6), value(builder, "y", 6)
    gate = builder.like("activation", (x,), fn="sigmoid")
    pattern = p("mul", "a", p("activation", "a", fn=Bind("fn")))
    for operands in ((x, gate), (gate, x)):
        assert list(match(builder.graph, builder.like("mul", operands), pattern, {})) == [{"a": x, "fn": "sigmoid"}]
    assert not list(match(builder.graph, builder.like("mul", (y, gate)), pattern, {}))


def test_equal_nodes_are_made_once():
    builder = lifted()
    x = value(builder, "x", 6)
    assert builder.lanes(x, 2) == builder.lanes(x, 2) != builder.lanes(x, 3)


def test_rewriting_reaches_nodes_that_rewrites_make():
    """(x · w) · rsqrt(…) becomes a norm with its scale in one pass, through two rewrites that were not there before."""
    builder = lifted()
    x, w = value(builder, "x", 6), leaf(builder, "w", 6)
    mean = builder.like("lift.mean", (builder.like("mul", (x, x)),))
    inverse = builder.like("lift.fn", (builder.like("lift.add_scalar", (mean,), number=1e-6),), fn="rsqrt")
    builder.graph.outputs = (builder.like("mul", (builder.like("lift.vec_mul", (x, w)), inverse)),)
    graph = builder.graph
    for table in TABLES:
        graph = rewritten(graph, table)
    (result,) = graph.outputs
    assert graph[result].op == "rms_norm" and dict(graph[result].attrs) == {"eps": 1e-6}


def test_a_mean_with_another_count_is_no_norm():
    builder = lifted()
    x = value(builder, "x", 6)
    mean = builder.like("scale", (builder.like("lift.sum", (builder.like("mul", (x, x)),)),), factor=0.25)
    inverse = builder.like("lift.fn", (builder.like("lift.add_scalar", (mean,), number=1e-6),), fn="rsqrt")
    builder.graph.outputs = (builder.like("mul", (x, inverse)),)
    graph = builder.graph
    for table in TABLES:
        graph = rewritten(graph, table)
    assert any(node.op == "lift.sum" for node in graph)


# ── whole graphs ──


def step(t: Tensors, append_at: str = "position") -> Tensors:
    """Embedding, one cache written, attention of one head without rope."""
    x = t.call("aten.embedding", (TOKENS, 8), "fp64", t.leaf("weight", (9, 8), key="emb"), "token")
    cache = t.leaf("cache", (1, CAPACITY, 8), key="k")
    row = t.call("aten.unsqueeze", (1, TOKENS, 8), "fp64", x, 0)
    after = t.call("aten.index_copy", (1, CAPACITY, 8), "fp64", cache, 1, append_at, row)
    y = t.call("aten.scaled_dot_product_attention", (1, TOKENS, 8), "fp64", row, after, after, mask(t, None))
    flat = t.call("aten.squeeze", (TOKENS, 8), "fp64", y, 0)
    logits = t.call("aten.linear", (TOKENS, 9), "fp64", flat, "emb")
    t.graph.outputs, t.graph.effects = (logits,), (after,)
    return t


def test_a_whole_step_by_hand():
    graph = recognize(step(Tensors()).graph)
    assert [n.op for n in graph if n.op not in ("weight", "cache", "token", "position")] == ["embed", "kv_append", "attention", "linear"]
    assert graph[graph.outputs[0]].type == TensorType((T, 9), "fp64")
    assert graph.effects == ("m.kv_append",)


def test_an_unknown_op_names_itself_its_module_and_its_line():
    t = step(Tensors())
    sorted_ = t.call("aten.sort", (TOKENS, 9), "fp64", t.graph.outputs[0])
    t.graph.outputs = (sorted_,)
    with pytest.raises(UnrecognizedOp, match=r"aten.sort \(n\d+\) in module m: no rule .* \(at model.py:\d+: aten.sort\)"):
        recognize(t.graph)


def test_a_cache_written_elsewhere_is_an_error():
    t = Tensors()
    later = t.call("aten.add", (TOKENS,), "int64", "position", 1)
    with pytest.raises(UnrecognizedOp, match="other than the step's positions"):
        recognize(step(t, later).graph)
