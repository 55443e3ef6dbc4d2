"""Leaves: values that come from outside the step. The interpreter binds them; they have nothing to evaluate."""

from __future__ import annotations

from kogc.ir.ops import OpRow, register


def _bound(operands, attrs):
    raise AssertionError("leaves are bound by the interpreter")


def _leaf(name: str, attrs: dict[str, str], doc: str) -> None:
    register(OpRow(name, (), attrs, lambda types, attrs: None, _bound, "leaf", doc))


_leaf("token", {}, "Token ids of the step, int64[T].")
_leaf("position", {}, "Context position of every token of the step, int64[T].")
_leaf("weight", {"key": "str"}, "A weight tensor, named by its key in the weight source.")
_leaf("table", {"key": "str"}, "A numeric table of the graph whose first axis is the position.")
_leaf("cache", {"key": "str"}, "A KV cache [kv_heads, capacity, head_dim] that lives across steps; zero at the start.")
