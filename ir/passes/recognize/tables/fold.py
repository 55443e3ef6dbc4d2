"""Last touches: biases into linear ops, factors into attention, gates, and differences."""

from __future__ import annotations

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.lifted import Builder
from kogc.ir.passes.recognize.match import Bind, Found, Rewrite, p
from kogc.ir.types import TensorType


def _bias(builder: Builder, node: Node, found: Found) -> str:
    x, bias = builder[found["x"]].type, builder[found["b"]].type
    kind = TensorType((*x.shape[:-1], bias.shape[-1]), x.dtype)
    return builder.emit("linear", (found["x"], found["w"], found["b"]), {"rows": found["rows"]}, kind, node)


def _gate(builder: Builder, node: Node, found: Found) -> str:
    return builder.like("gated_activation", (found["gate"], found["up"]), node, fn=found["fn"])


def _scales(builder: Builder, node: Node, found: Found) -> str:
    return builder.like("scale", (found["x"],), node, factor=found["a"] * found["b"])


_ROPE = {name: Bind(name) for name in ("style", "head_dim", "rotary_dim")}


def _rope_of_scaled(builder: Builder, node: Node, found: Found) -> str:
    attrs = {name: found[name] for name in _ROPE}
    turned = builder.like("rope", tuple(found[name] for name in ("x", "cos", "sin", "position")), node, **attrs)
    return builder.like("scale", (turned,), node, factor=found["factor"])


_ATTENTION = {name: Bind(name) for name in ("heads", "kv_heads", "head_dim", "window", "softcap", "scale")}


def _attention_of_scaled(builder: Builder, node: Node, found: Found) -> str | None:
    if found["factor"] <= 0:
        return None
    attrs = {name: found[name] for name in _ATTENTION} | {"scale": found["scale"] * found["factor"]}
    return builder.like("attention", tuple(found[name] for name in ("q", "keys", "values", "position")), node, **attrs)


def _difference(builder: Builder, node: Node, found: Found) -> str:
    return builder.like("add", (found["a"], builder.like("scale", (found["b"],), node, factor=-1.0)), node)


FOLD = (
    Rewrite("bias", p("lift.vec_add", p("linear", "x", "w", rows=Bind("rows")), "b", offset=None, group=None), _bias),
    Rewrite("factors", p("scale", p("scale", "x", factor=Bind("a")), factor=Bind("b")), _scales),
    Rewrite(
        "rope of a scaled vector",
        p("rope", p("scale", "x", factor=Bind("factor")), "cos", "sin", "position", **_ROPE),
        _rope_of_scaled,
    ),
    Rewrite(
        "attention of a scaled query",
        p("attention", p("scale", "q", factor=Bind("factor")), "keys", "values", "position", **_ATTENTION),
        _attention_of_scaled,
    ),
    Rewrite("gate", p("mul", p("activation", "gate", fn=Bind("fn")), "up"), _gate),
    Rewrite("difference", p("lift.sub", "a", "b"), _difference),
)
