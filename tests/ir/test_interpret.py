"""The interpreter on a small decode graph and on hand-made tensor graphs."""

import numpy as np
import pytest

from kogc.ir.graph import Graph, GraphError, Node, Ref
from kogc.ir.interpret import interpret, run_sequence, weight_part, zero_caches
from kogc.ir.types import TensorType
from kogc.ir.weights import MappedWeights

VOCAB, WIDTH, CAPACITY = 7, 4, 6
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "embed": RANDOM.standard_normal((VOCAB, WIDTH), np.float32),
    "q": RANDOM.standard_normal((WIDTH, WIDTH), np.float32),
    "kv": RANDOM.standard_normal((2, WIDTH), np.float32),
    "norm": RANDOM.standard_normal(WIDTH, np.float32),
}


def decode_graph(dtype="fp32"):
    """Embedding, one attention layer with two query heads on one key/value head, tied head."""
    graph = Graph("decode")

    def add(name, op, inputs, shape, dtype=dtype, **attrs):
        graph.add(Node(name, op, tuple(inputs.split()), TensorType(shape, dtype), attrs, source=f"model.py:1: {name}"))

    add("token", "token", "", ("T",), "int64")
    add("position", "position", "", ("T",), "int64")
    for key, value in WEIGHTS.items():
        add(f"w_{key}", "weight", "", value.shape, key=key)
    for name in ("keys", "values"):
        add(name, "cache", "", (1, CAPACITY, 2), key=name)
    add("x", "embed", "token w_embed", ("T", WIDTH))
    add("normed", "rms_norm", "x w_norm", ("T", WIDTH), eps=1e-5)
    add("query", "linear", "normed w_q", ("T", WIDTH))
    add("kv", "linear", "normed w_kv", ("T", 2))
    add("keys_after", "kv_append", "keys kv position", (1, CAPACITY, 2))
    add("values_after", "kv_append", "values kv position", (1, CAPACITY, 2))
    add("mixed", "attention", "query keys_after values_after position", ("T", WIDTH), heads=2, kv_heads=1, head_dim=2, scale=0.5)
    add("sum", "add", "x mixed", ("T", WIDTH))
    add("logits", "linear", "sum w_embed", ("T", VOCAB))
    graph.outputs, graph.effects = ("logits",), ("keys_after", "values_after")
    return graph


def by_hand(tokens):
    w = {key: value.astype(np.float64) for key, value in WEIGHTS.items()}
    x = w["embed"][tokens]
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["norm"]
    query, kv = (normed @ w["q"].T).reshape(-1, 2, 2), normed @ w["kv"].T
    rows = []
    for t in range(len(tokens)):
        scores = query[t] @ kv[: t + 1].T * 0.5
        weights = np.exp(scores)
        rows.append(x[t] + (weights / weights.sum(-1, keepdims=True) @ kv[: t + 1]).reshape(-1))
    return np.array(rows) @ w["embed"].T


@pytest.mark.parametrize("step", [1, 2, None])
def test_decode_graph_in_steps_of_any_size(step):
    got = run_sequence(decode_graph(), [1, 5, 0, 3, 3], MappedWeights(WEIGHTS), step_tokens=step)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, by_hand([1, 5, 0, 3, 3]), rtol=1e-12)


def test_caches_are_new_arrays():
    graph = decode_graph()
    before = zero_caches(graph)
    result = interpret(graph, [1], [2], MappedWeights(WEIGHTS), before)
    assert not before["keys"].any()
    assert result.caches["keys"][0, 2].any() and not result.caches["keys"][0, [0, 1, 3]].any()
    assert list(result.values) == ["logits"] and result.output.shape == (1, VOCAB)


def test_want_evaluates_only_what_it_needs():
    read = []

    class Watched(MappedWeights):
        def get(self, key):
            read.append(key)
            return super().get(key)

    graph = decode_graph()
    result = interpret(graph, [1], [0], Watched(WEIGHTS), {}, want=("normed", "x"))
    assert list(result.values) == ["normed", "x"] and read == ["embed", "norm"]
    np.testing.assert_array_equal(result.values["x"], WEIGHTS["embed"][[1]])


