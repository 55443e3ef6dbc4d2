"""Programs and graphs as canonical JSON: equal values give equal text, and text gives back equal values."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

from kogc.ir.graph import Graph, Node, Ref
from kogc.ir.program import Program
from kogc.ir.types import TensorType

#: Raised whenever the meaning of the text changes; readers refuse other numbers.
PROGRAM_SCHEMA = 3
GRAPH_SCHEMA = 1


class SerializeError(ValueError):
    """JSON that is not what it should be; the message says where."""


def to_json(program: Program) -> str:
    """``program`` as one line of JSON with sorted keys."""
    return _dump({"schema": PROGRAM_SCHEMA, "program": _plain(program)})


def from_json(text: str) -> Program:
    """The program that ``to_json`` wrote.

    Raises:
        SerializeError: the text is no JSON, of another schema, or lacks fields.
    """
    return _typed(_load(text, "program", PROGRAM_SCHEMA), Program, "program")


def graph_to_json(graph: Graph) -> str:
    """``graph`` as one line of JSON. Numeric tables stay outside; their keys are in the table nodes."""
    nodes = [
        {
            "name": node.name, "op": node.op, "inputs": list(node.inputs), "type": str(node.type),
            "attrs": {key: _tagged(value) for key, value in node.attrs.items()}, "source": node.source, "module": node.module,
        }
        for node in graph
    ]  # fmt: skip
    body = {
        "level": graph.level, "name": graph.name, "nodes": nodes, "outputs": list(graph.outputs),
        "effects": list(graph.effects), "tables": sorted(graph.tables), "meta": _tagged(graph.meta),
    }  # fmt: skip
    return _dump({"schema": GRAPH_SCHEMA, "graph": body})


def graph_from_json(text: str, tables: Mapping[str, np.ndarray] | None = None) -> Graph:
    """The graph that ``graph_to_json`` wrote, with its ``tables`` taken by key from the mapping.

    Raises:
        SerializeError: the text is no JSON, of another schema, incomplete, or a table is missing.
    """
    body = _load(text, "graph", GRAPH_SCHEMA)
    try:
        graph = Graph(body["level"], body["name"])
        missing = [key for key in body["tables"] if key not in (tables or {})]
        if missing:
            raise SerializeError(f"graph {graph.name} needs the tables {', '.join(missing)}")
        graph.tables = {key: tables[key] for key in body["tables"]}
        graph.meta = _untagged(body["meta"])
        for node in body["nodes"]:
            attrs = {key: _untagged(value) for key, value in node["attrs"].items()}
            kind = TensorType.parse(node["type"])
            graph.add(Node(node["name"], node["op"], tuple(node["inputs"]), kind, attrs, node["source"], node["module"]))
        graph.outputs, graph.effects = tuple(body["outputs"]), tuple(body["effects"])
    except (KeyError, TypeError, AttributeError) as error:
        raise SerializeError(f"graph is incomplete: {error!r}") from error
    return graph


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _load(text: str, what: str, schema: int) -> Any:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise SerializeError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != schema:
        number = found.get("schema") if isinstance(found, dict) else None
        cure = "upgrade kogc" if isinstance(number, int) and number > schema else "compile the model again"
        raise SerializeError(f"{what} has schema {number}, this kogc reads {schema}; {cure}")
    if what not in found:
        raise SerializeError(f"{what} is missing")
    return found[what]


# ── dataclasses, by their annotations ──


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def _typed(value: Any, kind: Any, where: str) -> Any:
    """``value`` as an instance of the annotation ``kind``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _typed(value, args[0], where)
    if origin is tuple:
        _expect(isinstance(value, list), where, "a list", value)
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        _expect(len(kinds) == len(value), where, f"{len(kinds)} entries", value)
        return tuple(_typed(entry, k, f"{where}[{i}]") for i, (entry, k) in enumerate(zip(value, kinds, strict=True)))
    if dataclasses.is_dataclass(kind):
        return _built(value, kind, where)
    if origin is not None:  # attributes and facts: any JSON
        _expect(isinstance(value, dict), where, "an object", value)
        return value
    number = kind is float and isinstance(value, int)
    _expect((number or isinstance(value, kind)) and not (kind is int and isinstance(value, bool)), where, kind.__name__, value)
    return float(value) if number else value


def _built(value: Any, kind: type, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    hints = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    if names != set(value):
        raise SerializeError(f"{where}: fields missing {sorted(names - set(value))}, unknown {sorted(set(value) - names)}")
    return kind(**{name: _typed(value[name], hints[name], f"{where}.{name}") for name in names})


def _expect(condition: bool, where: str, wanted: str, value: Any) -> None:
    if not condition:
        raise SerializeError(f"{where}: expected {wanted}, found {str(value)[:60]!r}")


# ── node attributes and facts, which may hold tuples, types and operand references ──


def _tagged(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"$ref": value.index}
    if isinstance(value, TensorType):
        return {"$type": str(value)}
    if isinstance(value, np.generic):
        return _tagged(value.item())
    if isinstance(value, tuple):
        return {"$tuple": [_tagged(entry) for entry in value]}
    if isinstance(value, list):
        return [_tagged(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _tagged(entry) for key, entry in value.items()}
    if isinstance(value, float) and not np.isfinite(value):
        return {"$float": repr(value)}
    return value


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$ref"}:
        return Ref(value["$ref"])
    if value.keys() == {"$type"}:
        return TensorType.parse(value["$type"])
    if value.keys() == {"$tuple"}:
        return tuple(_untagged(entry) for entry in value["$tuple"])
    if value.keys() == {"$float"}:
        return float(value["$float"])
    return {key: _untagged(entry) for key, entry in value.items()}
