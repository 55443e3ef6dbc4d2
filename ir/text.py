"""A graph as text a person reads and ``parse`` reads back.

One line a node, ``name: type = op(operands) attr=value``. A line ``-- module -- file:line: code`` says where in the user's
model the nodes below it come from, and holds until the next such line.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kogc.ir.graph import Graph, Node, Ref
from kogc.ir.types import TensorType

_HEAD = re.compile(r"graph (?P<level>\w+) (?P<name>.+)")
_META = re.compile(r"meta (?P<key>\S+) = (?P<value>.+)")
_TABLE = re.compile(r"table (?P<key>\S+): (?P<type>\w+\[[^]]*\]) (?P<digest>[0-9a-f]{16})")
_FROM = re.compile(r" *-- (?P<module>.*?) -- (?P<source>.*)")
_NODE = re.compile(r" *(?P<name>[^\s:]+): (?P<type>\w+\[[^]]*\]) = (?P<op>[\w.]+)\((?P<inputs>[^)]*)\)(?: (?P<attrs>.+))?")
_UNKNOWN = "?"
_ENDS = re.compile(r"(?P<what>outputs|effects) ?(?P<names>.*)")


class TextError(ValueError):
    """Text that is not a graph; the message has the line number and the line."""


def to_text(graph: Graph) -> str:
    """The graph as text. Tables are named by type and digest; their numbers are not in the text."""
    return "\n".join(_lines(graph)) + "\n"


def parse(text: str, tables: Mapping[str, np.ndarray] | None = None) -> Graph:
    """Read back what ``to_text`` wrote.

    Args:
        text: the graph.
        tables: numbers of the tables by key. Without them the graph has none and cannot be interpreted, only looked at.

    Raises:
        TextError: a line is not understood, or a given table is not the one the text was made with.
        GraphError: the nodes do not form a graph.
    """
    reader = _Reader(tables)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                reader.take(line)
            except (ValueError, SyntaxError) as error:
                raise TextError(f"line {number}: {error}: {line.strip()}") from error
    return reader.finish()


# ── writing ──


def _lines(graph: Graph) -> Iterator[str]:
    yield f"graph {graph.level} {graph.name}"
    for key, value in graph.meta.items():
        yield f"meta {key} = {_write(value)}"
    for key, table in graph.tables.items():
        yield f"table {key}: {_type_of(table)} {_digest(table)}"
    origin: tuple[str | None, str | None] = (None, None)
    for node in graph:
        if (node.module, node.source) != origin:
            origin = (node.module, node.source)
            yield ""
            yield f"  -- {_shown(node.module)} -- {_shown(node.source)}"
        yield f"  {_node_text(node)}"
    yield ""
    yield f"outputs {', '.join(graph.outputs)}".rstrip()
    yield f"effects {', '.join(graph.effects)}".rstrip()


def _shown(text: str | None) -> str:
    return _UNKNOWN if text is None else text


def _node_text(node: Node) -> str:
    attrs = " ".join(f"{key}={_write(value)}" for key, value in node.attrs.items())
    return f"{node.name}: {node.type} = {node.op}({', '.join(node.inputs)}) {attrs}".rstrip()


def _write(value: Any) -> str:
    """A value as a Python expression; operands are ``Ref(i)``, types are ``Type('…')``."""
    if isinstance(value, Ref):
        return f"Ref({value.index})"
    if isinstance(value, TensorType):
        return f"Type({str(value)!r})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_write(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_write(item)}, " for item in value).rstrip(" " if len(value) == 1 else ", ") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_write, value)) + "]"
    if isinstance(value, np.generic):
        return repr(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise TypeError(f"a {type(value).__name__} has no text form: {value!r}")


def _type_of(table: np.ndarray) -> TensorType:
    names = {np.dtype(np.float64): "fp64", np.dtype(np.float32): "fp32", np.dtype(np.float16): "fp16"}
    names |= {np.dtype(np.int64): "int64", np.dtype(np.int32): "int32", np.dtype(np.bool_): "bool"}
    names |= {np.dtype(np.complex64): "complex64", np.dtype(np.complex128): "complex128"}
    return TensorType(table.shape, names.get(table.dtype, "bf16"))


def _digest(table: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(table).tobytes()).hexdigest()[:16]


# ── reading ──


class _Reader:
    def __init__(self, tables: Mapping[str, np.ndarray] | None) -> None:
        self._given = tables
        self._graph: Graph | None = None
        self._origin: tuple[str | None, str | None] = (None, None)

    def take(self, line: str) -> None:
        if self._graph is None:
            head = _HEAD.fullmatch(line)
            if not head:
                raise ValueError("a graph begins with `graph LEVEL NAME`")
            self._graph = Graph(head["level"], head["name"])
        elif found := _META.fullmatch(line):
            self._graph.meta[found["key"]] = _read(found["value"])
        elif found := _TABLE.fullmatch(line):
            self._table(found["key"], TensorType.parse(found["type"]), found["digest"])
        elif found := _FROM.fullmatch(line):
            self._origin = tuple(None if text == _UNKNOWN else text for text in (found["module"], found["source"]))
        elif found := _NODE.fullmatch(line):
            self._graph.add(self._node(found))
        elif found := _ENDS.fullmatch(line):
            setattr(self._graph, found["what"], _names(found["names"]))
        else:
            raise ValueError("not understood")

    def finish(self) -> Graph:
        if self._graph is None:
            raise TextError("the text is empty")
        for name in (*self._graph.outputs, *self._graph.effects):
            if name not in self._graph:
                raise TextError(f"result {name} is not in the graph")
        return self._graph

    def _table(self, key: str, kind: TensorType, digest: str) -> None:
        if self._given is None:
            return
        table = self._given.get(key)
        if table is None:
            raise ValueError(f"table {key} was not given")
        if _type_of(table) != kind or _digest(table) != digest:
            raise ValueError(f"the given table {key} is not the one of the text")
        self._graph.tables[key] = table

    def _node(self, found: re.Match[str]) -> Node:
        module, source = self._origin
        kind = TensorType.parse(found["type"])
        return Node(found["name"], found["op"], _names(found["inputs"]), kind, _attrs(found["attrs"]), source, module)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _attrs(text: str | None) -> dict[str, Any]:
    """``a=1 b='x y'`` as a dict: each value ends where Python can parse it and another ``name=`` or the end follows."""
    attrs: dict[str, Any] = {}
    while text:
        key, equals, rest = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"attributes are name=value, not {text}")
        attrs[key], text = _read_first(rest)
    return attrs


def _read_first(text: str) -> tuple[Any, str]:
    for cut in re.finditer(r" (?=[^\W\d]\w*=)|$", text):
        try:
            return _read(text[: cut.start()]), text[cut.end() :]
        except SyntaxError:
            continue
    raise ValueError(f"not a value: {text}")


def _read(text: str) -> Any:
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return getattr(math, node.id)
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    if isinstance(node, ast.List):
        return list(map(_value, node.elts))
    if isinstance(node, ast.Dict):
        return {_value(key): _value(item) for key, item in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        if node.func.id == "Ref":
            return Ref(_value(node.args[0]))
        if node.func.id == "Type":
            return TensorType.parse(_value(node.args[0]))
    raise ValueError(f"not a value: {ast.unparse(node)}")