def test_override_replaces_a_node_and_what_it_needs():
    graph = decode_graph()
    weights = MappedWeights({key: value for key, value in WEIGHTS.items() if key in ("embed", "kv")})
    overrides = {"normed": np.ones((1, WIDTH)), "mixed": np.ones((1, WIDTH))}
    result = interpret(graph, [1], [0], weights, zero_caches(graph), overrides=overrides)
    want = (WEIGHTS["embed"][1].astype(np.float64) + 1) @ WEIGHTS["embed"].astype(np.float64).T
    np.testing.assert_allclose(result.output[0], want, rtol=1e-12)


def test_faithful_mode_rounds_every_result():
    graph = decode_graph("bf16")
    result = interpret(graph, [1], [0], MappedWeights(WEIGHTS), zero_caches(graph, "faithful"), "faithful", want=("x", "sum"))
    assert {str(value.dtype) for value in result.values.values()} == {"bfloat16"}


def tensor_graph(*nodes):
    """``nodes``: (name, op, inputs, type, args) after the leaves token, position [1] and the table ``angles`` [1, 3]."""
    graph = Graph("tensor")
    graph.add(Node("token", "token", (), TensorType((1,), "int64")))
    graph.add(Node("position", "position", (), TensorType((1,), "int64")))
    graph.add(Node("angles", "table", (), TensorType((1, 3), "fp32"), {"key": "angles"}))
    graph.add(Node("w", "weight", (), TensorType((1, 3), "fp32"), {"key": "w"}))
    graph.tables["angles"] = np.array([[0.1, 0.2, 0.3]], np.float32)
    for name, op, inputs, kind, args in nodes:
        attrs = {"args": args, "kwargs": {}}
        graph.add(Node(name, op, tuple(inputs.split()), TensorType.parse(kind), attrs, "model.py:3: f(x)"))
    return graph


def test_what_depends_on_inputs_alone_keeps_its_declared_dtype():
    graph = tensor_graph(
        ("cos", "aten.cos", "angles", "fp32[1, 3]", (Ref(0),)),
        ("narrow", "aten.to", "w", "bf16[1, 3]", (Ref(0), "bf16")),
        ("y", "aten.mul", "narrow cos", "bf16[1, 3]", (Ref(0), Ref(1))),
    )
    weights = {"w": np.array([[1 / 3] * 3])}
    got = interpret(graph, [0], [0], MappedWeights(weights), {}, want=("cos", "y")).values
    assert got["cos"].dtype == np.float32
    np.testing.assert_array_equal(got["y"], np.cos(graph.tables["angles"]).astype(np.float64) * (1 / 3))


def test_errors_name_node_types_and_source():
    graph = tensor_graph(("y", "aten.matmul", "w angles", "fp32[1, 1]", (Ref(0), Ref(1))))
    with pytest.raises(GraphError, match=r"y = aten.matmul\(fp32\[1, 3\], fp32\[1, 3\]\) cannot be evaluated.*model.py:3: f\(x\)"):
        interpret(graph, [0], [0], MappedWeights({"w": np.ones((1, 3))}), {}, want=("y",))
    graph = tensor_graph(("y", "aten.cos", "angles", "fp32[3]", (Ref(0),)))
    with pytest.raises(GraphError, match=r"y \(aten.cos\) has shape \[1, 3\], its type is fp32\[3\] \(at model.py:3"):
        interpret(graph, [0], [0], MappedWeights({}), {}, want=("y",))


def test_parts_of_a_weight():
    def leaf(shape, **attrs):
        return Node("w", "weight", (), TensorType(shape, "fp32"), {"key": "w", **attrs})

    stored = np.arange(12).reshape(2, 2, 3)
    np.testing.assert_array_equal(weight_part(leaf((4, 3)), stored), stored.reshape(4, 3))
    np.testing.assert_array_equal(weight_part(leaf((2, 3, 2), transpose=True), stored), stored.swapaxes(1, 2))
    np.testing.assert_array_equal(weight_part(leaf((5,), rows=(2, 7)), stored), np.arange(2, 7))
    np.testing.assert_array_equal(weight_part(leaf((2, 3), rows=(2, 5)), stored), [[2, 3, 4], [8, 9, 10]])
    with pytest.raises(GraphError, match=r"weight w \[2, 2, 3\] does not make w: fp32\[5, 3\]"):
        weight_part(leaf((5, 3)), stored)
