"""JSON of programs and graphs: canonical, complete, and refused when it is not what it should be."""

import json

import numpy as np
import pytest
from decode_builder import laneformer, llama
from plan_check import TOKENS, expected_logits, rolled

from kogc.ir.graph import Graph, Node, Ref
from kogc.ir.interpret import run_sequence
from kogc.ir.passes.fuse import fuse
from kogc.ir.passes.roll_interpret import interpret_program
from kogc.ir.passes.separate_combine import separate_combine
from kogc.ir.serialize import SerializeError, from_json, graph_from_json, graph_to_json, to_json
from kogc.ir.types import TensorType


@pytest.mark.parametrize("built", [llama(bias=True, windows={1: 3}), laneformer(early=True, delay=2, head="vocab_parallel")])
def test_a_program_comes_back_equal_and_gives_the_same_text(built):
    program = rolled(built, splits=2)
    text = to_json(program)
    again = from_json(text)
    assert again == program
    assert to_json(again) == text
    found = interpret_program(again, built.weights, built.graph.tables, TOKENS)
    np.testing.assert_allclose(found, expected_logits(built), atol=1e-9)


def test_a_program_with_combine_stages_comes_back_equal():
    program = separate_combine(rolled(laneformer(), splits=2), 0)
    assert any(stage.combine for *_, stage in program.instances())
    assert from_json(to_json(program)) == program


def test_a_graph_comes_back_with_its_tables_by_key():
    built = laneformer()
    graph = fuse(built.graph, 2).graph
    text = graph_to_json(graph)
    again = graph_from_json(text, graph.tables)
    assert list(again) == list(graph)
    assert (again.outputs, again.effects, again.meta, again.level) == (graph.outputs, graph.effects, graph.meta, graph.level)
    assert graph_to_json(again) == text
    np.testing.assert_array_equal(run_sequence(again, TOKENS, built.weights), run_sequence(graph, TOKENS, built.weights))


def test_attributes_keep_tuples_references_types_and_odd_floats():
    graph = Graph("tensor")
    graph.meta = {"capacity": 8, "where": ("a", None)}
    attrs = {"args": (Ref(0), [1, (2.5, True)], {"dim": None}), "kind": TensorType(("T", 3), "fp16")}
    attrs |= {"low": float("-inf"), "n": np.int64(3)}
    graph.add(Node("x", "token", (), TensorType(("T",), "int64"), attrs, "m.py:1: x", "net"))
    (node,) = graph_from_json(graph_to_json(graph))
    assert node == graph["x"]
    assert isinstance(node.attrs["args"], tuple)
    assert graph_from_json(graph_to_json(graph)).meta == graph.meta


def test_tables_are_not_in_the_text_and_must_be_given():
    text = graph_to_json(llama().graph)
    assert len(json.loads(text)["graph"]["tables"]) == 2
    with pytest.raises(SerializeError, match="needs the tables cos, sin"):
        graph_from_json(text)


def changed(text, change):
    value = json.loads(text)
    change(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(schema=99), "program has schema 99, this kogc reads 3; upgrade kogc"),
        (lambda v: v.update(schema=2), "program has schema 2, this kogc reads 3; compile the model again"),
        (lambda v: v.pop("program"), "program is missing"),
        (lambda v: v["program"].pop("dtype"), r"program: fields missing \['dtype'\]"),
        (lambda v: v["program"].update(extra=1), r"unknown \['extra'\]"),
        (lambda v: v["program"].update(vocab="many"), r"program.vocab: expected int, found 'many'"),
        (lambda v: v["program"]["segments"][0].update(count=True), r"program.segments\[0\].count: expected int"),
        (lambda v: v["program"].update(buffers={}), "program.buffers: expected a list"),
        (lambda v: v["program"].update(meta=[]), "program.meta: expected an object"),
    ],
)
def test_a_damaged_program_is_refused_with_the_place(change, message):
    with pytest.raises(SerializeError, match=message):
        from_json(changed(to_json(rolled(llama(layers=1))), change))


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_other_text_is_refused(text):
    with pytest.raises(SerializeError):
        from_json(text)
    with pytest.raises(SerializeError):
        graph_from_json(text)


def test_an_incomplete_graph_is_refused():
    graph = llama().graph
    text = changed(graph_to_json(graph), lambda v: v["graph"]["nodes"][0].pop("op"))
    with pytest.raises(SerializeError, match="incomplete"):
        graph_from_json(text, graph.tables)
