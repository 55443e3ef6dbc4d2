"""Rows of a table by token id or by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context, rule
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Layout
from kogc.ir.passes.recognize.rules.movement import pending
from kogc.ir.passes.recognize.values import Act, Pending, Space, Static, Token, Value, Weight
from kogc.ir.types import TensorType


@rule("embedding")
def embedding(context: Context, node: Node, table: Value, ids: Value, *_: Any) -> Value:
    return _rows(context, node, table, ids)


@rule("index")
def index(context: Context, node: Node, x: Value, indices: Sequence[Value | None]) -> Value:
    if isinstance(x, Act | Pending):
        return pending(node, x)
    if len(indices) != 1:
        raise NotUnderstood("several dimensions are indexed at once")
    return _rows(context, node, x, indices[0])


@rule("index_select")
def index_select(context: Context, node: Node, x: Value, dim: int, ids: Value) -> Value:
    if isinstance(x, Act | Pending):
        return pending(node, x)
    if dim != 0:
        raise NotUnderstood("a table is indexed along another axis than its first")
    return _rows(context, node, x, ids)


def _rows(context: Context, node: Node, table: Value, ids: Value) -> Act:
    if not isinstance(table, Weight) or table.layout != Layout.contiguous(table.stored) or len(table.stored) != 2 or table.offset:
        raise NotUnderstood("only a weight [rows, features] can be looked up")
    if isinstance(ids, Token):
        leaf = context.leaf("token")
    elif isinstance(ids, Static) and context.functions.is_position(ids.name):
        leaf = context.leaf("position")
    else:
        raise NotUnderstood("the rows of an embedding are chosen by something other than token ids or positions")
    weight = context.leaf("weight", table.leaf, TensorType(table.stored, context.graph_dtype(table.leaf)))
    return _embedded(context, node, leaf, weight, table.stored[1])


def add_table(context: Context, node: Node, x: Act, function: Static) -> Act:
    """x plus a position function [T, features]: an embedding of the position in a table of its own."""
    values = context.functions.tabulate(function.name)
    if values is None or values[0].size != x.space.features:
        raise NotUnderstood("something computed from the position is added that is not one vector of features per token")
    values = np.ascontiguousarray(values.reshape(values.shape[0], -1))
    leaf = context.table("position_embedding", values.astype(np.float64 if values.dtype == np.float64 else np.float32))
    return _embedded(context, node, context.leaf("position"), leaf, values.shape[1])


def _embedded(context: Context, node: Node, ids: str, table: str, features: int) -> Act:
    space = Space(context.tokens, None, features)
    layout = Layout.contiguous(space.shape).reshaped(node.type.shape)
    return context.act("embed", (ids, table), {}, space, layout, node)
